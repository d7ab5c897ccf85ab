"""The interpreted program's sys.settrace: call, line, return and exception events of interpreted frames.

Rules of Python/ceval.c maybe_call_line_trace and Python/sysmodule.c trace_trampoline. Frames that run natively, and
frames that ran already when the function was set, give no events; `f_trace`, `f_trace_opcodes` and jumps by setting
`f_lineno` are not supported.
"""
from __future__ import annotations

from typing import Any

from .frame import Frame
from .protocols import Machine
from .tracebacks import GET_TRACEBACK

CREATES_GENERATOR = 0x20 | 0x80 | 0x200  # the code flags of generators, coroutines and asynchronous generators
FORWARD = frozenset({"SEND", "JUMP_BACKWARD_NO_INTERRUPT"})  # an await's loop makes no line event


class Trace:
    """The events of one activation of a frame: from its call or resumption to its return or yield."""

    def __init__(self, machine: Machine, frame: Frame) -> None:
        self.machine = machine
        self.frame = frame
        self.local: Any = None  # what the call event gave
        instructions = frame.program.instructions
        self.start = frame.pc  # the RESUME: what stands before it is no part of the program
        while self.start < len(instructions) - 1 and instructions[self.start].opname != "RESUME":
            self.start += 1
        self.previous, self.line = self.start, instructions[self.start].line
        pc, frame.pc = frame.pc, self.start
        self.local = self.call(machine.tracer, "call", None)
        frame.pc = pc

    def call(self, function: Any, event: str, argument: Any) -> Any:
        """Call a trace function, untraced. What it raises switches tracing off."""
        machine = self.machine
        if function is None or machine.tracer is None:
            return None
        machine.in_trace = True
        try:
            return machine.domain.call(function, [machine.show(self.frame), event, argument], {})
        except BaseException:
            machine.tracer = None
            raise
        finally:
            machine.in_trace = False

    def event(self, name: str, argument: Any) -> None:
        result = self.call(self.local, name, argument)
        if result is not None:
            self.local = result

    def before(self) -> None:
        """Before an instruction: a line event where a line begins, or begins again after a jump back."""
        pc = self.frame.pc
        if pc <= self.start and self.previous == self.start:
            return
        instruction = self.frame.program.instructions[pc]
        line, last = instruction.line, self.line
        back = pc < self.previous and instruction.opname not in FORWARD
        self.previous, self.line = pc, line
        if line is not None and (line != last or back):
            self.event("line", None)

    def raised(self, error: BaseException, pc: int) -> None:
        """`error` was raised at pc; the frame stands at its handler by now."""
        now, self.frame.pc = self.frame.pc, pc
        self.event("exception", (type(error), error, GET_TRACEBACK(error)))
        self.frame.pc = now

    def left(self, value: Any) -> None:
        """The frame returned or yielded `value`, or an exception left it (None)."""
        self.event("return", value)


def trace_of(machine: Machine, frame: Frame) -> Trace | None:
    """Where the program traces: the trace of a frame that begins to run; not of a call that only makes a generator."""
    if machine.tracer is None or machine.in_trace or machine.domain.observes:
        return None
    if frame.exc_item is None and frame.code.co_flags & CREATES_GENERATOR:
        return None
    return Trace(machine, frame)
