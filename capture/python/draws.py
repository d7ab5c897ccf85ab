"""Random numbers of Python's and numpy's own generators: each is a number of the graph, drawn where the program draws.

Of Python's all whole numbers come from one method, which ``randrange`` and ``randint`` call; what uses them to choose
objects (``sample``, ``shuffle``) needs their values and is interpreted as any other code. Of numpy's the calls are
followed that give one number, or an array of a known size; what type it has, or whether the arguments are an error, is
asked of a generator like it.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step import draw_below, draw_numpy

from ..hook import ABSENT
from ..tensors.array_inputs import may_be_array
from ..tensors.arrays import KINDS, Array
from ..tensors.numbers import today_of
from ..values.numbers import Number
from ..values.numpy_numbers import is_numpy_function
from ..values.values import SYMBOLIC, TensorProxy
from .numpy_calls import follows_arrays, is_known_size, of_numbers
from .parts import CallParts

BELOW: Any = random.Random._randbelow  # type: ignore[attr-defined]
ONE_NUMBER = (random.Random.randrange.__code__, random.Random.randint.__code__)  # (the second since 3.14)
OF_THE_MODULE: Any = random.random.__self__  # type: ignore[attr-defined]
SOME = (7, 0.5, -2, 0)  # arguments
ATOMIC = (int, float, bool, type(None))
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


def like_numpys(name: str) -> Any:
    """The method of a generator like numpy's."""
    if not LIKE:
        LIKE.append(sys.modules["numpy.random"].RandomState(0))
    return getattr(LIKE[0], name)


@functools.cache
def signature_of(name: str) -> inspect.Signature:
    return inspect.signature(like_numpys(name))


def kind_of_draw(name: str, *args: Any) -> str:
    """The name of the type of what a generator of numpy's draws for these arguments, or of its error."""
    try:
        return type(like_numpys(name)(*args)).__name__
    except (TypeError, ValueError, OverflowError) as error:
        return type(error).__name__


def is_operand_of_draw(value: Any) -> bool:
    """Whether a draw of an array is given it as it is: a number, a size, a flag, an array."""
    known = type(value) in (*ATOMIC, torch.SymInt, torch.SymFloat, Number) or may_be_array(value)
    return known or (type(value) is tuple and all(map(is_known_size, value)))


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
            found = of_numbers(self.domain, function, args, kwargs)
            return self.array_calls.call(function, args, kwargs) if found is ABSENT else found
        name = method_of_numpys_generator(function, args)
        kind = self.kind_of_draw(name, args[1:]) if name and not kwargs else ""
        if kind not in ("int", "float"):
            return self.array_call(name, args[1:], kwargs) if name else ABSENT
        text, given = f"numpy.random.{name}", args[1:]
        self.heap.read("fact", None, text, None)
        node = self.numbers.drawn(text, draw_numpy, (name, *given))
        return Number(self.numbers, 0.5, node) if kind == "float" else self.tensors.wrap(self.whole(name, given), node)

    def array_call(self, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of numpy's generator for an array of a size that is known before; ABSENT for another."""
        given = self.in_order(name, args, kwargs)
        shape = None if given is None else self.shape_drawn(name, given)
        if given is None or shape is None or not follows_arrays(self.domain):
            return ABSENT
        operands = [self.array_inputs.input(value) if may_be_array(value) else value for value in given]
        if any(found is None is not value for found, value in zip(operands, given, strict=True)):
            return ABSENT
        into = operands[0] if name == "shuffle" else None
        name = name if into is None else "permutation"
        dtype = self.dtype_drawn(name, operands, shape)
        if dtype is not None and dtype not in KINDS:
            return ABSENT
        self.heap.read("fact", None, f"numpy.random.{name}", None)
        drawn = self.numbers.drawn_array(name, operands, shape, dtype)
        if into is not None:
            self.tensors.method(into, "copy_", (drawn,), {})
        arrays = self.domain.arrays
        return arrays.array(drawn, alone=True) if into is None else None

    def dtype_drawn(self, name: str, operands: list, shape: tuple) -> torch.dtype | None:
        """What type the numbers of the array have; None where it has other sizes, or the arguments are an error."""
        try:
            found = like_numpys(name)(*map(self.example, operands))
            made = torch.from_numpy(found)
        except (TypeError, ValueError, OverflowError):
            return None
        return made.dtype if tuple(made.shape) == self.example(shape) else None

    def example(self, operand: Any) -> Any:
        """What a draw may be given in the place of an operand: today's number, or one like it."""
        if type(operand) is tuple:
            return tuple(map(self.example, operand))
        if type(operand) is TensorProxy:
            sizes = self.example(tuple(operand.fake.shape))
            share = 1 / max(sizes[0], 1) if operand.fake.dtype.is_floating_point else 0
            return torch.full(sizes, share, dtype=operand.fake.dtype, device="cpu").numpy()
        known = self.numbers.known(operand)
        return operand if type(operand) in ATOMIC else 1 if known is None else today_of(known)

    def in_order(self, name: str, args: list, kwargs: dict[str, Any]) -> list | None:
        """The arguments by position, without defaults at the end. None where one is no number, size or array."""
        try:
            bound = signature_of(name).bind(*args, **kwargs)
        except TypeError:
            return None
        given, defaults = list(bound.args), [p.default for p in signature_of(name).parameters.values()]
        if kwargs:
            bound.apply_defaults()
            given = list(bound.args)
        while given and len(given) <= len(defaults) and given[-1] is defaults[len(given) - 1]:
            given.pop()
        given = [self.numbers.size_of(value) for value in map(self.domain.plain_contents, given)]
        return given if all(map(is_operand_of_draw, given)) else None

    def shape_drawn(self, name: str, given: list) -> tuple | None:
        """The sizes of the array that is drawn; None if it is none, or these are not known."""
        names = [*signature_of(name).parameters]
        size: Any = given[names.index("size")] if "size" in names[: len(given)] else None
        if name in ("rand", "randn"):
            size = tuple(given)
        elif name in ("permutation", "shuffle") and len(given) == 1:
            (over,) = given
            if is_kind(over, Array):
                return tuple(over.fake.shape) if over.fake.dim() == 1 and over.fake.is_contiguous() else None
            size = over if name == "permutation" else None
        shape = size if type(size) is tuple else (size,)
        return shape if shape and all(map(is_known_size, shape)) else None

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
