"""``np.mean(losses[-100:])`` of a list that is longer in each call: what is asked × what it is asked of × where.

The graph takes the list as it is: results are plain Python's, whatever the list holds, and after some calls nothing is
captured.
"""

from __future__ import annotations

import collections
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of
from moebius.python.tails import Tails

CALLS = 30
SETTLED = 6
FUNCTIONS: dict[str, Callable[[list], Any]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "fsum": math.fsum,
    "numpy's mean": np.mean,
    "numpy's median": np.median,
    "numpy's deviation": np.std,
    "numpy's mean but for NaN": np.nanmean,
    "numpy's range": np.ptp,
    "mean by hand": lambda values: sum(values) / len(values),
    "of ten": lambda values: sum(values) / 10,
}
OTHERS: dict[str, Callable[[list], Any]] = {
    "the items": lambda values: [value + 1 for value in values],
    "sorted": sorted,
    "itself": lambda values: values,
    "an item": lambda values: values[0] if values else None,
    "an array": lambda values: np.array(values).tolist(),
    "joined": lambda values: values + [0.5],
    "its truth": lambda values: 1 if values else 2,
}
PARTS: dict[str, Callable[[list, collections.deque], Any]] = {
    "the last four": lambda log, ring: log[-4:],
    "the last hundred": lambda log, ring: log[-100:],
    "all": lambda log, ring: log,
    "a ring": lambda log, ring: ring,
}
# What the step adds in a call.
ADDED: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "floats": lambda i, y: y.item(),
    "ints": lambda i, y: i,
    "floats, then ints": lambda i, y: y.item() if i < 12 else i,
    "numbers, then texts": lambda i, y: y.item() if i < 20 else str(i),
    "numbers of numpy's": lambda i, y: np.float64(i),
    "what is not finite": lambda i, y: math.inf if i > 20 else y.item(),
}


def always(i: int) -> bool:
    return True


def now_and_then(i: int) -> bool:
    return i % 5 == 4


def after_some(i: int) -> bool:
    return i > 7


def built(function: Any, part: Any, add: Any, when: Any, said: list[str]) -> Callable[..., Any]:
    log, ring = [], collections.deque(maxlen=5)

    def step(x: torch.Tensor, i: int) -> Any:
        y = (x * i).sum()
        found = None
        log.append(add(i, y))
        ring.append(add(i, y))
        if i % 5 == 4 if when is now_and_then else i > 7 if when is after_some else True:
            found = function(part(log, ring))
        return y, repr(found), len(log)

    return step


def outcomes(step: Callable[..., Any]) -> list[str]:
    found = []
    for i in range(CALLS):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                found.append(repr(step(torch.linspace(-1, 1 + i % 3, 3), i)))
            except TypeError as error:
                found.append(str(error))
    return found


@pytest.mark.share(10)
@pytest.mark.parametrize("when", [always, now_and_then, after_some], ids=lambda f: f.__name__)
@pytest.mark.parametrize("add", ADDED)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("function", FUNCTIONS | OTHERS)
def test_the_end_of_a_list_is_plain_pythons(function, part, add, when):
    ask, of, adds = (FUNCTIONS | OTHERS)[function], PARTS[part], ADDED[add]
    captured = capture(built(ask, of, adds, when, []), backend="eager")
    assert outcomes(captured) == outcomes(built(ask, of, adds, when, []))
    if function in FUNCTIONS and add == "floats":
        assert not [s for one in captured_of(captured).family() for s in one.segments if s.graph_break is not None]
        assert stats(captured).misses <= SETTLED


def test_switched_off_the_list_is_read_as_a_whole(monkeypatch):
    def misses():
        captured = capture(built(np.mean, PARTS["the last hundred"], ADDED["floats"], always, []), backend="eager")
        outcomes(captured)
        return stats(captured).misses

    assert misses() <= SETTLED
    monkeypatch.setattr(Tails, "of", lambda *_: None)
    assert misses() > SETTLED


@pytest.mark.parametrize("ask, add", list(itertools.product([sum, np.mean], ["floats", "ints"])))
def test_an_end_that_goes_elsewhere_is_a_list_of_its_own(ask, add):
    def run(step):
        log, kept = [], []
        for i in range(CALLS):
            found = step(torch.ones(3) * i, i, log, kept)
            assert type(found[1]) is list and found[1] is kept[-1] and found[1] is not log
            found[1].append("mine")
        return repr((log, kept))

    def step(x, i, log, kept):
        log.append(ADDED[add](i, x.sum()))
        end = log[-3:]
        kept.append(end)
        return ask(log[-4:]), end

    assert run(capture(step, backend="eager")) == run(step)


def test_branches_may_stand_before_the_one_in_which_plain_python_may_be_asked():
    def run(step):
        log, found = [], []
        for i in range(CALLS):
            found.append(step(torch.ones(3) * i, i, log))
        return repr((log, found))

    def step(x, i, log):
        count = 0
        if i % 3 == 0:
            count = i
        log.append(x.sum().item())
        if i % 2 == 0:
            log.append(sum(log[-3:]))
        return count

    captured = capture(step, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moebius could not")
        assert run(captured) == run(step)


def asks_alone(i, log, state):
    np.mean(log[-3:])


def writes_what_it_asks(i, log, state):
    state["means"].append(np.mean(log[-3:]))


def writes_before_it_asks(i, log, state):
    state["count"] += 1
    state["means"].append(i)
    state["mean"] = np.mean(log[-3:])
    state["count"] += 1


@pytest.mark.parametrize("side", [asks_alone, writes_what_it_asks, writes_before_it_asks], ids=lambda f: f.__name__)
def test_what_is_not_finite_on_a_side_goes_on_as_plain_python(side):
    def run(step):
        log, state, found = [], {"count": 0, "means": [], "mean": 0.5}, []
        for i in range(CALLS):
            found.append((step(torch.full((3,), math.nan if i % 10 == 9 else i), i, log, state).tolist(), repr(state)))
        return repr((log, found))

    def step(x, i, log, state):
        log.append(x.sum().item())
        if i % 5 == 4:
            side(i, log, state)
        return x * 2

    assert run(capture(step, backend="eager")) == run(step)
