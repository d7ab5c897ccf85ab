"""The debug switch that compares what each instruction does to the stack with what `dis` says."""
from __future__ import annotations

import dis

from .errors import InterpreterError
from .frame import Frame


class Checks:
    """The debug switch: machines made while it is on compare each step's stack effect with `dis.stack_effect`."""

    on = False


CHECKS = Checks()


def check_step(frame: Frame, height: int, jump: int | None) -> None:
    """InterpreterError where the instruction moved the stack by another count than CPython's compiler reckons with."""
    if jump is not None and jump < 0:
        return
    instruction = frame.instruction
    argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
    expected = dis.stack_effect(instruction.opcode, argument, jump=jump is not None)
    if "PRECALL" in dis.opmap:  # 3.11's compiler counts a call's arguments there, before CALL takes them
        if instruction.opname == "PRECALL":
            expected = 0
        elif instruction.opname == "CALL":
            expected += dis.stack_effect(dis.opmap["PRECALL"], argument)
    if len(frame.stack) - height != expected:
        error = InterpreterError(f"stack effect {len(frame.stack) - height}, expected {expected}")
        error.locate(frame)
        raise error
