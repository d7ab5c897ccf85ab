"""What is thrown into a frame that waits: a generator's or coroutine's."""
from __future__ import annotations

import sys
from types import AsyncGeneratorType
from typing import Any

from .frame import Frame
from .natives import is_a
from .tracebacks import GET_CONTEXT, SET_CONTEXT

RESUME_DEPTH_1 = 4  # RESUME_OPARG_DEPTH1_MASK


def rethrow(thrown: list[BaseException]) -> None:
    """Raise the one exception in the list, and empty it. Its context stays as it is."""
    error = thrown.pop()
    context = GET_CONTEXT(error)
    try:
        raise error
    finally:
        SET_CONTEXT(error, context)
        del error, context


def closes_unrun(frame: Frame) -> bool:
    """Whether closing a suspended generator runs nothing of it (3.13 gen_close): its yield is in no try statement."""
    if sys.version_info < (3, 13) or not frame.suspended:
        return False
    following = frame.program.instructions[frame.pc + 1]
    return following.opname == "RESUME" and bool((following.arg or 0) & RESUME_DEPTH_1)


def take_thrown(frame: Frame, thrown: list[BaseException]) -> list[Any]:
    """throw()'s arguments as the program gave them, else the exception."""
    given, frame.thrown_args = frame.thrown_args, None
    return given or [thrown[0]]


def runs_async(frame: Frame) -> bool:
    """Whether asend(), athrow() or aclose() runs the async generator: what leaves it gets to whoever awaits them."""
    shell = frame.shell() if frame.shell is not None else None
    return is_a(shell, AsyncGeneratorType) and shell.ag_running
