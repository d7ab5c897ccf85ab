"""numpy's numbers (``numpy.float64(0.1)``) while tracing: what they are, and which of numpy's functions are of numbers.

Such a number is a plain value like Python's. What numpy computes of numbers depends on them alone, but for what it says
of it (a division by zero is a warning): see ``moebius.lowering.step.arrays.computed_quietly``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from moebius.lowering.step.arrays import DISPATCHER

# Those whose number Python and torch can hold, too.
NUMPY_NUMBERS: frozenset[type] = frozenset(np.dtype(code).type for code in "?bhilqBHILQefd")
NUMPY_FLOATS: frozenset[type] = frozenset(kind for kind in NUMPY_NUMBERS if issubclass(kind, np.floating))
CONVERTING = frozenset(("item", "tolist"))  # methods of its numbers that are no function of numpy's


def is_numpy_function(function: Any) -> bool:
    """Whether it is a function of numpy's, or a ufunc of whatever library with a loop over numbers in C."""
    if type(function) is np.ufunc:
        return any("O" not in loop for loop in function.types)
    return type(function) is DISPATCHER and str(function.__module__).partition(".")[0] == "numpy"


def is_pure_method(kind: type, name: str) -> bool:
    """Whether a method of its numbers only computes: Python's number has it as well, or numpy a function of that name.
    (Others write files.)"""
    base = type(kind(1).item())
    return hasattr(base, name) or name in CONVERTING or is_numpy_function(getattr(np, name, None))


def as_plain(kind: type) -> type | None:
    """``int`` or ``float``, where torch's operators take a number of this type for one of Python's."""
    if issubclass(kind, np.signedinteger):
        return int
    return float if issubclass(kind, np.floating) else None


@functools.cache
def leaves_to_tensors(kind: type, name: str) -> bool:
    """Whether ``number op tensor`` is what the tensor says: numpy's number, which is asked first, gives it up."""
    method = getattr(kind, f"__{name}__", None)
    return method is None or method(kind(1), torch.ones(2, dtype=torch.float32, device="cpu")) is NotImplemented


@functools.cache
def is_taken_by_tensors(kind: type) -> bool:
    """Whether it is a type of numpy's numbers of which ``tensor[0] = number`` writes what Python's number does."""
    if kind not in NUMPY_NUMBERS or as_plain(kind) is None:
        return False
    try:
        torch.zeros(1, dtype=torch.float32, device="cpu")[0] = kind(1)
    except TypeError:
        return False
    return True
