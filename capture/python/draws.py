"""Random numbers of Python's and numpy's own generators: each is a number of the graph, drawn where the program draws.

Of Python's all whole numbers come from one method, which ``randrange`` and ``randint`` call; what uses them to choose
objects (``sample``, ``shuffle``) needs their values and is interpreted as any other code. Of numpy's the calls are
followed that give one number; what type it has is asked of a generator like it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step import draw_below, draw_numpy

from ..hook import ABSENT
from ..values.numbers import Number
from ..values.numpy_numbers import is_numpy_function
from ..values.values import SYMBOLIC
from .numpy_calls import of_numbers
from .parts import CallParts

BELOW: Any = random.Random._randbelow  # type: ignore[attr-defined]
ONE_NUMBER = (random.Random.randrange.__code__,)
OF_THE_MODULE: Any = random.random.__self__  # type: ignore[attr-defined]
EXAMPLE = 7
OPEN = frozenset({"randint", "uniform"})  # that fail on an empty range, or never


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
        module: Any = sys.modules.get("numpy.random")
        owner: Any = args[0] if args else None
        if module is None or kwargs or type(owner) is not module.RandomState:
            return ABSENT
        name, given = getattr(function, "__name__", ""), args[1:]
        known: Any = getattr(module, name, None)
        if getattr(known, "__self__", None) is not owner or known.__func__ is not function:
            return ABSENT
        fixed = all(type(value) in (int, float) for value in given)
        if not fixed and not (name in OPEN and all(type(v) in (int, float, torch.SymInt, Number) for v in given)):
            return ABSENT
        example = [value if type(value) in (int, float) else EXAMPLE for value in given]
        if name == "randint" and not fixed:
            low, high = (0, given[0]) if len(given) == 1 else given
            if not self.domain.truth(self.domain.compare("<", low, high)):
                return ABSENT  # (an error of numpy's)
            example = [EXAMPLE]
        try:
            today = getattr(module.RandomState(0), name)(*example)
        except (TypeError, ValueError):
            return ABSENT
        if type(today) not in (int, float):
            return ABSENT
        text = f"numpy.random.{name}"
        self.heap.read("fact", None, text, None)
        node = self.numbers.drawn(text, draw_numpy, (name, *given))
        if type(today) is float:
            return Number(self.numbers, 0.5, node)
        return self.tensors.wrap(self.whole(name, given), node)

    def whole(self, name: str, given: list) -> Any:
        """The int that is drawn, which nobody knows while tracing."""
        tensors = self.tensors
        world = tensors.world
        bounded = name == "randint" and len(given) == 1 and type(given[0]) is not Number
        return world.number_below(given[0]) if bounded else world.unknown_number()
