"""Inputs whose number of rows is 1 in some calls and more in others, each of several by itself: plain Python's results,
strides and errors, and no capture for each combination.

What is done with each × how often there is one row, or none.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats


def or_zero(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return function(x)
        except (RuntimeError, IndexError, ValueError):
            return torch.zeros(1)

    return run


def written_through(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.t().reshape(-1).add_(1)
    return y


# What is otherwise for one row than for more: such a call is a capture of its own, or a branch.
APART: dict[str, Callable[[torch.Tensor], Any]] = {
    "squeeze of an axis": lambda x: x.squeeze(0),
    "squeeze": lambda x: x.squeeze(),
    "squeeze of axes": lambda x: x.t().squeeze((0, 1)),
    "squeeze in place": lambda x: x.clone().squeeze_(0),
    "dim after squeeze": lambda x: x.squeeze(0).dim(),
    "unsqueezed and squeezed": lambda x: x.unsqueeze(0).squeeze(),
    "is it contiguous": lambda x: [x.is_contiguous(), x.t().is_contiguous(), x[:, :2].is_contiguous()],
    "strides": lambda x: [*x.stride(), *(x.t() + 1).stride(), *x.t().contiguous().stride()],
    "a view of columns": or_zero(lambda x: x.t().view(-1)),
    "broadcast against four": or_zero(lambda x: x + torch.ones(4, 3)),
    "expanded to four": or_zero(lambda x: x.expand(4, 3)),
    "written through a reshape": written_through,
    "asked for one": lambda x: x * 5 if len(x) == 1 else x,
    "asked for none": lambda x: x.new_zeros(3) if len(x) == 0 else x.mean(0),
    "asked for numbers": lambda x: x.new_zeros(3) if x.numel() == 0 else x.mean(0),
    "asked for its length": lambda x: x.mean(0) if len(x) else x.new_zeros(3),
    "maximum": or_zero(lambda x: x.max(0)[0]),
    "batch norm": or_zero(lambda x: F.batch_norm(x, None, None, training=True)),
    "last row": or_zero(lambda x: x[-1]),
    "numbers": lambda x: x.tolist(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "two rows": lambda x: x.topk(min(2, len(x)), 0)[0],
}
ALIKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all pairs": lambda x: torch.max(x[:, None, :2], x[:, :2]).sum(0),
    "cat": lambda x: torch.cat([x, x * 2]),
    "mean": lambda x: x.sum(0) / max(1, len(x)),
    "std": lambda x: x.std(0, unbiased=False),
    "products": lambda x: x @ x.T,
    "expanded one": lambda x: F.mse_loss(x, torch.ones(1, 3).expand(len(x), 3), reduction="sum"),
    "softmax": lambda x: x.softmax(0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(1, 3)),
    "bmm": lambda x: torch.bmm(x[:, None], x[:, :, None]),
    "layer norm": lambda x: F.layer_norm(x, (3,)),
    "flatten": lambda x: x.flatten(),
    "pad": lambda x: F.pad(x, (0, 0, 1, 0)),
    "repeat": lambda x: x.repeat(2, 1).view(2, -1, 3).sum(0),
    "rows from the second": lambda x: x[1:],
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0)[0],
    "one_hot": lambda x: F.one_hot((x[:, 0] > 0).long(), 2),
    "index_add": lambda x: torch.zeros(2, 3).index_add(0, (x[:, 0] > 0).long(), x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x)).long(), reduction="sum"),
    "masked": lambda x: x[x[:, 0] > 0].sum(0),
}
SIZES = {"one or more": (1, 2, 3, 4), "none, one or more": (0, 1, 1, 2, 4), "mostly one": (1, 1, 1, 2, 5)}


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.tolist(), value.requires_grad
    return [shown(one) for one in value] if isinstance(value, list) else value


@pytest.mark.share(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "sizes"), [*itertools.product(ALIKE | APART, SIZES)], ids=lambda name: name)
def test_each_of_several_has_one_row_or_more(name: str, sizes: str) -> None:
    function = (ALIKE | APART)[name]

    def step(xs: list[torch.Tensor], w: torch.Tensor) -> Any:
        found = [function(x * w) for x in xs]
        sums = [y.sum() for y in found if isinstance(y, torch.Tensor) and y.requires_grad]
        if sums:
            sum(sums).backward()
        return [y.detach() if isinstance(y, torch.Tensor) else y for y in found]

    captured, ways = capture(step, backend="eager"), []
    for run in (step, captured):
        draw, w, results = torch.Generator().manual_seed(0), torch.ones(3, requires_grad=True), []
        for _ in range(20):
            chosen = torch.randint(len(SIZES[sizes]), (3,), generator=draw)
            xs = [torch.randn(SIZES[sizes][i], 3, generator=draw) for i in chosen]
            with warnings.catch_warnings():
                # three inputs of which each decides among four ways have more of them than captures are kept
                warnings.filterwarnings("ignore", message="moebius: .* was captured 16 times and runs natively now")
                try:
                    results.append(shown(run(xs, w)))
                except Exception as error:
                    results.append((type(error).__name__, str(error)))
        ways.append([*results, shown(w.grad) if w.grad is not None else None])
    assert str(ways[0]) == str(ways[1])  # (text, as nan is not equal to itself)
    if name in ALIKE and sizes != "none, one or more":
        counts = stats(captured)
        assert (counts.breaks, counts.misses <= 8) == (0, True), counts
