"""numpy arrays from outside as inputs of the graph: what indexes a tensor, and what tensors are made from.

The input is the tensor over the array's memory, ``torch.from_numpy(array)``, made anew in each call: its dtype, sizes
and strides are guarded as a tensor's are, its numbers are read when the graph runs. Only arrays are taken that own
their memory (or are parts of one that does), and nothing of the step may write into that: no guard tells which other
tensors lie there. Rows of such an array (``buffer.states[chosen]``) are an array that the graph makes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step.arrays import array_item

from ..guards.sources import Part
from ..heap.objects import Objects
from ..torch_facts import torch_private
from ..values.formulas import AtSource, OfType
from ..values.numbers import Number, number_kind, numpy_numbers_in
from ..values.numpy_numbers import NUMPY_NUMBERS, as_plain, is_taken_by_tensors
from ..values.values import Break, TensorProxy
from .arrays import KINDS, Array, Arrays, numpy
from .foreign_memory import owns_memory
from .numbers import numbers_in, today_of
from .tensors import TensorOperations

INTS = (int, torch.SymInt)
WHOLE = (int, torch.SymInt, NoneType)  # what a slice has, and an index of one row
INDEX_TYPES = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)
INDEX_KINDS = "bi"  # booleans and signed integers, as numpy calls them: an index of unsigned bytes is a mask to torch


def is_array(value: Any) -> bool:
    """Whether it is a ``numpy.ndarray``, and of no class of its own."""
    found = numpy()
    return found is not None and type(value) is found.ndarray


def may_be_array(value: Any) -> bool:
    """The same, or one that the graph makes."""
    return is_kind(value, Array) or is_array(value)


def over_memory(array: Any) -> torch.Tensor | None:
    """A tensor over the array's memory; None where torch has none, or something else may own that."""
    if not is_array(array) or not array.flags.writeable or not array.ndim:
        return None
    owner = array
    while is_array(owner.base):
        owner = owner.base
    if owner.base is not None or not owner.flags.owndata:
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # numbers that torch has not, or strides that go back
        return None


def is_followed(part: Any) -> bool:
    """Whether torch takes it as an index as numpy does."""
    if type(part) is slice:
        known = all(type(one) in WHOLE for one in (part.start, part.stop)) and part.step in (None, 1)
        return known and not any(map(torch_private.depends_on_values, (part.start, part.stop)))
    if is_kind(part, Array):
        return part.fake.dtype in INDEX_TYPES and part.fake.dim() > 0
    return type(part) in (*WHOLE, type(...)) or (is_array(part) and part.dtype.kind in INDEX_KINDS and part.ndim > 0)


def takes_an_axis(part: Any) -> bool:
    """Whether a part of an index is of one of the array's axes."""
    return type(part) not in (NoneType, type(...))


def axes_of(index: Any) -> int:
    """Of how many axes an array in an index is."""
    mask = index.fake.dtype is torch.bool if is_kind(index, Array) else index.dtype.kind == "b"
    return (index.fake.dim() if is_kind(index, Array) else index.ndim) if mask else 1


def axes_before(parts: tuple) -> int | None:
    """How many slices stand before the arrays of an index, where torch gives what numpy does: 0, or before one array
    some. None for any other: to numpy an int beside an array is one, too."""
    chosen = [type(part) is not slice for part in parts]
    ints = any(type(part) in INTS for part in parts)
    if not all(map(takes_an_axis, parts)) or (ints and not all(chosen)):
        return None
    before = chosen.index(True)
    in_a_row = sorted(chosen[before:], reverse=True) == chosen[before:]
    return before if in_a_row and (not before or sum(chosen) == 1) else None


class ArrayInputs:
    """Those of one trace."""

    def __init__(self, objects: Objects, tensors: TensorOperations, arrays: Arrays):
        self.objects, self.tensors, self.arrays, self.guards = objects, tensors, arrays, objects.guards
        self.numbers = tensors.numbers
        self.found: dict[int, TensorProxy] = {}  # by id of the array
        self.continues = False  # whether what is traced follows a graph break, to which numpy code in a row belongs

    def input(self, array: Any) -> TensorProxy | None:
        """The graph's tensor over an array's memory, an input where that existed before; None if it is not followed."""
        if is_kind(array, Array):
            return array.proxy
        if (known := self.found.get(id(array))) is not None:
            return known
        record = self.objects.record_of(array)
        writes = self.tensors.foreign
        if record is None or writes.written or (real := over_memory(array)) is None:
            return None
        self.objects.note("array")
        source = Part(f"torch.from_numpy({record.source.name})", record.source, "python", over_memory)
        proxy = self.found[id(array)] = self.tensors.input(real, source)
        writes.arrays = True
        return proxy

    def as_index(self, key: Any) -> Any:
        """An index with such inputs in the places of its arrays and ints in those of numpy's numbers."""
        if type(key) is tuple:
            return tuple(map(self.as_index, key))
        if type(key) is slice:
            return slice(*map(self.as_index, (key.start, key.stop, key.step)))
        found = key.proxy if is_kind(key, Array) and key.proxy.fake.dtype in INDEX_TYPES else None
        if is_array(key) and key.dtype.kind in INDEX_KINDS:
            found = self.input(key)
        if found is not None:
            narrow = found.fake.dtype in (torch.int8, torch.int16)  # of which torch makes int64, and of a tensor not
            return self.tensors.method(found, "long", (), {}) if narrow else found
        kind = number_kind(key)
        if kind in NUMPY_NUMBERS and as_plain(kind) is not int:
            raise Break("number of numpy's", f"a {kind.__name__} indexes a tensor", "index it with an int")
        return self.as_number(key)

    def item(self, array: Any, key: Any) -> Any:
        """``array[key]`` of one that existed before: rows, or a number; None where it is not followed."""
        parts = key if type(key) is tuple else (key,)
        if len(parts) == array.ndim and all(number_kind(part) in INTS for part in parts):
            return self.number(array, parts)
        return self.part(array, key)

    def number(self, array: Any, parts: tuple) -> Any:
        """The number at a place, which a schedule has for each step: today's is known, another call reads its own."""
        parts = tuple(map(self.numbers.open, parts))
        if not all(part.known for part in numbers_in(parts)):
            return None
        try:
            today = array[today_of(parts)]
        except IndexError:
            return None
        whole = self.input(array) if type(today) in NUMPY_NUMBERS and self.tensors.whole_step else None
        if whole is None or whole.source is None:
            return None
        table = Number(self.numbers, 0, None, (whole.source,), AtSource(whole.source))
        sources, formula = self.numbers.again(array_item, (table, *parts))
        self.numbers.guard(OfType(formula, sources, type(today)))
        return self.numbers.of_array(array_item, (whole, *parts), today, sources, formula)

    def part(self, array: Any, key: Any) -> Array | None:
        """``array[key]``: a copy where the key has an array, else a view. numpy and torch agree on arrays of ints and
        booleans, slices that go forwards, ints, None and ...; None for any other."""
        parts = key if type(key) is tuple else (key,)
        copied = any(map(may_be_array, parts))
        if not all(map(is_followed, parts)) or not self.tensors.whole_step or torch.is_inference_mode_enabled():
            return None
        if not may_be_array(array) or (self.continues and not copied and is_array(array)):
            return None
        before = axes_before(parts) if copied else 0
        if before is None:
            calls = self.arrays.calls
            made = calls.call(operator.getitem, [array, key], {})
            return made if is_kind(made, Array) else None
        if sum(part is ... for part in parts) > 1:
            return None
        if any(is_array(part) and self.input(part) is None for part in parts):
            return None
        whole = self.input(array)
        if whole is None or whole.fake.dtype not in KINDS or sum(map(takes_an_axis, parts)) > whole.fake.dim():
            return None
        try:
            found = self.tensors.get_item(whole, self.as_index(key))
        except IndexError:  # which numpy raises in its own words
            return None
        if not found.fake.dim():
            return None
        if before:
            found = self.laid_out(found, before, found.fake.dim() - whole.fake.dim() + axes_of(parts[before]))
        return self.arrays.array(found, True, None if copied else (operator.getitem, [array, key], {}))

    def laid_out(self, proxy: TensorProxy, before: int, chosen: int) -> TensorProxy:
        """With the axes that an array has chosen, those from ``before`` on, first in memory, as numpy has them."""
        axes = [*range(before, before + chosen), *range(before), *range(before + chosen, proxy.fake.dim())]
        first = self.tensors.method(self.tensors.method(proxy, "permute", (axes,), {}), "contiguous", (), {})
        back = [axes.index(axis) for axis in range(len(axes))]
        found: TensorProxy = self.tensors.method(first, "permute", (back,), {})
        return found

    def as_number(self, value: Any) -> Any:
        """A number of numpy's as Python's, as which a tensor operator takes it; else the value, or a list with such."""
        if type(value) in (list, tuple) and numpy_numbers_in(value):
            return type(value)(map(self.as_number, value))
        kind = number_kind(value)
        if kind not in NUMPY_NUMBERS:
            return value
        if (plain := as_plain(kind)) is None:
            detail = f"a tensor's operator gets a numpy.{kind.__name__}"
            raise Break("number of numpy's", detail, "convert it to a plain number: int(x), bool(x)")
        return self.numbers.apply(plain, value)

    def as_written(self, value: Any) -> Any:
        """What ``tensor[key] = value`` is given, with Python's number for one of numpy's that torch takes."""
        if is_taken_by_tensors(number_kind(value)):
            return self.as_number(value)
        if numpy_numbers_in(value):
            raise Break("number of numpy's", "written into a tensor", "convert it to a plain number: float(x)")
        return value

    def made_from(
        self, function: Callable[..., Any], like: TensorProxy | None, args: list, kwargs: dict[str, Any]
    ) -> Any:
        """``function(array, …)`` of torch's functions that make a tensor of one, None where it is not followed. like:
        the tensor whose ``new_tensor`` it is."""
        plain = {"dtype": kwargs.get("dtype"), "device": kwargs.get("device")}
        on_cpu = plain["device"] in (None, "cpu", torch.device("cpu")) and torch.get_default_device().type == "cpu"
        if len(args) != 1 or not kwargs.keys() <= plain.keys() or not on_cpu:
            return None
        if like is not None and like.fake.device.type != "cpu":
            return None
        if not is_kind(plain["dtype"], torch.dtype | None) or (found := self.input(args[0])) is None:
            return None
        dtype = plain["dtype"] or (found if like is None else like).fake.dtype
        if function is torch.from_numpy or (function is torch.as_tensor and dtype is found.fake.dtype):
            if is_kind(args[0], Array):
                args[0].share()
            return self.tensors.method(found, "detach", (), {})
        made = found if dtype is found.fake.dtype else self.tensors.method(found, "to", (dtype,), {})
        if function is torch.as_tensor:
            return made
        return self.tensors.method(made, "clone", (), {"memory_format": torch.contiguous_format})

    def guard_memory(self) -> None:
        """What the step writes into is no memory of an array's, at each call. (What is one now was a graph break.)"""
        for proxy in self.tensors.inputs if self.tensors.foreign.arrays else ():
            real, source = proxy.real, proxy.source
            if is_kind(real, torch.Tensor) and source is not None and not source.static and owns_memory(real):
                if torch_private.version_of(proxy.fake):
                    self.guards.holds(source.name, "has memory of its own", owns_memory, source)
