"""Whether a tensor requires gradients, where the step is given it and a view of it: torch shows a view what its base
says. Every pair of what is set and what is asked, beside plain Python, also where only later calls are given a view."""
from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moebius import capture, stats

SET = {
    "method": "p.requires_grad_(not p.requires_grad)",
    "attribute": "p.requires_grad = not p.requires_grad",
    "off": "p.requires_grad_(False)",
    "view": "v.requires_grad_()",
    "nothing": "pass",
}
ASKED = {
    "both": "return p.requires_grad, v.requires_grad",
    "before, too": "return before, v.requires_grad",
    "a result of both": "return (p * 2).requires_grad, (v * 2).requires_grad",
    "the view alone": "return (v * 2).sum().requires_grad",
}


def given(parameter, history):
    base = nn.Parameter(torch.ones(4)) if parameter else torch.ones(4)
    with torch.set_grad_enabled(history):
        return base, SimpleNamespace(v=base[1:])


def flags(base, box):
    return base.requires_grad, box.v.requires_grad


def told(function, *given):
    try:
        return function(*given)
    except RuntimeError as error:
        return str(error)


MET = {"first": "v = box.v\n    {change}", "afterwards": "{change}\n    v = box.v"}
CASES = [
    case for case in itertools.product(SET, ASKED, MET)
    if case[2] == "first" or (case[0] != "view" and "before" not in case[1])  # (where the view is asked first)
]


@pytest.mark.parametrize("parameter, history", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("change, ask, met", CASES)
def test_as_plain(change, ask, met, parameter, history):
    asked = "before = v.requires_grad\n    " if "before" in ASKED[ask] else ""
    names = {"torch": torch}
    exec(f"def step(p, box):\n    {MET[met].format(change=asked + SET[change])}\n    {ASKED[ask]}\n", names)
    captured, ours, plain = capture(names["step"]), given(parameter, history), given(parameter, history)
    for _ in range(4):
        assert told(captured, *ours) == told(names["step"], *plain)
        assert flags(*ours) == flags(*plain)
    (apart, other), alike = (given(parameter, history) for _ in range(2)), given(parameter, history)
    again = capture(names["step"])
    told(again, apart[0], other[1])  # captured where the two lie apart
    told(again, apart[0], other[1])
    fresh = given(parameter, history)
    assert told(again, *alike) == told(names["step"], *fresh)


def test_others_are_no_graph_break():
    def step(p, v):
        p.requires_grad_(not p.requires_grad)
        return (p.sum() * v.sum()).requires_grad

    captured, p, v = capture(step), nn.Parameter(torch.ones(4)), torch.ones(4)[1:]
    assert [captured(p, v) for _ in range(4)] == [False, True, False, True]
    assert stats(captured).breaks == 0
