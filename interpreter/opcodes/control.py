"""Jumps, loops and returns."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, Handler, opcode
from ..sentinels import LEAVE, NULL, STOP


@opcode("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def jump(frame: Frame, stack: list[Any], target: int) -> int:
    return target


def pop_jump_if(wanted: bool) -> Handler:
    def run(frame: Frame, stack: list[Any], target: int) -> int | None:
        value = stack.pop()
        return target if (value if type(value) is bool else bool(frame.domain.truth(value))) is wanted else None

    return run


def jump_or_pop(wanted: bool) -> Handler:
    def run(frame: Frame, stack: list[Any], target: int) -> int | None:
        if bool(frame.domain.truth(stack[-1])) is wanted:
            return target
        stack.pop()
        return None

    return run


for _truth in (True, False):
    opcode(f"POP_JUMP_IF_{_truth}".upper())(pop_jump_if(_truth))
    opcode(f"JUMP_IF_{_truth}_OR_POP".upper())(jump_or_pop(_truth))


@opcode("POP_JUMP_IF_NONE")
def pop_jump_if_none(frame: Frame, stack: list[Any], target: int) -> int | None:
    return target if frame.domain.is_none(stack.pop()) else None


@opcode("POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(frame: Frame, stack: list[Any], target: int) -> int | None:
    return None if frame.domain.is_none(stack.pop()) else target


@opcode("GET_ITER")
def get_iter(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_iter(stack[-1])


@opcode("GET_ITER:WITH_PLACE")
def get_iter_with_place(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.get_iter(stack[-1])
    stack.append(NULL)


def for_iter(place: int, pops: bool = False) -> Handler:
    """place: of the iterator. pops: whether it goes at its end; else END_FOR takes what stands for the next item."""

    def run(frame: Frame, stack: list[Any], target: int) -> int | None:
        value = frame.domain.next_item(stack[place])
        if value is not STOP:
            stack.append(value)
            return None
        stack.pop() if pops else stack.append(None)
        return target

    return run


opcode("FOR_ITER")(for_iter(-1))
opcode("FOR_ITER:POPS")(for_iter(-1, pops=True))
opcode("FOR_ITER:WITH_PLACE")(for_iter(-2))


@opcode("RETURN_VALUE")
def return_value(frame: Frame, stack: list[Any], operand: Any) -> int:
    frame.value = stack.pop()
    return LEAVE


@opcode("RETURN_CONST")
def return_const(frame: Frame, stack: list[Any], value: Any) -> int:
    frame.value = value
    return LEAVE
