"""Errors of the machine itself, as opposed to exceptions of the interpreted program."""
from __future__ import annotations

from typing import Any


class Signal(BaseException):
    """A request to the machine's owner that user code never sees.

    No `except`, `finally` or `with` of the interpreted program runs for it: frames it passes through are abandoned.
    capture's graph breaks are Signals.
    """


class InterpreterError(Exception):
    """The machine met something it cannot interpret, or found itself inconsistent.

    Like a Signal it is never routed to the interpreted program's handlers. `.reason` says what, `.instruction` is the
    instruction's text or None, `.file`, `.line`, `.function` the user's place, `.stack` the places from the outermost
    interpreted frame inwards as (file, line, function).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.instruction: str | None = None
        self.file: str | None = None
        self.line: int | None = None
        self.function: str | None = None
        self.stack: tuple[tuple[str, int | None, str], ...] = ()

    def locate(self, frame: Any) -> None:
        """Fill in the place from the innermost frame; the first caller wins."""
        if self.instruction is not None:
            return
        self.instruction = str(frame.instruction)
        self.file, self.line, self.function = frame.code.co_filename, frame.line, frame.code.co_qualname
        places = []
        walk = frame
        while walk is not None:
            places.append((walk.code.co_filename, walk.line, walk.code.co_qualname))
            walk = walk.back
        self.stack = tuple(reversed(places))

    def __str__(self) -> str:
        if self.instruction is None:
            return self.reason
        return f"{self.reason}\n  at {self.file}:{self.line} in {self.function}, instruction {self.instruction}"


UNROUTED = (Signal, InterpreterError)
