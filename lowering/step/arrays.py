"""Nodes that give numbers of numpy's: of an array of integers, and of what numpy computes of numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

DISPATCHER = type(np.mean)  # of numpy's functions that other libraries may answer; most are Python code
MOST = 1 << 53  # sums of a thousand such numbers are what numpy's 64 bits give


class LargeNumberError(ArithmeticError):
    """No error of the user's: a captured step goes on as plain Python from here."""


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
    return of_numbers


def asks_plain_python(target: Any) -> bool:
    """Whether a node's function may say that plain Python is to go on from there."""
    return getattr(target, "__module__", None) == __name__ and target is not array_item


def all_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(all_finite, value))
    return not isinstance(value, float | np.floating) or math.isfinite(value)
