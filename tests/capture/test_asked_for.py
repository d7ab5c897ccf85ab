"""Whether something is the very one that a class, a default argument, a closure or a global holds.

Blocks that are written again (iterations, functions, modules) lead to other objects: one of them may be the one that is
asked for, which is not among what was given to the first. Each program runs captured and as plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture


class Held:
    one: Any = None


def given(x, one=None):
    return 1 if x is one else 2


def given_by_name(x, *, one=None):
    return 1 if x is one else 2


def given_in_a_tuple(x, ones=(None,)):
    return 1 if x is ones[0] else 2


class Asked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.options = {"rate": 0.5}

    def forward(self, p):
        return p * HERE.ask(self)


WANTED: dict[str, Callable[[Any], Any]] = {
    "the tensor": lambda module: module.own,
    "the module": lambda module: module,
    "the options": lambda module: module.options,
}
PLACES: dict[str, Callable[[Any], int]] = {
    "class": lambda x: 1 if x is Held.one else 2,
    "tuple of a class": lambda x: 1 if x is Held.ones[0] else 2,
    "dict of a class": lambda x: 1 if x is Held.by_name["one"] else 2,
    "instance's class": lambda x: 1 if x is HELD.one else 2,
    "default": given,
    "default by name": given_by_name,
    "default in a tuple": given_in_a_tuple,
    "global": lambda x: 1 if x is HERE.one else 2,
}
HELD, HERE = Held(), SimpleNamespace()


def hold(one: Any) -> None:
    Held.one, Held.ones, Held.by_name, HERE.one = one, (one,), {"one": one}, one
    given.__defaults__, given_in_a_tuple.__defaults__ = (one,), ((one,),)
    given_by_name.__kwdefaults__ = {"one": one}


def in_iterations(modules, ps, where, wanted):
    for module, p in zip(modules, ps, strict=True):
        p.mul_(where(wanted(module)))
    return [p + 0 for p in ps]


def answer(module, p, where, wanted):
    return p * where(wanted(module))


def in_functions(modules, ps, where, wanted):
    return [answer(module, p, where, wanted) for module, p in zip(modules, ps, strict=True)]


def in_modules(modules, ps, where, wanted):
    return [module(p) for module, p in zip(modules, ps, strict=True)]


@pytest.mark.parametrize("step", [in_iterations, in_functions, in_modules])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wanted", WANTED)
def test_the_one_that_is_asked_for_is_found(step, place, wanted):
    where, of = PLACES[place], WANTED[wanted]
    HERE.ask = lambda module: where(of(module))

    def whole(modules, ps):
        with torch.no_grad():
            return step(modules, ps, where, of)

    left = []
    for run in (whole, capture(whole, backend="eager")):
        modules, ps = [Asked() for _ in range(6)], [torch.ones(4) for _ in range(6)]
        found = []
        for i in (1, 4, 5):
            hold(of(modules[i]))
            found.append([p.tolist() for p in run(modules, ps)])
        left.append(found)
    assert left[1] == left[0]
