"""What is captured, asked and changed as the function that it stands for: decorators in any order, code, defaults."""

from __future__ import annotations

import inspect
import itertools
import types

import pytest
import torch

from moebius import capture, stats

X = torch.ones(2)


def step(x, k=2, *, z=1):
    """What is captured."""
    return x * k + z


def other(x, k=2, *, z=1):
    return x - k - z


ASKED = {
    "code": lambda f: f.__code__,
    "defaults": lambda f: (f.__defaults__, f.__kwdefaults__),
    "globals": lambda f: f.__globals__ is globals(),
    "closure": lambda f: f.__closure__,
    "signature": inspect.signature,
    "source": inspect.getsource,
    "names": lambda f: (f.__name__, f.__qualname__, f.__module__, f.__doc__),
}


@pytest.mark.parametrize("asked", ASKED)
def test_it_answers_as_the_function(asked):
    assert ASKED[asked](capture(step)) == ASKED[asked](step)


CHANGES = {
    "code": ("__code__", other.__code__),
    "defaults": ("__defaults__", (5,)),
    "no defaults": ("__defaults__", None),
    "keywords": ("__kwdefaults__", {"z": 9}),
}


@pytest.mark.parametrize("change, early", [*itertools.product(CHANGES, (True, False))])
def test_what_is_changed_of_it_is_the_functions(change, early):
    def outcomes(wrap):
        function = types.FunctionType(step.__code__, globals(), "step", (2,))
        function.__kwdefaults__ = {"z": 1}
        function = wrap(function)
        found = [] if early else [function(X, 3).tolist(), function(X, 3).tolist()]
        setattr(function, *CHANGES[change])
        for _ in range(2):
            found.append(function(X, 3).tolist())
            try:
                found.append(function(X).tolist())
            except TypeError as error:
                found.append(str(error))
        return found

    assert outcomes(capture) == outcomes(lambda function: function)


@pytest.mark.parametrize("order, kind", [*itertools.product(("above", "below"), (classmethod, staticmethod))])
def test_decorators_stand_in_any_order(order, kind):
    def part(*args, k=2):
        return args[-1] * k + len(args)

    captured = capture(kind(part)) if order == "above" else kind(capture(part))
    made = type("Made", (), {"plain": kind(part), "part": captured})
    for owner in (made, made(), type("Sub", (made,), {})):
        for _ in range(2):
            assert torch.equal(owner.part(X, k=4), owner.plain(X, k=4))
    assert stats(made.part).hits
