"""``n or 1.0``, ``not n``, ``if n``: the truth of a number that varies is whether it is 0, and asks for no more."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats


class Meter:
    def __init__(self, count):
        self.count = count


GIVEN = {
    "size": (lambda x, meter: x.shape[0], lambda n: (torch.ones(n, 2), None)),
    "attribute": (lambda x, meter: meter.count, lambda n: (torch.ones(2), Meter(n))),
    "sum": (lambda x, meter: meter.count["a"] + meter.count["b"], lambda n: (torch.ones(2), Meter({"a": n, "b": 1}))),
}
MADE = {
    "itself": lambda n: n,
    "float": float,
    "product": lambda n: n * 0.5,
    "quotient": lambda n: n / 7,
    "power": lambda n: n**0.5,
    "difference": lambda n: n - 0.25,
}
ASKED = {
    "or": lambda n: 1.0 / (n or 1.0),
    "and": lambda n: n and 2.0,
    "not": lambda n: 1.0 if not n else 3.0,
    "if": lambda n: n * 2 if n else -1.0,
    "bool": lambda n: n * bool(n),
    "any": lambda n: n * 2 if any([0.0, n]) else 5.0,
    "filter": lambda n: sum(filter(None, [n, 0.0, 2.0])),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("made", MADE)
def test_the_truth_of_a_number_is_one_question(made, asked):
    for given, build in GIVEN.values():

        def step(x, meter, given=given):
            return (x * ASKED[asked](MADE[made](given(x, meter)))).sum()

        captured = capture(step, backend="eager", fullgraph=True)
        for n in (2, 3, 5, 6, 9):
            assert captured(*build(n)).equal(step(*build(n)))
        assert stats(captured).misses == 2


@pytest.mark.parametrize("asked", ASKED)
def test_nothing_is_captured_by_itself(asked):
    def step(x, meter):
        return (x * ASKED[asked](float(meter.count))).sum()

    captured = capture(step, backend="eager")
    for n in (2, 3, 0, 5, 0, 7, float("nan"), -0.0, 4, float("inf")):
        want, found = step(torch.ones(2), Meter(n)), captured(torch.ones(2), Meter(n))
        assert found.equal(want) or (found.isnan() and want.isnan())
    assert stats(captured).misses <= 6
