"""einops in a step: its functions and layers are in the graph, also with sizes that vary.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

from __future__ import annotations

import plain_python
import pytest
import torch
from tables import ROWS, hold, net
from torch import nn

einops = pytest.importorskip("einops")
from einops import einsum, pack, parse_shape, rearrange, reduce, repeat, unpack  # noqa: E402
from einops.layers.torch import EinMix, Rearrange, Reduce  # noqa: E402


def heads():
    m = net()

    def step(x):
        h = rearrange(m[0](x), "b (h d) -> b h d", h=2)
        return rearrange(h, "b h d -> (b h) d").sum(0), rearrange(h, "b h d -> h b d"), rearrange(x, "b ... -> ... b")

    return step, [m]


def repeated_and_reduced():
    m = net()

    def step(x):
        y = m(x)
        smallest = reduce(y, "b (d two) -> b d", "min", two=2)
        return repeat(y, "b d -> b k d", k=3), reduce(y, "b d -> b", "mean"), reduce(y, "b d -> ()", "sum"), smallest

    return step, [m]


def contracted():
    m = net()
    return lambda x: einsum(x, m[0].weight, "b d, e d -> b e"), [m]


def stacked():
    def step(x):
        both = rearrange([x, x * 2], "k b d -> b (k d)")
        return both, parse_shape(x, "b d")["d"], rearrange(both, "b (k d) -> k b d", k=2)[1]

    return step, []


def packed():
    def step(x):
        together, shapes = pack([x, x.sum(0)], "* d")
        rows, row = unpack(together, shapes, "* d")
        return together, rows * 2, row

    return step, []


def layers():
    m = nn.Sequential(nn.Linear(4, 8), Rearrange("b (h d) -> b h d", h=2), Reduce("b h d -> b d", "mean"))
    optimizer = torch.optim.AdamW(m.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, [m]


def mixed():
    m = EinMix("b d -> b e", weight_shape="d e", bias_shape="e", d=4, e=3)
    return lambda x: m(x), [m]


def by_a_size():
    return lambda x: repeat(x.sum(0), "d -> b d", b=x.shape[0]) * rearrange(x, "b d -> b d", b=x.shape[0]), []


def wrong():
    def step(x):
        try:
            return rearrange(x, "a b c -> c b a")
        except einops.EinopsError:
            return x * 2

    return step, []


def wrong_size():
    def step(x):
        try:
            return rearrange(x, "b (h d) -> b h d", h=3)
        except einops.EinopsError:
            return x * 3

    return step, []


@pytest.mark.parametrize(
    "recipe",
    [heads, repeated_and_reduced, contracted, stacked, packed, layers, mixed, by_a_size, wrong, wrong_size],
    ids=lambda r: r.__name__,
)
def test_captured(recipe):
    hold(recipe, None)
    plain_python.compare(recipe, backend="eager", sizes=ROWS)
