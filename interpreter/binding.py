"""Argument binding with CPython's own rules and messages.

A function with the user's signature whose body returns its parameters is compiled once per code object; calling it
natively binds, and raises what a call of the user's function raises.
"""
from __future__ import annotations

import operator
from types import CodeType, FunctionType
from typing import Any

from .domain.core import PLAIN, is_a
from .order import LAST_FIRST
from .program import CO_VARARGS, CO_VARKEYWORDS, Program


def binder_for(program: Program, code: CodeType) -> FunctionType:
    """A function that takes what `code` takes and returns its bound parameters as a list."""
    if program.binder is None:
        program.binder = FunctionType(binder_code(code), globals(), code.co_name)
    return program.binder


def binder_code(code: CodeType) -> CodeType:
    positional = [f"a{i}" for i in range(code.co_argcount)]
    keyword_only = [f"k{i}" for i in range(code.co_kwonlyargcount)]
    signature = positional[: code.co_posonlyargcount]
    if signature:
        signature = [*signature, "/"]
    signature += positional[code.co_posonlyargcount :]
    returned = positional + keyword_only
    if code.co_flags & CO_VARARGS:
        signature.append("*rest")
        returned = [*returned, "rest"]
    elif keyword_only:
        signature.append("*")
    signature += keyword_only
    if code.co_flags & CO_VARKEYWORDS:
        signature.append("**named")
        returned = [*returned, "named"]
    source = f"def binder({', '.join(signature)}): return [{', '.join(returned)}]"
    made = next(const for const in compile(source, "<binder>", "exec").co_consts if isinstance(const, CodeType))
    count = len(made.co_varnames)
    return made.replace(co_varnames=code.co_varnames[:count], co_name=code.co_name, co_qualname=code.co_qualname)


def bind_arguments(
    program: Program, function: FunctionType, args: list[Any], kwargs: dict[str, Any], native: Any = operator.call
) -> list[Any]:
    """The parameters' values in varnames order. Raises the TypeError of a native call.

    `native` calls C code that may run Python: the comparison of keywords of a str subclass.
    """
    binder = binder_for(program, function.__code__)
    if (
        binder.__defaults__ is not function.__defaults__
        or binder.__kwdefaults__ is not function.__kwdefaults__
        or binder.__qualname__ != function.__qualname__
    ):
        # a new one: another thread may be about to call this one. It is kept where its defaults are plain: others may
        # have to die with their function
        binder = FunctionType(binder.__code__, globals(), function.__name__, function.__defaults__)
        binder.__kwdefaults__ = function.__kwdefaults__
        binder.__qualname__ = function.__qualname__
        if all(type(v) in PLAIN for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            program.binder = binder
    if kwargs and not all(type(name) is str for name in kwargs):
        if not all(is_a(name, str) for name in kwargs):
            raise TypeError("keywords must be strings")
        return native(binder, *args, **kwargs)
    return binder(*args, **kwargs)


def unbound_arguments(code: CodeType, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that do not fit, in the order in which they die (Python/ceval.c initialize_locals).

    First the positional ones that are too many, then the keywords from the first wrong one on, then the parameters as
    variables do.
    """
    excess = [] if code.co_flags & CO_VARARGS else args[code.co_argcount :]
    taken = args[: code.co_argcount]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    bound: dict[str, Any] = {}
    wrong: list[Any] = []
    for name, value in kwargs.items():
        if wrong or name not in names[code.co_posonlyargcount :] or name in names[: len(taken)]:
            wrong.append(value)
        else:
            bound[name] = value
    parameters = [*taken, *(bound[name] for name in names if name in bound)]
    return [*excess, *wrong, *(parameters[::-1] if LAST_FIRST else parameters)]
