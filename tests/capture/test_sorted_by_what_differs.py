"""Sorting tuples asks each pair for the first items that differ: what stands behind them may be anything. Pickles of
plain arguments, which cached methods have for keys."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from moebius import capture, stats
from moebius.python import builtin_handlers


class Odd:
    """Compares with nothing."""

    def __eq__(self, other):
        raise AssertionError("asked")

    __hash__ = None


class Ordered:
    """Compares by a line of Python."""

    def __lt__(self, other):
        return True


HEADS = (("b", "a", "c"), (2, 1.5, 3), (1, True, 2), ("a", "a", "b"), (float("nan"), 1.0, 2.0), (b"b", b"a", b"c"),
         ("a", 1, "b"))
TAILS = {"tensors": lambda x: (x, x * 2, x * 3), "objects": lambda x: (Odd(), Odd(), Odd()),
         "numbers": lambda x: (3, 2, 1), "sizes": lambda x: (x.shape[0], 1, x.shape[0] + 1),
         "orders": lambda x: (Ordered(), Ordered(), Ordered()), "lists": lambda x: ([2], [1], [x])}  # fmt: skip
WAYS = {
    "items": lambda heads, tails: sorted(dict(zip(heads, tails, strict=True)).items()),
    "pairs": lambda heads, tails: sorted(zip(heads, tails, strict=True), reverse=True),
    "second": lambda heads, tails: sorted(zip("aaa", heads, tails, strict=True)),
    "key": lambda heads, tails: sorted(zip(tails, heads, strict=True), key=lambda pair: pair[::-1]),
    "longer": lambda heads, tails: sorted([(heads[0],), *zip(heads[1:], tails, strict=False)]),
}


def order(way, heads, tails):
    """The order, as places of the tails; or the error."""
    try:
        return [[next((i for i, t in enumerate(tails) if t is v), v) for v in found] for found in way(heads, tails)]
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition(":")[0]


def step_of(way, heads, tails):
    return lambda x: (x + 1, str(order(way, heads, tails(x))))


@pytest.mark.parametrize("way", WAYS)
def test_orders(way):
    for heads, tails in itertools.product(HEADS, TAILS.values()):
        step = step_of(WAYS[way], heads, tails)
        captured = capture(step, backend="eager")
        for n in (2, 3, 4):
            assert captured(torch.ones(n))[1] == step(torch.ones(n))[1]


@pytest.mark.parametrize("tails", TAILS)
def test_values_behind_other_keys_are_asked_nothing(tails, monkeypatch):
    def breaks():
        captured = capture(step_of(WAYS["items"], HEADS[0], TAILS[tails]), backend="eager")
        captured(torch.ones(2))
        return stats(captured).breaks

    assert breaks() == 0
    monkeypatch.setattr(builtin_handlers, "leading", lambda keys: keys)
    assert (breaks() > 0) == (tails not in ("numbers", "sizes"))


PICKLED = ({}, {"a": 1, "b": None}, {"a": [1.5, {"b": True}]}, {"a": "b", "c": "d"}, {"a": "a"}, [1, "x", ["x"]],
           {"a": (1,)}, 3)  # fmt: skip


@pytest.mark.parametrize("value", PICKLED, ids=repr)
@pytest.mark.parametrize("protocol", ((), (2,), (None,)), ids=repr)
def test_pickles(value, protocol):
    code = f"lambda x, pickle, protocol: (x + 1, pickle.dumps({value!r}, *protocol))"
    step = eval(code)
    captured = capture(step, backend="eager")
    for _ in range(3):
        assert captured(torch.ones(2), pickle, protocol)[1] == step(torch.ones(2), pickle, protocol)[1]
    shares = value in ({"a": "a"}, [1, "x", ["x"]], {"a": (1,)})
    assert (stats(captured).breaks > 0) == shares


def test_what_cannot_be_pickled():
    with pytest.raises(TypeError, match="cannot"):
        capture(lambda x: (x + 1, pickle.dumps(x for _ in range(2))), backend="eager")(torch.ones(2))
