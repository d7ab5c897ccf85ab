"""Random numbers of Python's and numpy's own generators: each is a number of the graph, drawn where the program draws.

Of Python's all whole numbers come from one method, which ``randrange`` and ``randint`` call; what uses them to choose
objects (``sample``, ``shuffle``) needs their values and is interpreted as any other code. Of numpy's the calls are
followed that give one number; what type it has, or whether the arguments are an error, is asked of a generator like it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step import draw_below, draw_numpy

from ..hook import ABSENT
from ..tensors.numbers import today_of
from ..values.numbers import Number
from ..values.numpy_numbers import is_numpy_function
from ..values.values import SYMBOLIC
from .numpy_calls import of_numbers
from .parts import CallParts

BELOW: Any = random.Random._randbelow  # type: ignore[attr-defined]
ONE_NUMBER = (random.Random.randrange.__code__, random.Random.randint.__code__)  # (the second since 3.14)
OF_THE_MODULE: Any = random.random.__self__  # type: ignore[attr-defined]
SOME = (7, 0.5, -2, 0)  # arguments
LIKE: list[Any] = []  # a generator of numpy's that nobody else draws from


def method_of_numpys_generator(function: Any, args: list) -> str:
    """The name of the method, if the call draws from the generator that everybody shares; else ""."""
    module: Any = sys.modules.get("numpy.random")
    owner: Any = args[0] if args else None
    if module is None or type(owner) is not module.RandomState:
        return ""
    name: str = getattr(function, "__name__", "")
    known: Any = getattr(module, name, None)
    return name if getattr(known, "__self__", None) is owner and known.__func__ is function else ""


def kind_of_draw(name: str, *args: Any) -> str:
    """The name of the type of what a generator of numpy's draws for these arguments, or of its error."""
    if not LIKE:
        LIKE.append(sys.modules["numpy.random"].RandomState(0))
    try:
        return type(getattr(LIKE[0], name)(*args)).__name__
    except (TypeError, ValueError, OverflowError) as error:
        return type(error).__name__


class Draws(CallParts):
    """Calls of generators that everybody shares."""

    def drawn_below(self, owner: Any, count: Any) -> Any:
        """``Random._randbelow``."""
        frame = self.domain.frame
        if type(count) is Number and count.kind is int and count.known:
            count = self.numbers.as_size(count)
        whole = type(count) is int or is_kind(count, SYMBOLIC)
        if owner is not OF_THE_MODULE or not whole or frame is None or frame.code not in ONE_NUMBER:
            return self.domain.call_function(BELOW, [owner, count], {})
        self.heap.read("fact", None, "random.randrange", None)
        node = self.numbers.drawn("random.randrange", draw_below, (count,))
        tensors = self.tensors
        return tensors.wrap(tensors.world.number_below(count), node)

    def numpy_call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A function of numpy's on numbers, or a method of its generator for one number; ABSENT for any other call."""
        if is_numpy_function(function):
            return of_numbers(self.domain, function, args, kwargs)
        name = "" if kwargs else method_of_numpys_generator(function, args)
        kind = self.kind_of_draw(name, args[1:]) if name else ""
        if kind not in ("int", "float"):
            return ABSENT
        text, given = f"numpy.random.{name}", args[1:]
        self.heap.read("fact", None, text, None)
        node = self.numbers.drawn(text, draw_numpy, (name, *given))
        return Number(self.numbers, 0.5, node) if kind == "float" else self.tensors.wrap(self.whole(name, given), node)

    def kind_of_draw(self, name: str, given: list) -> str:
        """The type of what is drawn, as ``kind_of_draw`` says it: guarded where arguments vary and are known, tried for
        some where they are not; "" where that differs."""
        if not all(type(value) in (int, float, torch.SymInt, torch.SymFloat, Number) for value in given):
            return ""
        operands = [value if type(value) in (int, float) else self.numbers.known(value) for value in given]
        if any(value is None for value in operands):
            tries = [[value if type(value) in (int, float) else some for value in given] for some in SOME]
            kinds = {kind_of_draw(name, *one) for one in tries}
            return kinds.pop() if len(kinds) == 1 else ""
        kind = kind_of_draw(name, *map(today_of, operands))
        if any(type(value) is Number for value in operands):
            sources, formula = self.numbers.again(kind_of_draw, (name, *operands))
            self.numbers.hold(formula, sources, kind)
        return kind

    def whole(self, name: str, given: list) -> Any:
        """The int that is drawn, which nobody knows while tracing."""
        tensors = self.tensors
        world = tensors.world
        bounded = name == "randint" and len(given) == 1 and type(given[0]) is not Number
        return world.number_below(given[0]) if bounded else world.unknown_number()
