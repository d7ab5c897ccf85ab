"""Functions written in C that tracing may run, and what each may be given.

``PURE`` reads the numbers and texts of its arguments: all of them must be plain, all the way down. ``SHALLOW`` handles
its containers' items without looking into them. ``METHODS`` are methods of builtin containers in the same two classes.
Whatever is in no table is a graph break: nothing of unknown effect runs while tracing.
"""

from __future__ import annotations

import bisect
import cmath
import collections
import functools
import gc
import itertools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import special

from ..bytecode.c_callables import owner_of
from ..heap.iterator_states import TELLING
from ..heap.records import CONTAINERS, DICTS, VIEWS
from ..torch_facts import torch_private
from ..values.values import ATOMS, SYMBOLIC, RuntimeNumber, SymbolicObject, TensorProxy, decided_by_data, type_of

# Functions in C of numbers, which give numbers, texts or tuples of such.
OF_NUMBERS: frozenset[Any] = frozenset(
    f for module in (math, cmath) for f in vars(module).values() if is_kind(f, types.BuiltinFunctionType)
) | {abs, bin, chr, divmod, hex, oct, pow, round, complex}


class Half:
    """Has a float's value, and nothing else of one."""

    def __float__(self) -> float:
        return 0.5


def takes_floats(function: Any) -> bool:
    """Whether it asks any object for ``__float__``, as most of ``math`` does. Not one that rounds it to a whole number:
    that is a break at a number that only the running step knows, as it is at a tensor."""
    for count in (1, 2, 3):
        try:
            return type(function(*[Half() for _ in range(count)])) is not int
        except TypeError:
            continue
        except ValueError:  # acosh(0.5): it has asked
            return True
    return False


OF_FLOATS: frozenset[Any] = frozenset(f for f in OF_NUMBERS if f.__module__ == "math" and takes_floats(f))
PURE: frozenset[Any] = frozenset(
    {*OF_NUMBERS, ord, re.escape, os.fspath, bisect.bisect_left, bisect.bisect_right, operator.abs, operator.inv,
     operator.index, torch.is_inference_mode_enabled, torch.is_autocast_enabled, torch.is_autocast_cache_enabled,
     *torch_private.STATE_READERS}
)  # fmt: skip

# Those whose first argument is a list that they read.
READS_LISTS: frozenset[Any] = frozenset({bisect.bisect_left, bisect.bisect_right})

# Those that give any object of the process: fakes and proxies of the trace as well.
ANY_OBJECT: frozenset[Any] = frozenset({gc.get_objects, gc.get_referrers})

ITERTOOLS: tuple[type, ...] = (
    itertools.chain, itertools.islice, itertools.repeat, itertools.product, itertools.count, itertools.cycle,
    itertools.zip_longest, itertools.combinations, itertools.permutations, itertools.pairwise, itertools.starmap,
    itertools.accumulate, itertools.takewhile, itertools.dropwhile, itertools.groupby, itertools.compress,
)  # fmt: skip
# Callables that treat items as opaque. Iterables among their arguments are turned into native iterators first.
SHALLOW: frozenset[Any] = frozenset(
    {list, tuple, zip, enumerate, reversed, map, filter, functools.reduce, collections.deque, *ITERTOOLS,
     itertools.chain.from_iterable, itertools.filterfalse}
)  # fmt: skip
# Their first argument is called back; it must be interpreted.
CALLBACK_FIRST: frozenset[Any] = frozenset(
    {map, filter, functools.reduce, itertools.starmap, itertools.takewhile, itertools.dropwhile, itertools.filterfalse}
)
# The truth of what it gives is asked; the first two take None, for the items' own truth.
ASKS_TRUTH: tuple[Any, ...] = (filter, itertools.filterfalse, itertools.takewhile, itertools.dropwhile)

# Their second argument is, or the one called ``func`` or ``key``.
CALLBACK_SECOND: frozenset[Any] = frozenset({itertools.accumulate, itertools.groupby})

# What they iterate over, where it is given by name.
ITERABLE_KEYWORDS = frozenset({"iterable", "data", "selectors"})

# Constructors of plain values from plain values.
PLAIN_TYPES: frozenset[type] = frozenset(
    {int, float, bool, complex, str, bytes, range, slice, frozenset, torch.Size, torch.device, torch.finfo, torch.iinfo}
)

TRUSTED_METACLASSES = frozenset({"abc", "typing", "enum", "torch.nn.parameter", "torch", "_py_abc"})

NO_ITERATORS = frozenset((int, float, bool, str, bytes, type(None), list, tuple, dict, set))
DEEP = 40  # containers in containers
ITERATORS: tuple[type, ...] = (
    *TELLING,
    *map(type, (iter(collections.deque()), reversed(collections.deque()), next(itertools.groupby(" "))[1])),
    types.GeneratorType,
    *(zip, enumerate, map, filter, reversed),
    *ITERTOOLS,
)

# Python functions that are answered rather than interpreted.
REPLACED: dict[Any, Callable[..., Any]] = {
    torch.cuda.device_count: torch.cuda.device_count,  # (asks the driver by ctypes; a process has as many all its life)
    torch_private.order_of_groups: torch_private.order_of_groups,  # (devices and dtypes alone decide it)
    torch_private.operator_text: torch_private.operator_text,  # (an operator's name stays)
    **dict.fromkeys((torch.jit.is_scripting, torch.jit.is_tracing, torch.compiler.is_exporting), lambda: False),
    **dict.fromkeys((torch_private.log_api_usage, torch_private.tag_module), lambda *_: None),  # torch's own affair
    typing.cast: typing.cast,
}


def replaced(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what stands for these functions while tracing."""

    def register(stand_in: Callable[..., Any]) -> Callable[..., Any]:
        REPLACED.update(dict.fromkeys(functions, stand_in))
        return stand_in

    return register


def is_plain(value: Any, known: Callable[[Any], bool], depth: int = DEEP) -> bool:
    """Whether the value is plain all the way down: atoms, new containers of atoms, types and functions. depth: how far
    down that is looked for; a container may be in itself."""
    kind = type(value)
    if kind in SYMBOLIC:
        return False
    if kind is torch.Size:
        return all(type(v) not in SYMBOLIC for v in value)
    if kind in ATOMS or is_kind(value, types.BuiltinFunctionType):
        return True
    if is_kind(value, type):
        return not asks_metaclass(value)
    if kind is slice:
        return all(is_plain(v, known, depth) for v in (value.start, value.stop, value.step))
    if is_kind(value, types.FunctionType):
        return False
    if is_kind(value, tuple | frozenset) and kind in (tuple, frozenset):
        return all(is_plain(v, known, depth) for v in value)
    if not depth or known(value) or kind not in CONTAINERS and kind not in VIEWS:
        return False
    if kind in DICTS:
        return all(is_plain(k, known, depth - 1) and is_plain(v, known, depth - 1) for k, v in value.items())
    return all(is_plain(v, known, depth - 1) for v in value)


def pickles_alike(value: Any, known: Callable[[Any], bool], texts: set[str]) -> bool:
    """Whether equal values have equal pickles: numbers, and containers of them that the step made. A text that comes
    twice is written once where both are one object, so each is to be another. texts: those met so far."""
    kind = type(value)
    if kind is str:
        new = value not in texts
        texts.add(value)
        return new
    if kind in (list, dict) and not known(value):
        return all(pickles_alike(v, known, texts) for v in (value if kind is list else (*value, *value.values())))
    return kind in (type(None), bool, int, float)


def asks_metaclass(cls: Any) -> bool:
    """Whether a metaclass of the user's may answer for the class what is asked of objects: its truth, hash, text."""
    return type(cls) is not type and type(cls).__module__ not in TRUSTED_METACLASSES


def specialised(value: Any, known: Callable[[Any], bool] | None = None) -> Any:
    """Symbolic scalars as the numbers that they are today: a guard that they stay so. A graph break if nobody knows.

    known: whether a list existed before the step, which is not looked into; without it no list is.
    """
    kind = type(value)
    if is_kind(value, SymbolicObject):
        value.refuse("the value")
    if is_kind(value, RuntimeNumber):
        return value.numbers.constant(value)  # type: ignore[attr-defined]
    if kind in SYMBOLIC:
        try:
            return int(value) if kind is torch.SymInt else bool(value) if kind is torch.SymBool else float(value)
        except torch_private.DATA_DEPENDENT:
            raise decided_by_data() from None
    if kind is list and (known is None or known(value)):
        return value
    if kind in (tuple, list, torch.Size) and any(
        type(v) in SYMBOLIC or type(v) in (tuple, list, torch.Size) for v in value
    ):
        return kind(specialised(v, known) for v in value)
    return value


def is_operand(value: Any, known: Callable[[Any], bool]) -> bool:
    """Plain, a tensor, or a new container of such: what natively run arithmetic may be given (proxies do)."""
    if is_kind(value, TensorProxy | torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if type(value) in (tuple, list) and not known(value):
        return all(is_operand(v, known) for v in value)
    return is_plain(value, known)


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_bound_builtin(value: Any) -> bool:
    """A method in C with the object that it belongs to, made anew each time it is asked for."""
    owner = owner_of(value)
    return owner is not None and (not is_kind(owner, torch.Tensor) or type(owner) in PLAIN_TENSORS)


def is_tensor_operator(function: Any) -> bool:
    """torch's operators as Python sees them: builtin functions of torch._C, operator packets and overloads."""
    if is_kind(function, torch_private.OPERATOR_OBJECTS):
        return True
    if not is_kind(function, types.BuiltinFunctionType):
        return False
    return (
        function in VARIABLE_FUNCTIONS
        or getattr(function, "__module__", None) in torch_private.VARIABLE_FUNCTION_MODULES
    )


# Builtin functions compare equal when they wrap the same C function, whichever module holds them.
VARIABLE_FUNCTIONS = frozenset(
    f
    for n in dir(torch_private.variable_functions)
    if is_kind(f := getattr(torch_private.variable_functions, n), types.BuiltinFunctionType)
)


def is_tensor_function(function: types.FunctionType) -> bool:
    """Python functions of torch that are operators to their users: kept whole in the graph."""
    return (
        function.__module__ in ("torch.nn.functional", "torch.functional", "torch._tensor")
        and function not in INTERPRETED
    )


def is_called_back(value: Any) -> bool:
    """Whether a function of torch's that is given the value may run code of the user's with it."""
    kind = type_of(value)
    return kind in (types.FunctionType, types.MethodType, functools.partial) or special(kind, "__call__") is not None


INTERPRETED: frozenset[Any] = frozenset({torch.nn.functional.__dict__.get("multi_head_attention_forward")} - {None})
LOADING = frozenset((DataLoader.__iter__, torch_private.LoaderIterator.__next__))  # workers, queues, random state
