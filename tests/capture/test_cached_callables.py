"""``functools.lru_cache`` around what is no function: partials, objects and C's methods have no name of their own."""

from __future__ import annotations

import functools
import itertools
import operator

import pytest
import torch

from moebius import capture, stats


class Scaled:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, value: int) -> int:
        return value * self.by


def added(first: int, second: int) -> int:
    return first + second


WRAPPED = {
    "a function": lambda value: value + 1,
    "a partial": functools.partial(added, 2),
    "a partial of a partial": functools.partial(functools.partial(added, 2)),
    "an object": Scaled(3),
    "a method": Scaled(3).__call__,
    "C's": operator.neg,
    "a class": int,
    "another cache": functools.lru_cache(functools.partial(added, 5)),
}
STEPS = {
    "asked": lambda cached, state, x: x * cached(4),
    "after a write": lambda cached, state, x: (state.append(1), x * cached(4))[1],
    "of a tensor": lambda cached, state, x: x * (cached(4) + cached.cache_info().maxsize),
}


@pytest.mark.parametrize("wrapped, step", [*itertools.product(WRAPPED, STEPS)])
def test_as_plain(wrapped, step):
    found = []
    for with_capture in (True, False):
        cached, state = functools.lru_cache(WRAPPED[wrapped]), []
        function = functools.partial(STEPS[step], cached, state)

        def run(x, function=function):
            return function(x)

        called = capture(run, backend="eager") if with_capture else run
        found.append(([called(torch.ones(3)).tolist() for _ in range(3)], state))
        if with_capture:
            assert stats(called).hits == 2 or step != "asked"
            assert stats(called).breaks == 0 or step != "asked"
    assert found[0] == found[1]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_the_break_has_the_name(wrapped):
    """Of a tensor as the key the cache is asked natively: no error of our own stands there."""
    cached = functools.lru_cache(WRAPPED[wrapped])

    def run(x):
        try:
            return cached(x) * 2
        except TypeError as error:
            return type(error)

    want, got = run(torch.ones(1)), capture(run, backend="eager")(torch.ones(1))
    assert torch.equal(want, got) if torch.is_tensor(want) else want == got
