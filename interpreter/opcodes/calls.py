"""Calls and function objects."""
from __future__ import annotations

import sys
from typing import Any

from ..frame import Frame
from ..registry import opcode
from ..sentinels import NULL
from .containers import take

SPREAD_OUTLIVES_CALL = sys.version_info < (3, 12)


def named(args: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take the keyword arguments off the end of `args`."""
    split = len(args) - len(names)
    kwargs = dict(zip(names, args[split:], strict=True))
    del args[split:]
    return kwargs


def drop(args: list[Any]) -> None:
    """What C code was given dies after its object, the first argument first; a list drops its last one first.

    A function's frame has taken its arguments: then there are none here.
    """
    args.reverse()
    args.clear()


@opcode("KW_NAMES")
def kw_names(frame: Frame, stack: list[Any], names: tuple[str, ...]) -> None:
    frame.kw_names = names


@opcode("CALL:NULL_FIRST")
def call_null_first(frame: Frame, stack: list[Any], count: int) -> None:
    if count:
        args = stack[-count:]
        del stack[-count:]
    else:
        args = []
    callee = stack.pop()
    method = stack[-1]
    if method is not NULL:
        args.insert(0, callee)
        callee = method
    names = frame.kw_names
    if names:
        frame.kw_names = ()
        kwargs = named(args, names)
        stack[-1] = frame.domain.call(callee, args, kwargs)
    else:
        stack[-1] = frame.domain.call(callee, args, {})
    if args:
        del callee, method  # a bound method of C's holds its object
        drop(args)


@opcode("CALL:NULL_AFTER")
def call_null_after(frame: Frame, stack: list[Any], count: int) -> None:
    args = take(stack, count)
    if stack[-1] is NULL:
        stack.pop()
    else:
        args.insert(0, stack.pop())
    stack[-1] = frame.domain.call(stack[-1], args, {})
    if args:
        drop(args)


@opcode("CALL_KW")
def call_kw(frame: Frame, stack: list[Any], count: int) -> None:
    names = stack.pop()
    args = take(stack, count)
    if stack[-1] is NULL:
        stack.pop()
    else:
        args.insert(0, stack.pop())
    kwargs = named(args, names)
    stack[-1] = frame.domain.call(stack[-1], args, kwargs)
    if args:
        drop(args)


def spread(frame: Frame, stack: list[Any], callee: Any, has_kwargs: bool) -> None:
    """`callee(*stack[-2], **stack[-1])`: from 3.12 on the tuple and the dict are the call's alone, and die in it."""
    held = stack[-1 - has_kwargs :] if SPREAD_OUTLIVES_CALL else None
    if has_kwargs:
        result = frame.domain.call_spread(callee, stack.pop(-2), stack.pop())
    else:
        result = frame.domain.call_spread(callee, stack.pop(), {})
    stack[-1] = result
    del held


@opcode("CALL_FUNCTION_EX:NULL_FIRST")
def call_function_ex_null_first(frame: Frame, stack: list[Any], has_kwargs: bool) -> None:
    callee = stack.pop(-2 - has_kwargs)
    spread(frame, stack, callee, has_kwargs)


@opcode("CALL_FUNCTION_EX:NULL_AFTER")
def call_function_ex_null_after(frame: Frame, stack: list[Any], has_kwargs: bool) -> None:
    stack.pop(-2 - has_kwargs)
    spread(frame, stack, stack[-2 - has_kwargs], has_kwargs)


@opcode("MAKE_FUNCTION")
def make_function(frame: Frame, stack: list[Any], flags: int) -> None:
    code = stack.pop()
    closure = stack.pop() if flags & 8 else None
    annotations = stack.pop() if flags & 4 else None
    kwdefaults = stack.pop() if flags & 2 else None
    defaults = stack.pop() if flags & 1 else None
    stack.append(frame.domain.make_function(frame, code, defaults, kwdefaults, annotations, closure))


@opcode("MAKE_FUNCTION:BARE")
def make_function_bare(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.make_function(frame, stack[-1], None, None, None, None)


@opcode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(frame: Frame, stack: list[Any], flag: int) -> None:
    function = stack.pop()
    stack[-1] = frame.domain.set_function_attribute(frame, function, flag, stack[-1])
