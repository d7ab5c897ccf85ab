"""Stack shuffling and constants."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode
from ..sentinels import NULL


@opcode("NOP", "RESUME")
def nop(frame: Frame, stack: list[Any], operand: Any) -> None:
    pass


@opcode("POP_TOP", "END_FOR")
def pop_top(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.pop()


@opcode("END_FOR:POPS_BOTH", "POP_ITER:WITH_PLACE")
def pop_both(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.pop()
    stack.pop()


@opcode("END_SEND")
def end_send(frame: Frame, stack: list[Any], operand: Any) -> None:
    del stack[-2]


@opcode("PUSH_NULL")
def push_null(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(NULL)


@opcode("LOAD_CONST")
def load_const(frame: Frame, stack: list[Any], value: Any) -> None:
    stack.append(value)


@opcode("COPY")
def copy(frame: Frame, stack: list[Any], depth: int) -> None:
    stack.append(stack[-depth])


@opcode("SWAP")
def swap(frame: Frame, stack: list[Any], depth: int) -> None:
    stack[-1], stack[-depth] = stack[-depth], stack[-1]
