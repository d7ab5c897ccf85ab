"""What a function that cannot be followed could look at, by the names in its code.

A function in Python gets at objects by what its code names: globals, closure cells, defaults, and attributes of these.
Functions that it names are looked into as well, and so are methods and the items of containers. Code of the standard
library is not: it sees what it is given, in its cells too, and objects of the library's own, as a thread.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import importlib
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from moebius.interpreter import is_kind

from ..heap.records import contents_of, members

MANY = 5000  # functions and items that are looked at
LOADERS = (vars(importlib), vars(importlib.import_module), builtins.__import__)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)


def may_look_at(function: Any, owners: Collection[Any]) -> bool:
    """Whether a call of the function, with plain arguments, may read an attribute, item or value of one of the owners
    (objects, their ``__dict__``s, containers)."""
    written = {id(owner) for owner in owners}
    kept = any(hasattr(owner, "__dict__") and is_standard(type(owner).__module__) for owner in owners)
    seen: set[int] = set()
    names: set[str] = set()
    holders: list[dict[str, Any]] = []  # attributes of modules, and of objects of the standard library
    pending: list[Any] = [function]
    count = 0
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in written or id(getattr(value, "__dict__", None)) in written:
            return True
        if is_kind(value, types.FunctionType):
            if is_standard(value.__module__):
                if kept:
                    return True
                pending += cells(value)
                continue
            count += 1
            if count > MANY:
                return True
            fresh = set(code_names(value.__code__)) - names
            names |= fresh
            pending += [held.get(name) for held in holders for name in fresh]
            found = value.__globals__
            pending += [found.get(name, getattr(builtins, name, None)) for name in code_names(value.__code__)]
            pending += cells(value)
            pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), wrapped(value)]
        elif is_kind(value, types.ModuleType):
            holders.append(vars(value))
            pending += [vars(value).get(name) for name in (*names, "__getattr__")]
        elif is_kind(value, type):
            for base in value.__mro__:
                if not is_standard(base.__module__):
                    held = dict(vars(base))
                    holders.append(held)
                    pending += [v for name, v in held.items() if name in names or is_special(name)]
        elif is_kind(value, staticmethod | classmethod | types.MethodType):
            pending += [value.__func__, getattr(value, "__self__", None)]
        elif is_kind(value, property):
            pending += [value.fget, value.fset]
        elif is_kind(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif type(value) in (tuple, frozenset, list, set, dict, types.MappingProxyType):
            count += len(value)
            if count > MANY:
                return True
            pending += value
            pending += value.values() if is_kind(value, dict | types.MappingProxyType) else ()
        elif callable(value) and wrapped(value) is not None:
            pending.append(wrapped(value))
        elif is_kind(value, (*PLAIN, contextvars.ContextVar)):
            continue
        elif type(value).__module__ == "builtins" and not is_kind(value, (Iterable,)):
            continue  # a function, method or descriptor in C
        elif is_standard(type(value).__module__) and is_kind(value, (Iterable, Callable)):
            return True  # a container in C: what is in it, other code may have put there
        else:
            held = {**slots(value), **getattr(value, "__dict__", {})}
            holders.append(held)
            pending += [type(value), *(held.get(name) for name in names)]
    return False


def code_names(code: types.CodeType) -> Iterator[str]:
    """All names in a function and the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if is_kind(constant, types.CodeType):
            yield from code_names(constant)


def cells(function: types.FunctionType) -> list[Any]:
    """What a function's closure holds."""
    return [contents_of(cell) for cell in function.__closure__ or ()]


def wrapped(value: Any) -> Any:
    return getattr(value, "__wrapped__", None)


def is_standard(module: str | None) -> bool:
    return (module or "").partition(".")[0] in sys.stdlib_module_names


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def slots(value: Any) -> dict[str, Any]:
    """What is in an object's slots."""
    found = {}
    for member in members(type(value)):
        with contextlib.suppress(AttributeError):  # not set yet
            found[member.__name__] = member.__get__(value)
    return found
