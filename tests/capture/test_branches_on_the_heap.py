"""Branches on values that set items and attributes: one graph without a break, whichever way the data goes.

Where the value is kept × how the branch is written; what cannot be joined, and controls where a break is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats


class Holder:
    pass


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("found", torch.zeros(6))
        self.plain = Holder()
        self.plain.found = torch.zeros(6)


class Place:
    """Where a value is kept: read and set as a program writes it."""

    def __init__(self, x: torch.Tensor, module: Kept) -> None:
        self.list, self.dict, self.nested = [x, x * 2], {"a": x, "b": x + 1}, {"l": [x - 1]}
        self.module, self.plain = module, module.plain


PLACES = {
    "an item of a list": "p.list[1]",
    "the last item of a list": "p.list[-1]",
    "an item of a dict": "p.dict['b']",
    "an item of a list in a dict": "p.nested['l'][0]",
    "a buffer": "p.module.found",
    "an attribute": "p.plain.found",
}


def accesses(place: str) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """Functions that read the place and set it."""
    made: dict[str, Any] = {}
    exec(f"def get(p):\n    return {place}\ndef put(p, v):\n    {place} = v", made)
    return made["get"], made["put"]


def one_side(p, x, get, put):
    if x.sum() > 0:
        put(p, get(p) * 2 + x)


def both_sides(p, x, get, put):
    if x.sum() > 0:
        put(p, get(p) * 2)
    else:
        put(p, get(p) - 1)


def only_else(p, x, get, put):
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
        put(p, get(p) - y)
    put(p, get(p) + y)


def twice(p, x, get, put):
    if x.sum() > 0:
        put(p, get(p) * 2)
        put(p, get(p) + 1)


def set_before(p, x, get, put):
    put(p, x * 3)
    if x.sum() > 0:
        put(p, get(p) * 2)


def nested(p, x, get, put):
    if x.sum() > 0:
        if x[0] > 0:
            put(p, get(p) + 1)
        else:
            put(p, get(p) * 5)
    elif x[1] > 0:
        put(p, get(p) - 1)


def in_a_loop(p, x, get, put):
    for i in range(3):
        if x[i] < 0:
            continue
        put(p, get(p) + x[i])


def put_back_again(p, x, get, put):
    before = get(p)
    if x.sum() > 0:
        put(p, x)
        put(p, before)


def other_rows(p, x, get, put):
    put(p, x[x > 0])
    if len(get(p)) > 2:
        put(p, get(p)[:2])


def in_a_function(p, x, get, put):
    def clip() -> None:
        if x.sum() > 0:
            put(p, get(p).clamp(max=0.5))
            return
        put(p, get(p).clamp(min=-0.5))

    clip()


def a_local_too(p, x, get, put):
    y = x
    if x.sum() > 0:
        y = get(p) + 1
        put(p, y * 2)
    put(p, get(p) + y)


FORMS = [one_side, both_sides, only_else, twice, set_before, nested, in_a_loop, put_back_again, other_rows]
FORMS += [in_a_function, a_local_too]


def compare(step: Callable, seed: int = 0, calls: int = 24) -> Any:
    """Plain and captured, on the same data, from the same modules; returns what was counted."""
    captured, ways = {}, []
    for backend in (None, "eager", "moebius"):
        run, module = step, Kept()
        if backend is not None:
            run = captured[backend] = capture(lambda w, x, m: step(w, x, m), backend=backend)
        draw, results = torch.Generator().manual_seed(seed), []
        w = torch.ones(6, requires_grad=True)
        for _ in range(calls):
            w.grad = None
            results.append([*run(w, torch.randn(6, generator=draw), module), w.grad])
        ways.append((results, module.found, module.plain.found))
    plain, *others = ways
    for other in others:
        flat = [torch.utils._pytree.tree_leaves(way) for way in (plain, other)]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*flat, strict=True))
    return [stats(one) for one in captured.values()]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", value)


@pytest.mark.share(16)
@pytest.mark.parametrize(("place", "form"), [*itertools.product(PLACES, FORMS)], ids=name_of)
def test_one_graph_whichever_way_the_data_goes(place: str, form: Callable) -> None:
    get, put = accesses(PLACES[place])

    def step(w: torch.Tensor, x: torch.Tensor, module: Kept) -> tuple:
        p = Place(w * x, module)
        form(p, w * x, get, put)
        (get(p).sum() + sum(v.sum() for v in (*p.list, *p.dict.values()))).backward()
        with torch.no_grad():
            put(p, get(p).detach())
        return [v.detach() for v in p.list], {k: v.detach() for k, v in p.dict.items()}, p.nested["l"][0].detach()

    for counts in compare(step):
        assert (counts.breaks, counts.misses <= 3) == (0, True), counts


def test_a_place_that_held_no_tensor_goes_the_way_that_the_data_says() -> None:
    def step(w: torch.Tensor, x: torch.Tensor, module: Kept) -> tuple:
        parts: list = [None, w * x]
        if x.sum() > 0:
            parts[0] = w * 2
        (w * x).sum().backward()
        return (torch.zeros(1) if parts[0] is None else parts[0].detach(),)

    compare(step)


def test_identity_after_the_branch_is_what_the_data_says() -> None:
    def step(w: torch.Tensor, x: torch.Tensor, module: Kept) -> tuple:
        y, z = w * x, w + x
        parts = [y]
        if x.sum() > 0:
            parts[0] = z
        (y + z).sum().backward()
        return (torch.tensor([parts[0] is y, parts[0] is z]),)

    compare(step)


def test_the_same_item_by_two_names_is_one() -> None:
    def step(w: torch.Tensor, x: torch.Tensor, module: Kept) -> tuple:
        parts = [w * x, w + x]
        other = parts
        if x.sum() > 0:
            parts[-1] = x * 2
            other[1] = parts[1] + 1
        else:
            other[-2] = x
        (parts[0] + parts[1] + w).sum().backward()
        return tuple(v.detach() for v in other)

    for counts in compare(step):
        assert (counts.breaks, counts.misses) == (0, 1), counts
