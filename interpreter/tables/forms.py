"""How an instruction's argument becomes the operand its handler gets.

A form is `form(code, instruction, target index) -> operand`; an Entry names the handler and the form, with a second
handler for instructions whose argument asks for a variant.
"""
from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..reading import Read

LAZY, EAGER = 1, 2  # flags of IMPORT_NAME from 3.15 on

Form = Callable[[CodeType, "Read", "int | None"], Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """`handler` runs the instruction; where `when(argument)` holds, `variant` does.

    `older` names the instruction that does the same on an older Python (with `when`: where that holds): a Program shows
    it by that name, so that its readers know one.
    """

    handler: str
    form: Form
    when: Callable[[int], bool] | None = None
    variant: str = ""
    older: str = ""

    def handler_for(self, arg: int | None) -> str:
        return self.variant if self.when is not None and self.when(arg or 0) else self.handler

    def name_for(self, name: str, arg: int | None) -> str:
        return self.older if self.older and (self.when is None or self.when(arg or 0)) else name

    def handlers(self) -> tuple[str, ...]:
        return (self.handler,) if self.when is None else (self.handler, self.variant)


def bit(mask: int) -> Callable[[int], bool]:
    return lambda arg: bool(arg & mask)


def equal(value: int) -> Callable[[int], bool]:
    return lambda arg: arg == value


def differs(value: int) -> Callable[[int], bool]:
    return lambda arg: arg != value


def none(code: CodeType, ins: Read, target: int | None) -> Any:
    return None


def arg(code: CodeType, ins: Read, target: int | None) -> Any:
    return ins.arg


def jump(code: CodeType, ins: Read, target: int | None) -> Any:
    return target


def const(code: CodeType, ins: Read, target: int | None) -> Any:
    return code.co_consts[ins.arg or 0]


def name(code: CodeType, ins: Read, target: int | None) -> Any:
    return code.co_names[ins.arg or 0]


def name_above_1(code: CodeType, ins: Read, target: int | None) -> Any:
    return code.co_names[(ins.arg or 0) >> 1]


def lazy_name(code: CodeType, ins: Read, target: int | None) -> Any:
    """The imported name; with whether it is to be lazy, where the import is not one that never is."""
    value = ins.arg or 0
    name = code.co_names[value >> 2]
    return name if value & EAGER else (name, bool(value & LAZY))


def super_name(code: CodeType, ins: Read, target: int | None) -> Any:
    """(attribute name, whether super was called with two arguments)."""
    value = ins.arg or 0
    return code.co_names[value >> 2], bool(value & 2)


def flag(code: CodeType, ins: Read, target: int | None) -> Any:
    return bool(ins.arg)


# dis has no public table for BINARY_OP; Include/opcode.h. 3.14 adds the item of a container, see v314.py.
BINARY_OPERATORS = (
    "+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^",
    "+=", "&=", "//=", "<<=", "@=", "*=", "%=", "|=", "**=", ">>=", "-=", "/=", "^=",
)  # fmt: skip


def binary_operator(code: CodeType, ins: Read, target: int | None) -> Any:
    return BINARY_OPERATORS[ins.arg or 0]


def comparison(shift: int) -> Form:
    def read(code: CodeType, ins: Read, target: int | None) -> Any:
        return dis.cmp_op[(ins.arg or 0) >> shift]

    return read


def local_pair(code: CodeType, ins: Read, target: int | None) -> Any:
    return (ins.arg or 0) >> 4, (ins.arg or 0) & 15


def conversion(code: CodeType, ins: Read, target: int | None) -> Any:
    """(conversion letter or '', whether a format spec stands on the stack)."""
    value = ins.arg or 0
    return ("", "s", "r", "a")[value & 3], bool(value & 4)


def convert_letter(code: CodeType, ins: Read, target: int | None) -> Any:
    return ("", "s", "r", "a")[ins.arg or 0]


def interpolation(code: CodeType, ins: Read, target: int | None) -> Any:
    """(conversion letter or None, whether a format spec stands on the stack)."""
    value = ins.arg or 0
    return (None, "s", "r", "a")[value >> 2], bool(value & 1)


def unpack_counts(code: CodeType, ins: Read, target: int | None) -> Any:
    return (ins.arg or 0) & 0xFF, (ins.arg or 0) >> 8


def chosen(names: Mapping[int, Any] | Sequence[Any]) -> Form:
    """The operand is the argument's meaning in `names`."""

    def read(code: CodeType, ins: Read, target: int | None) -> Any:
        return names[ins.arg or 0]

    return read
