"""Short runs of instructions that continuations are made with."""

from __future__ import annotations

import dis
from typing import Any

from bytecode import Instr

from .stack_layout import NULL_FIRST

JUMP_IF_FALSE = "POP_JUMP_IF_FALSE" if "POP_JUMP_IF_FALSE" in dis.opmap else "POP_JUMP_FORWARD_IF_FALSE"
LOAD_CELL = "LOAD_CLOSURE" if NULL_FIRST else "LOAD_FAST"  # 3.13 has one instruction for both


def set_constant(name: str, value: Any, at: Any) -> list[Instr]:
    """``name = value``."""
    return [Instr("LOAD_CONST", value, location=at), Instr("STORE_FAST", name, location=at)]


def call_sequence(callee: Instr, arguments: list[Instr], at: Any) -> list[Instr]:
    """Instructions that call what ``callee`` loads."""
    null = Instr("PUSH_NULL", location=at)
    out = [null, callee] if NULL_FIRST else [callee, null]
    out += arguments
    if "PRECALL" in dis.opmap:
        out.append(Instr("PRECALL", len(arguments), location=at))
    out.append(Instr("CALL", len(arguments), location=at))
    return out


def call_on_top(function: Any, at: Any) -> list[Instr]:
    """What is on top of the stack becomes the function's result of it (3.13 and later)."""
    callee = [Instr("LOAD_CONST", function, location=at), Instr("PUSH_NULL", location=at)]
    return [*callee, Instr("SWAP", 2, location=at), Instr("SWAP", 3, location=at), Instr("CALL", 1, location=at)]


def call_constant(function: Any, at: Any) -> list[Instr]:
    return call_sequence(Instr("LOAD_CONST", function, location=at), [], at)
