"""Intrinsic calls (3.12 and later) and the interactive displayhook."""
from __future__ import annotations

from typing import Any

from ..registry import Frame, opcode
from .containers import list_to_tuple
from .coroutines import async_gen_wrap
from .exceptions import prep_reraise_star
from .names import import_star


@opcode("PRINT_EXPR")
def print_expr(frame: Frame, stack: list[Any], operand: Any) -> None:
    frame.domain.print_expression(stack.pop())


@opcode("CALL_INTRINSIC_1")
def call_intrinsic_1(frame: Frame, stack: list[Any], name: str) -> None:
    domain = frame.domain
    if name == "print":
        domain.print_expression(stack[-1])
        stack[-1] = None
    elif name == "import_star":
        import_star(frame, stack, None)
        stack.append(None)
    elif name == "stopiteration_error":
        stack[-1] = domain.stopiteration_error(frame, stack[-1])
    elif name == "async_gen_wrap":
        async_gen_wrap(frame, stack, None)
    elif name == "unary_positive":
        stack[-1] = frame.domain.unary("+", stack[-1])
    elif name == "list_to_tuple":
        list_to_tuple(frame, stack, None)
    else:
        stack[-1] = domain.type_parameter(frame, name, stack[-1], None)


@opcode("CALL_INTRINSIC_2")
def call_intrinsic_2(frame: Frame, stack: list[Any], name: str) -> None:
    if name == "prep_reraise_star":
        prep_reraise_star(frame, stack, None)
        return
    second = stack.pop()
    stack[-1] = frame.domain.type_parameter(frame, name, stack[-1], second)
