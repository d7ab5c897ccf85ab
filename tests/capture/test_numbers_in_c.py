"""Numbers that hold their value in C, numpy's or of a subclass of int: whatever reads it, reads it each call."""

import numpy
import pytest
import torch

from moebius import capture
from moebius.python import operators

WAYS = {
    "tuple": lambda n: ("a", "b", "c", "d")[n],
    "list": lambda n: [1, 2, 3, 4][n],
    "text": lambda n: "abcd"[n],
    "range": lambda n: range(5)[n],
    "slice": lambda n: [1, 2, 3, 4][:n],
    "step": lambda n: [1, 2, 3, 4][:: n + 1],
    "comprehension": lambda n: [k for k in (5, 6, 7, 8)][n],
    "dict": lambda n: {0: 1, 1: 2, 2: 3, 3: 4}[n],
    "in": lambda n: n in (1, 2),
    "list(range)": lambda n: list(range(n)),
    "repeated": lambda n: "a" * n,
    "format": lambda n: f"{n}",
    "bool": bool,
    "int": int,
    "max": lambda n: max(n, 2),
    "equal": lambda n: n == 2,
    "zeros": lambda n: list(torch.zeros(n).shape),
    "deleted": lambda n: removed([1, 2, 3, 4], n),
    "set": lambda n: replaced([1, 2, 3, 4], n),
}


class Level(int):
    pass


def removed(values, n):
    del values[n]
    return values


def replaced(values, n):
    values[n] = 0
    return values


def outcomes(function, kind):
    return [str(function(torch.arange(5.0), kind(value))) for value in (2, 3, 1, 2, 0)]


@pytest.mark.share(12)
@pytest.mark.parametrize("kind", [numpy.int64, Level], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_is_read_in_each_call(way, kind):
    def step(x, n):
        return WAYS[way](n), x + 1

    assert outcomes(capture(step), kind) == outcomes(step, kind)


def test_with_the_question_switched_off_the_answer_is_wrong(monkeypatch):
    def step(x, n):
        return (0, 1, 2, 3)[n], x + 1

    monkeypatch.setattr(operators.Operators, "value_in_c", lambda self, value: False)
    assert outcomes(capture(step), Level) != outcomes(step, Level)
