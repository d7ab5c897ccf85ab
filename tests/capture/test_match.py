"""``match``: what case patterns ask of values that the graph makes, that differ from call to call, and of objects."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import types

import pytest
import torch

from moebius import capture
from moebius.python.domain import TrackingDomain


def kinds(value, x):
    match value:
        case bool(b):
            return "bool", b
        case int(i):
            return "int", i + 1
        case float(f):
            return "float", f * 2
        case str(s):
            return "str", s + "!"
        case None:
            return "none"
        case torch.Size((a, *b)):
            return "size", a, b
        case torch.nn.Parameter():
            return "parameter"
        case torch.Tensor(shape=(a, b)) as t if a == b:
            return "square", t + a
        case torch.Tensor(shape=(_,), dtype=torch.int64 as kind):
            return "row", kind
        case torch.Tensor():
            return "tensor", value * 2
        case {"op": "add", **rest}:
            return "add", rest
        case Point(0, y) | Point(y, 0):
            return "axis", y
        case Point(a, b, scale=s):
            return "point", a + b * s
        case [first, *rest]:
            return "sequence", first, len(rest)
        case Kind.ONE:
            return "one"
        case collections.abc.Callable():
            return "callable"
    return "other"


@dataclasses.dataclass
class Point:
    a: float
    b: float
    scale: float = 1.0
    __match_args__ = ("a", "b")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


VALUES = [
    4.5, 5.5, 6.5, 7, 8, 9, True, "q", "r", "s", None, 1, 2.0,
    torch.ones(2, 2), torch.ones(3, 3), torch.ones(2, 3), torch.arange(3), torch.nn.Parameter(torch.ones(2)),
    {"op": "add", "z": 1}, {"op": "mul"}, Point(0, 2.5), Point(3.5, 0), Point(2.0, 3.0, 4.0),
    [1, 2], (1,), [], collections.deque([3]), range(3), b"x", Kind.ONE, Kind.TWO, torch.Size([2, 3]),
    types.SimpleNamespace(),
]  # fmt: skip


def computed(x):
    total = x.sum()
    values = [x.shape[0], x.shape, total, total.shape, x @ x.T, x.tolist(), [*x.unbind()], x.dim() / 2, (x, total)]
    return [kinds(value, x) for value in values]


def same(ours, plain):
    assert type(ours) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert torch.equal(ours, plain)
    elif isinstance(plain, list | tuple):
        assert len(ours) == len(plain)
        for a, b in zip(ours, plain, strict=True):
            same(a, b)
    else:
        assert ours == plain


@pytest.mark.parametrize("first", range(0, len(VALUES), 6))
def test_arguments_that_differ_from_call_to_call(first):
    step = capture(kinds, backend="eager")
    for value in VALUES[first : first + 6]:
        same(step(value, torch.ones(1)), kinds(value, torch.ones(1)))


@pytest.mark.parametrize("first", range(0, len(VALUES), 6))
def test_constants_in_a_step(first):
    def step(x):
        return x + 1, [kinds(value, x) for value in VALUES[first : first + 6]]

    captured = capture(step)
    for rows in (3, 3, 4, 2):
        same(captured(torch.ones(rows, 2)), step(torch.ones(rows, 2)))


def test_what_the_step_computes():
    captured = capture(computed)
    for rows in (3, 3, 4, 2):
        same(captured(torch.ones(rows, 2)), computed(torch.ones(rows, 2)))


def test_without_what_stands_for_it_another_case_is_taken(monkeypatch):
    monkeypatch.delattr(TrackingDomain, "is_instance")
    step = capture(kinds, backend="eager")
    found = [step(value, torch.ones(1)) for value in (4.5, 5.5, 6.5)]
    assert found != [kinds(value, torch.ones(1)) for value in (4.5, 5.5, 6.5)]
