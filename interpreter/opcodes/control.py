"""Jumps, loops and returns."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode
from ..sentinels import LEAVE, NULL, STOP


@opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def jump(frame: Frame, stack: list[Any], target: int) -> int:
    return target


@opcode("POP_JUMP_IF_TRUE")
def pop_jump_if_true(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = stack.pop()
    if value is True or value is not False and frame.domain.truth(value):
        return target
    return None


@opcode("POP_JUMP_IF_FALSE")
def pop_jump_if_false(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = stack.pop()
    if value is False or value is not True and not frame.domain.truth(value):
        return target
    return None


@opcode("POP_JUMP_IF_NONE")
def pop_jump_if_none(frame: Frame, stack: list[Any], target: int) -> int | None:
    return target if frame.domain.is_none(stack.pop()) else None


@opcode("POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(frame: Frame, stack: list[Any], target: int) -> int | None:
    return None if frame.domain.is_none(stack.pop()) else target


@opcode("JUMP_IF_TRUE_OR_POP")
def jump_if_true_or_pop(frame: Frame, stack: list[Any], target: int) -> int | None:
    if frame.domain.truth(stack[-1]):
        return target
    stack.pop()
    return None


@opcode("JUMP_IF_FALSE_OR_POP")
def jump_if_false_or_pop(frame: Frame, stack: list[Any], target: int) -> int | None:
    if not frame.domain.truth(stack[-1]):
        return target
    stack.pop()
    return None


@opcode("GET_ITER")
def get_iter(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_iter(stack[-1])


@opcode("GET_ITER:WITH_PLACE")
def get_iter_with_place(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_iter(stack[-1])
    stack.append(NULL)


@opcode("FOR_ITER")
def for_iter(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = frame.domain.next_item(stack[-1])
    if value is STOP:
        stack.append(None)  # END_FOR takes it away
        return target
    stack.append(value)
    return None


@opcode("FOR_ITER:POPS")
def for_iter_pops(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = frame.domain.next_item(stack[-1])
    if value is STOP:
        stack.pop()
        return target
    stack.append(value)
    return None


@opcode("FOR_ITER:WITH_PLACE")
def for_iter_with_place(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = frame.domain.next_item(stack[-2])
    if value is STOP:
        stack.append(None)  # END_FOR takes it away
        return target
    stack.append(value)
    return None


@opcode("POP_ITER:WITH_PLACE")
def pop_iter_with_place(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.pop()
    stack.pop()


@opcode("RETURN_VALUE")
def return_value(frame: Frame, stack: list[Any], operand: Any) -> int:
    frame.value = stack.pop()
    return LEAVE


@opcode("RETURN_CONST")
def return_const(frame: Frame, stack: list[Any], value: Any) -> int:
    frame.value = value
    return LEAVE
