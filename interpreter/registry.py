"""Where opcode handlers register. A handler is `handler(frame, stack, operand) -> None | next pc | LEAVE`."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .domain import Domain
from .frame import Frame as FrameOf

Frame = FrameOf[Domain]

Handler = Callable[[Frame, list[Any], Any], "int | None"]
HANDLERS: dict[str, Handler] = {}
OPERANDS: dict[Handler, Callable[[Any], int]] = {}


def opcode(*names: str, operands: int | Callable[[Any], int] = 0) -> Callable[[Handler], Handler]:
    """Register a handler under each of `names` (CPython's opcode names, or a variant that a version table names).

    `operands`: how many values it leaves on the stack where it raises, as a number or a function of its operand. As in
    CPython they then die before anything else, the deepest first; what lies beneath them dies from the top.
    """
    counted = operands if callable(operands) else (lambda operand: operands)

    def register(handler: Handler) -> Handler:
        if operands:
            OPERANDS[handler] = counted
        for name in names:
            if name in HANDLERS:
                raise ImportError(f"two handlers for the instruction {name}")
            HANDLERS[name] = handler
        return handler

    return register
