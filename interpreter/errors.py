"""Errors of the machine itself, as opposed to exceptions of the interpreted program."""
from __future__ import annotations

from typing import Any

from .frame import opened


class Signal(BaseException):
    """A request to the machine's owner that user code never sees.

    No `except`, `finally` or `with` of the interpreted program runs for it: frames it passes through are abandoned.
    capture's graph breaks are Signals.
    """


class InterpreterError(Exception):
    """The machine met something it cannot interpret, or found itself inconsistent.

    Like a Signal it is never routed to the interpreted program's handlers. `.reason` says what, `.instruction` is the
    instruction's text or None, `.file`, `.line`, `.function` the user's place, `.stack` the places from the outermost
    interpreted frame inwards as (file, line, function), `.operands` the types of the values on the innermost frame's
    stack. Where another exception showed that the machine is wrong, that is the `__cause__`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.instruction: str | None = None
        self.file: str | None = None
        self.line: int | None = None
        self.function: str | None = None
        self.stack: tuple[tuple[str, int, str], ...] = ()
        self.operands: tuple[str, ...] = ()

    def locate(self, frame: Any) -> None:
        """Fill in the place from the innermost frame; the first caller wins."""
        if self.instruction is not None:
            return
        self.instruction = str(frame.instruction)
        places = []
        for one in opened(frame):
            line = one.code.co_firstlineno if one.line is None else one.line
            places.append((one.code.co_filename, line, one.code.co_qualname))
        self.file, self.line, self.function = places[0]
        self.stack = tuple(reversed(places))
        self.operands = tuple(type(value).__qualname__ for value in frame.stack)

    def __str__(self) -> str:
        if self.instruction is None:
            return self.reason
        on_stack = f"; on the stack: {', '.join(self.operands)}" if self.operands else ""
        place = f"{self.file}:{self.line} in {self.function}, instruction {self.instruction}"
        return f"{self.reason}\n  at {place}{on_stack}"


UNROUTED = (Signal, InterpreterError)
# A handler only moves values between the stack, the frame and the domain. One of these, raised by a handler itself and
# not by what it called, is the machine's own failure (KeyboardInterrupt and RecursionError may arise anywhere).
INTERNAL = frozenset({
    IndexError, TypeError, AttributeError, ValueError, KeyError, NameError, UnboundLocalError, AssertionError,
    ZeroDivisionError, SystemError,
})  # fmt: skip
