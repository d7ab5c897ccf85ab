"""Calls and function objects."""
from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from ..binding import unbound_arguments
from ..order import LAST_FIRST, end_call
from ..registry import Frame, opcode
from ..sentinels import NULL
from .containers import take

SPREAD_OUTLIVES_CALL = sys.version_info < (3, 12)


def named(args: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take the keyword arguments off the end of `args`."""
    split = len(args) - len(names)
    kwargs = dict(zip(names, args[split:], strict=True))
    del args[split:]
    return kwargs


def put_back(stack: list[Any], left: list[Any], count: int) -> None:
    """The call raised: what is left of its `count` operands stands on the stack again, to die in this order."""
    nothing = [NULL] * (count - len(left))
    stack[-1:] = [*nothing, *reversed(left)] if LAST_FIRST else [*left, *nothing]


def left_of(callee: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What a call that raised has left of its operands: a function's frame has taken them, unless they do not fit."""
    if type(callee) is not FunctionType:
        operands = [callee, *args, *kwargs.values()]
        return operands[::-1] if LAST_FIRST else operands
    return [*unbound_arguments(callee.__code__, args, kwargs), callee] if args or kwargs else [callee]


@opcode("KW_NAMES")
def kw_names(frame: Frame, stack: list[Any], names: tuple[str, ...]) -> None:
    frame.kw_names = names


@opcode("CALL:NULL_FIRST", operands=lambda count: count + 2)
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
    kwargs = {}
    if names:
        frame.kw_names = ()
        kwargs = named(args, names)
    try:
        result = frame.domain.call(callee, args, kwargs)
    except BaseException:
        put_back(stack, left_of(callee, args, kwargs), count + 2)
        raise
    del callee, method  # a bound method of C's holds its object
    end_call(stack, args, result)


def call_null_after(frame: Frame, stack: list[Any], count: int, names: tuple[str, ...] = ()) -> None:
    args = take(stack, count)
    if stack[-1] is NULL:
        stack.pop()
    else:
        args.insert(0, stack.pop())
    kwargs = named(args, names) if names else {}
    try:
        result = frame.domain.call(stack[-1], args, kwargs)
    except BaseException:
        put_back(stack, left_of(stack[-1], args, kwargs), count + 2 + bool(names))
        raise
    end_call(stack, args, result)


opcode("CALL:NULL_AFTER", operands=lambda count: count + 2)(call_null_after)


@opcode("CALL_KW", operands=lambda count: count + 3)
def call_kw(frame: Frame, stack: list[Any], count: int) -> None:
    call_null_after(frame, stack, count, stack.pop())


def spread(frame: Frame, stack: list[Any], callee: Any, has_kwargs: bool, count: int) -> None:
    """`callee(*stack[-2], **stack[-1])`: from 3.12 on a function's tuple and dict are the call's, and die in it.

    The instruction has `count` operands.
    """
    outlive = SPREAD_OUTLIVES_CALL or type(callee) is not FunctionType
    held = [callee, *stack[-1 - has_kwargs :]] if outlive else []
    try:
        if has_kwargs:
            result = frame.domain.call_spread(callee, stack.pop(-2), stack.pop())
        else:
            result = frame.domain.call_spread(callee, stack.pop(), {})
    except BaseException:
        put_back(stack, held[::-1] if LAST_FIRST else held, count)
        raise
    del callee
    end_call(stack, held, result)


@opcode("CALL_FUNCTION_EX:NULL_FIRST", operands=lambda has_kwargs: 3 + has_kwargs)
def call_function_ex_null_first(frame: Frame, stack: list[Any], has_kwargs: bool) -> None:
    spread(frame, stack, stack.pop(-2 - has_kwargs), has_kwargs, 3 + has_kwargs)


@opcode("CALL_FUNCTION_EX:NULL_AFTER", operands=lambda has_kwargs: 3 + has_kwargs)
def call_function_ex_null_after(frame: Frame, stack: list[Any], has_kwargs: bool) -> None:
    stack.pop(-2 - has_kwargs)
    spread(frame, stack, stack[-2 - has_kwargs], has_kwargs, 3 + has_kwargs)


@opcode("CALL_FUNCTION_EX:KEYWORDS_OR_NULL", operands=4)
def call_function_ex_keywords_or_null(frame: Frame, stack: list[Any], operand: Any) -> None:
    has_kwargs = stack[-1] is not NULL
    if not has_kwargs:
        stack.pop()
    stack.pop(-2 - has_kwargs)
    spread(frame, stack, stack[-2 - has_kwargs], has_kwargs, 4)


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
