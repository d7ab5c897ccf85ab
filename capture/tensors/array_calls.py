"""What numpy computes of arrays, as nodes of the graph: operators, functions, methods.

numpy itself computes when the graph runs. What type and sizes come out is found by trying the function on arrays of
these sizes with other contents, and with other sizes where those vary: a run in which numpy gives something else, warns
or fails goes on as plain Python from there (``LargeNumberError``). An array in the memory of an operand is a view of
that tensor; functions that write into an operand are not followed.
"""

from __future__ import annotations

import functools
import math
import operator
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moebius.interpreter import is_kind
from moebius.lowering.step.arrays import Slot, computed_array, filled

from ..hook import ABSENT
from ..torch_facts import torch_private
from ..values.numbers import OPERATIONS, UNARY, Number
from ..values.numpy_numbers import NUMPY_NUMBERS, is_numpy_function
from ..values.values import TensorProxy
from .array_inputs import ArrayInputs
from .arrays import KINDS, Array, ArrayNumber, Arrays
from .counts import FEW
from .numbers import today_of

MAKERS: tuple[Any, ...] = (np.zeros, np.ones, np.full, np.arange, np.array, np.asarray, np.ascontiguousarray, np.eye)
MOST = 1 << 22  # numbers of an array with which a function is tried
STEPS = (3, 7, 19, 47, 101, 211)  # by which sizes that vary differ in another try
PLAIN = (int, float, bool, complex, type(None), type(...))
FLOATS_AND_BOOLS = frozenset((np.float16, np.float32, np.float64, np.bool_))
OPERATORS = OPERATIONS | {"@": operator.matmul}
COMPUTING = frozenset((*OPERATORS.values(), *UNARY.values(), operator.getitem))


class NotFollowedError(Exception):
    """An operand that no node takes, or a result that none gives."""


@dataclass
class Template:
    """A call: what stays in it, with slots for what differs. arrays: those among the operands, by slot."""

    args: tuple = ()
    named: dict[str, Any] = field(default_factory=dict)
    operands: list[Any] = field(default_factory=list)
    arrays: dict[int, Any] = field(default_factory=dict)

    @property
    def constant(self) -> bool:
        """Whether it is of numbers alone that stay."""
        return not self.operands

    def slot(self, operand: Any, kind: type | None = None) -> Slot:
        self.operands.append(operand)
        return Slot(len(self.operands) - 1, kind)


@dataclass
class Tried:
    """What a function gives for arrays of some contents. view: sizes, strides and offset of what it gives in the memory
    of an operand, which ``at`` counts."""

    kind: type
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    at: int | None = None
    offset: int = 0


class ArrayCalls:
    """Those of one trace."""

    def __init__(self, arrays: Arrays, inputs: ArrayInputs):
        self.arrays, self.inputs, self.tensors = arrays, inputs, arrays.tensors
        self.domain, self.objects, self.writer = arrays.domain, arrays.objects, arrays.tensors.writer
        self.world, self.numbers = arrays.tensors.world, arrays.tensors.numbers
        arrays.calls = self
        in_python = [function for function in MAKERS if type(function) is types.FunctionType]
        self.functions = {function: functools.partial(self.maker, function) for function in in_python}

    def maker(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A function in Python that makes an array."""
        found = self.call(function, [*args], kwargs)
        return self.domain.call_function(function, [*args], kwargs) if found is ABSENT else found

    def operator(self, op: str, *operands: Any) -> Any:
        """An operator or a comparison; ABSENT where it is not followed."""
        function = OPERATORS.get(op)
        return ABSENT if function is None else self.call(function, list(operands), {})

    def part(self, array: Any, key: Any) -> Any:
        """``array[key]``, an array; None where it is not followed."""
        return self.inputs.part(array, key)

    def write(self, array: Array, values: Array) -> None:
        """Numbers of the same type into an array of the graph's."""
        self.tensors.method(array.proxy, "copy_", (values.proxy,), {})

    def unary(self, op: str, operand: Any) -> Any:
        return self.call(UNARY[op], [operand], {}) if op in UNARY else ABSENT

    def method(self, array: Any, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """``array.name(*args, **kwargs)``; ABSENT where it is not followed."""
        function = getattr(np.ndarray, name, None)
        return self.call(function, [array, *args], kwargs) if is_method(function) else ABSENT

    def call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``; ABSENT where it is not followed."""
        if not self.tensors.runs_once or not self.follows(function) or torch.is_inference_mode_enabled():
            return ABSENT
        if self.inputs.continues and not any(map(holds_array, (*args, *kwargs.values()))):
            return ABSENT
        call = Template()
        try:
            call.args = tuple(self.operand(call, value) for value in args)
            call.named = {name: self.operand(call, value) for name, value in kwargs.items()}
            if not (call.arrays or call.constant or is_maker(function)):
                return ABSENT
            return self.made(function, call)
        except NotFollowedError:
            return ABSENT

    def follows(self, function: Any) -> bool:
        """Whether it only computes: anybody else's code must not be tried."""
        return is_followed(function) or (type(function) is types.BuiltinFunctionType and function in COMPUTING)

    def operand(self, call: Template, value: Any) -> Any:
        """An operand as a part of the template."""
        kind = type(value)
        if kind is Array or kind is np.ndarray:
            proxy = self.inputs.input(value)
            if proxy is None or proxy.fake.dtype not in KINDS or proxy.fake.requires_grad:
                raise NotFollowedError
            call.arrays[len(call.operands)] = value
            return call.slot(proxy)
        if kind is ArrayNumber and value.certain:
            return call.slot(value.value, value.kind)
        if kind is Number or kind is torch.SymInt:
            if kind is torch.SymInt and torch_private.depends_on_values(value):
                raise NotFollowedError
            return call.slot(value)
        if kind is torch.SymFloat:
            return call.slot(self.numbers.of_size(value))
        if kind in PLAIN or kind in NUMPY_NUMBERS or is_kind(value, np.dtype):
            return value
        if is_kind(value, type) and (value in NUMPY_NUMBERS or value in (int, float, bool)):
            return value
        if kind is str and is_dtype(value):
            return value
        if kind in (list, tuple, torch.Size):
            held = self.objects.contents(value) if kind is list else value
            parts = [self.operand(call, item) for item in held]
            return parts if kind is list else tuple(parts)
        if kind is slice:
            return slice(*(self.operand(call, part) for part in (value.start, value.stop, value.step)))
        raise NotFollowedError

    def made(self, function: Any, call: Template) -> Any:
        """The call as a node."""
        today = self.tried(function, call, {})
        sizes = self.sizes(function, call, today)
        if today.at is not None:
            return self.view(function, call, today)
        target = computed_array(function, call.args, call.named, today.kind)
        if today.kind is not np.ndarray and today.kind in FLOATS_AND_BOOLS:
            one = today.kind(1)
            example = one if today.kind is np.bool_ else one / 2
            return self.numbers.of_array(target, (today.dtype, sizes, None, *call.operands), example)
        if today.kind not in (np.ndarray, np.int64):
            raise NotFollowedError
        strides = None if is_row_major(today.sizes, today.strides) else today.strides
        if strides is not None and any(type(size) is not int for size in sizes):
            raise NotFollowedError
        node = self.writer.node("call_function", target, (today.dtype, sizes, strides, *call.operands), {})
        how = {"dtype": today.dtype, "device": "cpu"}
        make, given = (torch.empty, (sizes,)) if strides is None else (torch.empty_strided, (sizes, strides))
        proxy = self.tensors.wrap(self.world.call(make, given, how), node)
        array = self.arrays.array(proxy, alone=True)
        if call.constant and len(today.sizes) == 1 and today.sizes[0] <= FEW and array.of_integers():
            self.arrays.hold(array, [self.arrays.number(n) for n in function(*call.args, **call.named).tolist()])
        return array if today.kind is np.ndarray else self.arrays.item(array, ())

    def view(self, function: Any, call: Template, today: Tried) -> Any:
        """An array in the memory of an operand's."""
        assert today.at is not None
        proxy, base = call.operands[today.at], call.arrays[today.at]
        known = all(type(size) is int for size in (*proxy.fake.shape, *proxy.fake.stride()))
        if not known or len(call.operands) > 1 or today.dtype is not proxy.fake.dtype or today.kind is not np.ndarray:
            raise NotFollowedError
        offset = today.offset + proxy.fake.storage_offset()
        if type(offset) is not int or any(stride < 0 for stride in today.strides):
            raise NotFollowedError
        found = self.tensors.method(proxy, "as_strided", (today.sizes, today.strides, offset), {})
        origin = function, [base if type(part) is Slot else part for part in call.args], call.named
        return self.arrays.array(found, origin=origin)

    # ------------------------------------------------------------------------------------------------------------------
    # What comes out
    # ------------------------------------------------------------------------------------------------------------------

    def sizes(self, function: Any, call: Template, today: Tried) -> tuple:
        """The sizes of what comes out, which follow from the operands': found by a try with others."""
        varying = {str(size): size for size in self.symbolic_sizes(call)}
        if not varying:
            return today.sizes
        if len(varying) > len(STEPS):
            raise NotFollowedError
        hints = {text: self.hint(size) for text, size in varying.items()}
        other = {text: hints[text] + step for text, step in zip(varying, STEPS, strict=False)}
        found = self.tried(function, call, other)
        if len(found.sizes) != len(today.sizes) or found.kind is not today.kind or found.dtype is not today.dtype:
            raise NotFollowedError
        sizes: list[Any] = []
        for now, then in zip(today.sizes, found.sizes, strict=True):
            grown = [text for text, step in zip(varying, STEPS, strict=False) if step == then - now]
            if now != then and not grown:
                raise NotFollowedError
            sizes.append(now if now == then else varying[grown[0]] + (now - hints[grown[0]]))
        return tuple(sizes)

    def symbolic_sizes(self, call: Template) -> Iterator[Any]:
        for operand in call.operands:
            for size in operand.fake.shape if type(operand) is TensorProxy else (operand,):
                if type(size) is torch.SymInt:
                    if torch_private.depends_on_values(size):
                        raise NotFollowedError
                    yield size

    def hint(self, size: Any) -> int:
        if type(size) is int:
            return size
        known = self.numbers.known(size)
        if known is None:
            raise NotFollowedError
        return int(today_of(known))

    def tried(self, function: Any, call: Template, other: dict[str, int]) -> Tried:
        """What it gives for arrays of several contents, if that is the same. other: sizes in the place of today's."""
        found: list[Tried] = []
        for content in range(3):
            operands = tuple(self.example(operand, content, other) for operand in call.operands)
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    given, named = filled(call.args, operands), {k: filled(v, operands) for k, v in call.named.items()}
                    result = function(*given, **named)
            except Exception:  # an index that is too large, say, or a write into an operand
                continue
            found.append(described(result, operands))
        if len(found) < 2 or any(one != found[0] for one in found):
            raise NotFollowedError
        return found[0]

    def example(self, operand: Any, content: int, other: dict[str, int]) -> Any:
        """What stands for an operand in a try. Nobody may write into it."""
        if type(operand) is not TensorProxy:
            if type(operand) is torch.SymInt:
                return other.get(str(operand)) or self.hint(operand)
            known = self.numbers.known(operand) if type(operand) is Number else None
            return operand if type(operand) is int else today_of(operand if known is None else known)
        fake = operand.fake
        sizes, strides = tuple(other.get(str(size)) or self.hint(size) for size in fake.shape), fake.stride()
        if math.prod(sizes) > MOST:
            raise NotFollowedError
        if fake.is_contiguous():
            made = torch.empty(sizes, dtype=fake.dtype, device="cpu")
        elif all(type(one) is int for one in (*fake.shape, *strides)):
            made = torch.empty_strided(sizes, strides, dtype=fake.dtype, device="cpu")
        else:
            raise NotFollowedError
        if content < 2:
            made.fill_(content)
        elif made.numel():
            made.copy_(torch.arange(made.numel(), dtype=torch.int64, device="cpu").remainder(3).view(sizes))
        array = made.numpy()
        array.flags.writeable = False
        return array


def described(result: Any, operands: tuple) -> Tried:
    """What came of a try."""
    kind: Any = type(result)
    if kind is not np.ndarray and kind not in NUMPY_NUMBERS:
        raise NotFollowedError
    array = np.asarray(result)
    if array.dtype not in DTYPES:
        raise NotFollowedError
    strides = tuple(stride // array.itemsize for stride in array.strides)
    found = Tried(kind, DTYPES[array.dtype], array.shape, strides)
    for at, operand in enumerate(operands if kind is np.ndarray else ()):
        if is_kind(operand, np.ndarray) and np.shares_memory(array, operand):
            away = array.__array_interface__["data"][0] - operand.__array_interface__["data"][0]
            found.at, found.offset = at, away // array.itemsize
    return found


def holds_array(value: Any) -> bool:
    """Whether it is an array of the graph's, or holds one. Nothing is read of what existed before the step."""
    return type(value) is Array or (type(value) in (list, tuple) and any(map(holds_array, value)))


def is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    there = min(strides, default=0) >= 0
    return there and torch.empty_strided(sizes, strides, dtype=torch.uint8, device="meta").is_contiguous()


def is_maker(function: Any) -> bool:
    """Whether it makes an array of numbers alone."""
    return any(function is maker for maker in MAKERS)


def is_method(function: Any) -> bool:
    """Whether it is a method of numpy's arrays, in C."""
    return type(function) is types.MethodDescriptorType and function.__objclass__ is np.ndarray


def is_dtype(text: str) -> bool:
    try:
        return np.dtype(text) in DTYPES
    except TypeError:
        return False


def is_followed(function: Any) -> bool:
    """Whether calls of it may be nodes."""
    return is_numpy_function(function) or is_method(function) or is_maker(function)


DTYPES = {torch.empty(0, dtype=kind, device="cpu").numpy().dtype: kind for kind in KINDS}
