"""Where opcode handlers register. A handler is `handler(frame, stack, operand) -> None | next pc | LEAVE`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .frame import Frame

Handler = Callable[[Frame, list[Any], Any], "int | None"]
HANDLERS: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler under each of `names` (CPython's opcode names, or a variant that a version table names)."""

    def register(handler: Handler) -> Handler:
        for name in names:
            if name in HANDLERS:
                raise ImportError(f"two handlers for the instruction {name}")
            HANDLERS[name] = handler
        return handler

    return register
