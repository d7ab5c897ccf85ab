"""What stands below a step and is captured for calls that do not come again: a few times, and then no more; what comes
again is captured, however many ways there are."""

from __future__ import annotations

import itertools
import types
import warnings

import pytest
import torch

from moebius import capture, stats
from moebius.cache import patience
from moebius.cache.captured import MAX_SEGMENTS

KINDS = {
    "classes": lambda n: type(f"Kind{n}", (), {"value": n})(),
    "ranks": lambda n: types.SimpleNamespace(value=n, shape=torch.zeros((1,) * n)),
    "functions": lambda n: types.SimpleNamespace(value=n, call=eval(f"lambda x: x + {n}")),
}


def used(kind, x):
    if hasattr(kind, "shape"):
        x = x + kind.shape.sum()
    return kind.call(x) if hasattr(kind, "call") else x * kind.value


def behind_a_break(source, x):
    y = x + 1
    kind = next(source)
    return used(kind, y)


def in_a_helper(source, x):
    return behind_a_break(source, x) * 2


def in_a_loop(source, x):
    for _ in range(2):
        x = behind_a_break(source, x)
    return x


PLACES = (behind_a_break, in_a_helper, in_a_loop)


def run(place, kinds):
    """Captures that there are, the misses of each call, and what was said."""
    captured, x, misses = capture(place, backend="eager"), torch.ones(2), [0]
    twice = kinds * 2  # (a loop takes two a call)
    source, plain = (kind for kind in twice), (kind for kind in twice)  # to advance one is a graph break
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in kinds:
            assert torch.equal(captured(source, x), place(plain, x))
            misses.append(stats(captured).misses)
    return stats(captured).entries, [b - a for a, b in itertools.pairwise(misses)], [str(w.message) for w in said]


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ("classes", "ranks"))
def test_a_kind_of_its_own_in_each_call(kind, place, monkeypatch):
    def entries():
        return run(place, [KINDS[kind](n) for n in range(1, 3 * MAX_SEGMENTS)])[0]

    few = entries()
    monkeypatch.setattr(patience, "PATIENCE", 10**6)
    assert few < entries() / 2


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
def test_what_is_learnt_is_captured(place):
    misses = run(place, [KINDS["functions"](n) for n in range(1, 2 * MAX_SEGMENTS)])[1]
    assert not any(misses[-MAX_SEGMENTS:])


@pytest.mark.parametrize("place", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ways", (1, 3, 5, 9))
def test_kinds_that_come_again(ways, place):
    kinds = [KINDS["classes"](n) for n in range(1, ways + 1)]
    misses = run(place, kinds * 8)[1]
    assert not any(misses[-2 * ways :])
