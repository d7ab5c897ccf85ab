"""Generators and delegation."""
from __future__ import annotations

from typing import Any

from ..natives import is_a
from ..registry import Frame, opcode
from ..sentinels import LEAVE


@opcode("RETURN_GENERATOR")
def return_generator(frame: Frame, stack: list[Any], operand: Any) -> int:
    frame.value = frame.domain.make_generator(frame)
    return LEAVE


@opcode("YIELD_VALUE")
def yield_value(frame: Frame, stack: list[Any], operand: Any) -> int:
    frame.value = stack.pop()
    frame.suspended = True
    return LEAVE


@opcode("GET_YIELD_FROM_ITER")
def get_yield_from_iter(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_yield_from_iter(frame, stack[-1])


@opcode("SEND")
def send(frame: Frame, stack: list[Any], target: int) -> int | None:
    yielded, value = frame.domain.send(stack[-2], stack[-1])
    stack[-1] = value
    return None if yielded else target


@opcode("SEND:POPS")
def send_pops(frame: Frame, stack: list[Any], target: int) -> int | None:
    yielded, value = frame.domain.send(stack[-2], stack[-1])
    if yielded:
        stack[-1] = value
        return None
    stack.pop()
    stack[-1] = value
    return target


@opcode("CLEANUP_THROW")
def cleanup_throw(frame: Frame, stack: list[Any], operand: Any) -> None:
    exc = stack.pop()
    if not is_a(exc, StopIteration):
        frame.domain.reraise(frame, exc)
    stack[-2] = None
    stack[-1] = exc.value
