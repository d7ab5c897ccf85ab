"""Calls of numpy's functions, and of what asks for the type of numpy's numbers."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..hook import ABSENT
from ..tensors.array_calls import is_maker
from ..torch_facts import torch_private
from ..values.numbers import Number, number_kind, numpy_numbers_in
from ..values.numpy_numbers import NUMPY_NUMBERS, is_numpy_function
from ..values.values import SYMBOLIC, Break
from .parts import Parts

MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor)  # whose result has the type of numpy's number
OPERANDS = frozenset((*NUMPY_NUMBERS, *SYMBOLIC, int, float, bool, type(None), Number))


def of_numbers(domain: Parts, function: Callable[..., Any], args: list, kwargs: dict[str, Any]) -> Any:
    """A function of numpy's, if it is given numbers, or lists of them; else ABSENT."""
    values = [domain.plain_contents(value) for value in args]
    named = {name: domain.plain_contents(value) for name, value in kwargs.items()}
    if not all(map(is_number, (*values, *named.values()))):
        return ABSENT
    values = [tuple(value) if type(value) is torch.Size else value for value in values]
    if gives_array(function, values, named):
        return ABSENT
    return domain.objects.made(domain.numbers.apply(function, *values, **named))


def gives_array(function: Callable[..., Any], values: list[Any], named: dict[str, Any]) -> bool:
    """Whether what it gives for numbers that stay is an array: that is the graph's, if it is followed."""
    if not is_numpy_function(function) or not all(map(stays, (*values, *named.values()))):
        return False
    try:
        with strictly(), np.errstate(all="raise"):
            return type(function(*values, **named)) is np.ndarray
    except Exception:  # it raises or warns where the step calls it
        return False


class OfThread(type):
    """What an entry of ``warnings.filters`` may name as its category: any warning, in one thread."""

    thread: int

    def __subclasscheck__(cls, _: type) -> bool:
        return threading.get_ident() == cls.thread


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """A warning of this thread's is raised, and does not count as shown. (``catch_warnings`` makes Python forget which
    have been, and another thread may begin or end one meanwhile: the list is held.)"""
    filters: list[Any] = vars(warnings)["filters"]
    entry = ("error", None, OfThread("Strict", (Warning,), {"thread": threading.get_ident()}), None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        filters.remove(entry)


def stays(value: Any) -> bool:
    """Whether it is a number of Python's or numpy's, or a list of such, that the graph knows nothing of."""
    return all(map(stays, value)) if type(value) in (list, tuple) else type(value) not in (*SYMBOLIC, Number)


def counted(domain: Parts, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
    """A function that makes an array, as a node; ABSENT for any other call."""
    if not is_maker(function):
        return ABSENT
    size = domain.numbers.size_of(args[0]) if function is np.arange and len(args) == 1 else None
    if kwargs or not is_known_size(size) or not follows_arrays(domain):
        return domain.array_calls.call(function, args, kwargs)
    made = domain.tensors.function(torch.arange, (size,), {"dtype": torch.int64, "device": "cpu"})
    return domain.arrays.array(made, alone=True)


def follows_arrays(domain: Parts) -> bool:
    """Whether arrays may be of the graph: in inference mode nobody counts what is written."""
    return domain.tensors.whole_step and not torch.is_inference_mode_enabled()


def is_known_size(value: Any) -> bool:
    """Whether it is a size that does not depend on values."""
    if type(value) is torch.SymInt:
        return not torch_private.depends_on_values(value)
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    """Whether it is a number that numpy may be given, or None, or a list of such."""
    if type(value) in (list, tuple, torch.Size):
        return all(map(is_number, value))
    return type(value) in OPERANDS


def with_its_type(domain: Parts, function: Any, args: list, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of an operator of torch's: ``torch.tensor`` of one of numpy's numbers has the type of that."""
    if function not in MADE_OF_NUMBERS or not args or kwargs.get("dtype") is not None:
        return kwargs
    if (kind := number_kind(args[0])) in NUMPY_NUMBERS:
        return kwargs | {"dtype": torch.from_numpy(np.zeros(1, kind)).dtype}
    if numpy_numbers_in(domain.plain_contents(args[0])):
        raise Break("number of numpy's", "a tensor is made of a list of such", "say its dtype")
    return kwargs
