"""Branches that no node can say, one behind the other, in functions in each other: all of them have side exits."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius import capture, explain, stats
from moebius.trace import trace

# What a branch leaves on one way alone, and what is asked of it afterwards.
LEFT = {"a list": ("[]", "len(v{0}) > 0"), "none": ("None", "v{0} is not None"), "a string": ("''", "v{0} != ''")}
PLACES = {
    "plain": "{body}\n    return total\n",
    "in a function": "    def of(total):\n{inner}\n        return total\n    return of(total)\n",
    "in two": "    def of(total):\n{inner}\n        return total\n    def outer(t):\n        return of(t)\n"
    "    return outer(total)\n",
    "behind a branch": "    def of(total):\n{inner}\n        return total\n    if len(torch.where(x > 9)[0]) > 0:\n"
    "        for k in range(40):\n            total = total + k\n        return total\n    return of(total)\n",
}


def step_of(count: int, left: str, place: str):
    start, asks = LEFT[left]
    lines = [f"v{i} = {start}" for i in range(count)]
    for i in range(count):
        lines += [f"a{i} = torch.where(x > {i} - 2)[0]", f"if len(a{i}) > 0:", f"    v{i} = x[a{i}]"]
    for i in range(count):
        lines += [f"if {asks.format(i)}:", f"    total = total + v{i}.sum()"]
    body, inner = ("\n".join(" " * indent + line for line in lines) for indent in (4, 8))
    text = "def step(x):\n    total = x.sum()\n" + PLACES[place].format(body=body, inner=inner)
    namespace = {"torch": torch}
    exec(text, namespace)
    return namespace["step"]


def compared(step):
    run = capture(step, backend="eager")
    for i in range(8):
        x = torch.linspace(-1, 1, 5) + (5 if i % 4 != 2 else 0)
        assert torch.equal(run(x), step(x))
    return run


@pytest.mark.parametrize(("count", "left", "place"), [*itertools.product((1, 2, 3), LEFT, PLACES)])
def test_all_are_in_the_graph(count, left, place):
    step = step_of(count, left, place)
    assert explain(step)(torch.linspace(-1, 1, 5)).breaks == []
    assert stats(compared(step)).breaks == 0


def test_switched_off_the_second_one_ends_it(monkeypatch):
    monkeypatch.setattr(trace, "MAX_BRANCHES", 1)
    step = step_of(3, "a list", "in two")
    assert explain(step)(torch.linspace(-1, 1, 5)).breaks
    compared(step)
