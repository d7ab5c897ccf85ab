"""Raising, matching and leaving exceptions; with-blocks."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode
from ..sentinels import NULL


@opcode("RAISE_VARARGS")
def raise_varargs(frame: Frame, stack: list[Any], count: int) -> None:
    if count == 0:
        frame.domain.reraise_handled(frame)
    cause = stack.pop() if count == 2 else frame.domain.no_cause
    frame.domain.raise_(frame, stack.pop(), cause)


@opcode("RERAISE")
def reraise(frame: Frame, stack: list[Any], depth: int) -> None:
    pc = stack[-1 - depth] if depth else None
    frame.domain.reraise(frame, stack.pop(), pc if type(pc) is int else None)


@opcode("PUSH_EXC_INFO")
def push_exc_info(frame: Frame, stack: list[Any], operand: Any) -> None:
    item = frame.domain.machine.exc_item
    exc = stack[-1]
    stack[-1] = item[0]
    stack.append(exc)
    item[0] = exc


@opcode("POP_EXCEPT")
def pop_except(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.machine.exc_item[0] = stack.pop()


@opcode("CHECK_EXC_MATCH")
def check_exc_match(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack[-1] = frame.domain.exc_match(stack[-2], stack[-1])


@opcode("CHECK_EG_MATCH")
def check_eg_match(frame: Frame, stack: list[Any], operand: Any) -> None:
    kind = stack.pop()
    rest, match = frame.domain.exc_group_match(stack[-1], kind)
    stack[-1] = rest
    stack.append(match)
    if match is not None:
        frame.domain.machine.exc_item[0] = match


@opcode("PREP_RERAISE_STAR")
def prep_reraise_star(frame: Frame, stack: list[Any], operand: Any) -> None:
    raised = stack.pop()
    stack[-1] = frame.domain.prep_reraise_star(stack[-1], raised)


@opcode("LOAD_ASSERTION_ERROR")
def load_assertion_error(frame: Frame, stack: list[Any], operand: Any) -> None:
    stack.append(AssertionError)


@opcode("BEFORE_WITH")
def before_with(frame: Frame, stack: list[Any], operand: Any) -> None:
    leave, entered = frame.domain.before_with(stack[-1])
    stack[-1] = leave
    stack.append(entered)


@opcode("LOAD_SPECIAL")
def load_special(frame: Frame, stack: list[Any], name: str) -> None:
    stack[-1] = frame.domain.load_special(stack[-1], name)
    stack.append(NULL)  # the method is bound already


@opcode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, stack: list[Any], operand: Any) -> None:
    exc = stack[-1]
    stack.append(frame.domain.exit_with(stack[-4], (type(exc), exc, exc.__traceback__)))


@opcode("WITH_EXCEPT_START:WITH_SELF")
def with_except_start_with_self(frame: Frame, stack: list[Any], operand: Any) -> None:
    exc, owner = stack[-1], stack[-4]
    given = (type(exc), exc, exc.__traceback__)
    stack.append(frame.domain.exit_with(stack[-5], given if owner is NULL else (owner, *given)))
