"""Iterators over lists and deques that the step has changed, alive over a graph break: they go on where they stood."""

from __future__ import annotations

import collections
import itertools

import pytest
from answers import broken

from moebius import capture
from moebius.codegen import residual


def in_a_loop(items):
    out = []
    items.append(1)
    for item in items:
        broken()
        out.append(item)
        if len(items) < 7:
            items.append(item)
    return out, items


def taken(items):
    items.append(1)
    walk = iter(items)
    next(walk)
    broken()
    return list(walk), items


def to_the_end(items):
    items.append(1)
    walk = iter(items)
    for _ in range(4):
        next(walk)
    broken()
    items.append(5)
    return list(walk), items


def backwards(items):
    items.extend([1, 2])
    walk = reversed(items)
    next(walk)
    broken()
    return list(walk), items


def shorter(items):
    items.pop()
    walk = iter(items)
    next(walk)
    broken()
    return list(walk), items


def emptied(items):
    items.clear()
    items.append(4)
    walk = iter(items)
    next(walk)
    broken()
    items.append(5)
    return list(walk), items


def counted(items):
    items.append(1)
    walk = enumerate(items)
    next(walk)
    broken()
    return list(walk), items


def chained(items):
    items.append(1)
    walk = itertools.chain(items, [3])
    next(walk)
    broken()
    return list(walk), items


def generated(items):
    items.append(1)
    walk = (item + 1 for item in items)
    next(walk)
    broken()
    items.append(5)
    return list(walk), items


STEPS = [in_a_loop, taken, to_the_end, backwards, shorter, emptied, counted, chained, generated]


def outcome(step, items):
    try:
        return repr(step(items))
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("kind", [list, collections.deque])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_they_go_on_where_they_stood(step, kind):
    for items in ([7, 8, 9], [], [7]):
        assert outcome(capture(step), kind(items)) == outcome(step, kind(items)), items


def test_their_places_are_taken_when_the_list_is_as_long_as_it_was(monkeypatch):
    """Set before the effects, the place is the end of the shorter list."""

    class Early(residual.Emitter):
        @property
        def states(self):
            return self.lines

        @states.setter
        def states(self, _):
            pass

    function = Early.function

    def once(self, *args, **kwargs):
        lines, self.lines = self.lines, []
        self.loads += lines
        return function(self, *args, **kwargs)

    monkeypatch.setattr(Early, "function", once)
    monkeypatch.setattr("moebius.trace.segment.Emitter", Early)
    assert outcome(capture(taken), []) != outcome(taken, [])
