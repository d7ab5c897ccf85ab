"""Generators and delegation."""
from __future__ import annotations

from typing import Any

from ..natives import is_a
from ..registry import Frame, Handler, opcode
from ..sentinels import LEAVE, NULL
from ..tables import COUNTED


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


@opcode("GET_YIELD_FROM_ITER:WITH_PLACE")
def get_yield_from_iter_with_place(frame: Frame, stack: list[Any], operand: Any) -> None:
    value = stack[-1]
    iterator = frame.domain.get_yield_from_iter(frame, value)
    if type(value) in COUNTED and frame.domain.interprets_callbacks:
        stack.append(iterator)  # the generator says that it yields from the list (gi_yieldfrom, `send`)
    else:
        stack[-1] = iterator
        stack.append(NULL)


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


@opcode("SEND:WITH_PLACE")
def send_with_place(frame: Frame, stack: list[Any], target: int) -> int | None:
    value = stack[-1]
    receiver = stack[-3] if stack[-2] is NULL or value is not None else stack[-2]
    yielded, stack[-1] = frame.domain.send(receiver, value)
    return None if yielded else target


@opcode("END_SEND:WITH_PLACE")
def end_send_with_place(frame: Frame, stack: list[Any], operand: Any) -> None:
    del stack[-3:-1]


def cleanup_throw(place: int) -> Handler:
    """place: of the receiver, which goes."""

    def run(frame: Frame, stack: list[Any], operand: Any) -> None:
        exc = stack.pop()
        if not is_a(exc, StopIteration):
            frame.domain.reraise(frame, exc)
        stack[place] = None
        stack[-1] = exc.value

    return run


opcode("CLEANUP_THROW")(cleanup_throw(-2))
opcode("CLEANUP_THROW:WITH_PLACE")(cleanup_throw(-3))
