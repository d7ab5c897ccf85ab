"""async and await."""
from __future__ import annotations

from typing import Any

from ..natives import is_a
from ..registry import Frame, opcode


@opcode("GET_AWAITABLE")
def get_awaitable(frame: Frame, stack: list[Any], where: int) -> None:
    stack[-1] = frame.domain.get_awaitable(stack[-1], where)


@opcode("GET_AITER")
def get_aiter(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_aiter(stack[-1])


@opcode("GET_ANEXT")
def get_anext(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(frame.domain.get_anext(stack[-1]))


@opcode("END_ASYNC_FOR")
def end_async_for(frame: Frame, stack: list[Any], operand: Any) -> None:
    exc = stack.pop()
    if not is_a(exc, StopAsyncIteration):
        frame.domain.reraise(frame, exc)
    stack.pop()


@opcode("BEFORE_ASYNC_WITH")
def before_async_with(frame: Frame, stack: list[Any], operand: Any) -> None:
    leave, entered = frame.domain.before_async_with(stack[-1])
    stack[-1] = leave
    stack.append(entered)


@opcode("ASYNC_GEN_WRAP")
def async_gen_wrap(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.async_gen_wrap(stack[-1])
