"""Nodes that give numbers of numpy's, and arrays: of an array of integers, and of what numpy computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from moebius.lowering.step.in_python import InPythonError

DISPATCHER = type(np.mean)  # of numpy's functions that other libraries may answer; most are Python code
MOST = 1 << 53  # sums of a thousand such numbers are what numpy's 64 bits give


class LargeNumberError(InPythonError):
    """numpy would give, or say, something else than the graph."""


def array_numbers(tensor: torch.Tensor) -> list[int]:
    """The numbers of ``tensor.numpy()``, a vector of int64, as Python ints.

    Raises LargeNumberError for one beyond 2**53: the graph adds them as Python does, which does not wrap around.
    """
    numbers = tensor.tolist()
    if any(not -MOST < number < MOST for number in numbers):
        raise LargeNumberError("moebius follows numpy's integers up to 2**53; compute with larger ones elsewhere")
    return numbers


fx.wrap("array_numbers")


def array_item(tensor: torch.Tensor, *key: int) -> Any:
    """``tensor.numpy()[key]``, an int for each axis: one of numpy's numbers. Raises IndexError in numpy's words."""
    return tensor.numpy()[key]


fx.wrap("array_item")


@functools.cache
def computed_quietly(function: Callable[..., Any], kind: type | None = None) -> Callable[..., Any]:
    """``function`` of numbers, some of them numpy's, where numpy has nothing to say about it. kind: what it is to give.

    The function that is returned raises LargeNumberError where numpy would warn, gives another type, or may warn in
    Python code (of what is not finite): plain Python does it once more, and warns with its own line.
    """
    in_python = type(function) is DISPATCHER

    def of_numbers(*operands: Any, **named: Any) -> Any:
        if in_python and not all(map(all_finite, (*operands, *named.values()))):
            raise LargeNumberError("numpy may warn of what is not finite")
        try:
            with np.errstate(all="raise"):
                found = function(*operands, **named)
        except FloatingPointError as error:
            raise LargeNumberError(f"numpy warns: {error}") from None
        if kind is not None and type(found) is not kind:
            raise LargeNumberError(f"numpy gives a {type(found).__name__} here")
        return found

    of_numbers.__name__ = of_numbers.__qualname__ = getattr(function, "__name__", "of_numbers")
    of_numbers.writes = ()  # type: ignore[attr-defined]
    return of_numbers


PLAIN = frozenset((int, float, bool))


@functools.cache
def of_items(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """``function`` of a list of plain numbers, which gives this type; for any other list plain Python is asked."""
    quietly = computed_quietly(function, kind)

    def of_plain(items: list[Any]) -> Any:
        if not items or not PLAIN.issuperset(map(type, items)):
            raise LargeNumberError("a list of other things than numbers")
        return quietly(items)

    of_plain.__name__ = of_plain.__qualname__ = getattr(function, "__name__", "of_plain")
    of_plain.writes = ()  # type: ignore[attr-defined]
    return of_plain


@dataclass(frozen=True)
class Slot:
    """The place of an operand that differs from call to call. kind: the type of numpy's that is made of it, or none."""

    number: int
    kind: type | None = None


def filled(template: Any, operands: tuple) -> Any:
    """A template, lists and tuples of slots and plain values, with operands in its slots."""
    if type(template) is Slot:
        found = operands[template.number]
        found = found.numpy() if isinstance(found, torch.Tensor) else found
        return found if template.kind is None else template.kind(found)
    if type(template) in (list, tuple):
        return type(template)(filled(part, operands) for part in template)
    if type(template) is slice:
        return slice(*(filled(part, operands) for part in (template.start, template.stop, template.step)))
    return template


def is_finite(value: Any) -> bool:
    """Whether no number in it is an infinity or NaN; of an array, that it has numbers at all."""
    if isinstance(value, np.ndarray):
        return value.size > 0 and (value.dtype.kind != "f" or bool(np.isfinite(value).all()))
    return all(map(is_finite, value)) if isinstance(value, list | tuple) else all_finite(value)


def computed_array(function: Callable[..., Any], template: tuple, named: dict[str, Any], kind: Any) -> Any:
    """``function(*template, **named)`` of arrays, where numpy has nothing to say about it.

    The function that is returned takes the dtype, sizes and strides (None for any) of what is expected, and operands:
    tensors for arrays. It gives the tensor over the array's memory, or a number of the type ``kind`` (an int64 as a
    tensor without an axis). It raises LargeNumberError where numpy warns, fails, gives something else, or an array in
    the memory of an operand.
    """
    in_python = type(function) is DISPATCHER

    def of_arrays(dtype: torch.dtype, sizes: tuple, strides: tuple | None, *operands: Any) -> Any:
        given, more = filled(template, operands), {name: filled(value, operands) for name, value in named.items()}
        if in_python and kind is not np.ndarray and not is_finite([*given, *more.values()]):
            raise LargeNumberError("numpy may warn of what is empty or not finite")
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise", under="ignore"):
                found = function(*given, **more)
        except Exception as error:  # which plain Python meets, or is warned of, itself
            raise LargeNumberError(f"numpy: {type(error).__name__}: {error}") from None
        if type(found) is not kind or found.shape != tuple(sizes):
            raise LargeNumberError("numpy gives something else here")
        if kind is np.int64:  # (a number that the graph asks the tensor for)
            return torch.tensor(int(found), dtype=torch.int64, device="cpu")
        if kind is not np.ndarray:
            return found
        arrays = [operand.numpy() for operand in operands if isinstance(operand, torch.Tensor)]
        shared = not found.flags.owndata and any(np.may_share_memory(found, array) for array in arrays)
        if shared or not found.flags.writeable:
            raise LargeNumberError("numpy gives a view here")
        try:
            made = torch.from_numpy(found)
        except (TypeError, ValueError):  # its rows lie backwards, or its numbers are not of this machine's order
            raise LargeNumberError("numpy gives an array that no tensor has the memory of") from None
        if made.dtype is not dtype or (made.stride() != strides if strides else not made.is_contiguous()):
            raise LargeNumberError("numpy gives another array here")
        return made

    of_arrays.__name__ = of_arrays.__qualname__ = getattr(function, "__name__", "of_arrays")
    of_arrays.writes = ()  # type: ignore[attr-defined]
    return of_arrays


def all_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(all_finite, value))
    return not isinstance(value, float | np.floating) or math.isfinite(value)
