"""The expression of the user's that an instruction belongs to: which characters of which line."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moebius.interpreter import decode, is_kind

from .liveness import falls_through
from .user_code import is_library


class Place(tuple):
    """(file, line, function), a tuple of these three, of an instruction that is known. code: its code, None where it is
    not known; offset: where it begins there."""

    code: types.CodeType | None
    offset: int

    def __new__(cls, place: Iterable[Any], code: types.CodeType | None = None, offset: int = 0) -> Place:
        made = super().__new__(cls, place)
        made.code, made.offset = code, offset
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@dataclass(frozen=True)
class Excerpt:
    """A line of a program, and an expression in it. text: the line, without the space around it; begin, end: which
    characters of the text are the expression (its first line, where it has several)."""

    file: str
    line: int
    text: str
    begin: int
    end: int

    @property
    def underline(self) -> str:
        """What stands below the text: "^" under the expression."""
        return " " * self.begin + "^" * (self.end - self.begin)

    @property
    def expression(self) -> str:
        return self.text[self.begin : self.end]


def span_of(code: types.CodeType, offset: int) -> tuple[int, int, int, int] | None:
    """(line, column, last line, column behind the end) of an instruction's expression, in bytes as the compiler counts
    them; None where the compiler did not say."""
    for index, (line, last, column, end) in enumerate(code.co_positions()):
        if index == offset // 2:
            if line is None or last is None or column is None or end is None:
                return None
            return entered(code.co_filename, line, column, last) or (line, column, last, end)
    return None


@functools.cache
def entered(file: str, line: int, column: int, last: int) -> tuple[int, int, int, int] | None:
    """What a ``with`` statement enters, where one stands at these lines. The compiler says of the instructions that
    enter and leave it that they are the whole statement, body included."""
    lines = [linecache.getline(file, number) for number in range(line, last + 1)]
    if not lines[0].encode()[column:].startswith((b"with", b"async with")):
        return None
    try:
        source = "if 0:\n" + "".join([" " * column + lines[0].encode()[column:].decode(), *lines[1:]])
        tree = compile(source, file, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):  # (``with``s within a line, or a file that has changed)
        return None
    (statement,) = tree.body[0].body
    if not is_kind(statement, ast.With | ast.AsyncWith):
        return None
    first, end = statement.items[0].context_expr, statement.items[-1].context_expr
    return line + first.lineno - 2, first.col_offset, line + end.end_lineno - 2, end.end_col_offset


def excerpt_of(place: tuple[Any, ...]) -> Excerpt | None:
    """The line of a place with its expression; None where the source is not there."""
    code = getattr(place, "code", None)
    span = None if code is None else span_of(code, place.offset)  # type: ignore[attr-defined]
    return None if code is None or span is None else excerpt_at(code, span)


def excerpt_at(code: types.CodeType, span: tuple[int, int, int, int]) -> Excerpt | None:
    """The expression of a code's source that stands there; None where the source is not there."""
    line, column, last, end = span
    whole = linecache.getline(code.co_filename, line).rstrip("\n")
    text = whole.strip()
    indent, encoded = len(whole) - len(whole.lstrip()), whole.encode()
    if not text or column > len(encoded):
        return None
    begin = len(encoded[:column].decode(errors="replace")) - indent
    until = len(text) if last > line else len(encoded[:end].decode(errors="replace")) - indent
    return Excerpt(code.co_filename, line, text, begin, until) if 0 <= begin < until <= len(text) else None


def on_the_stack(code: types.CodeType, index: int, depth: int, slot: int) -> Excerpt | None:
    """The expression whose value is on the stack before an instruction, where the stack is so deep; slot: which, from
    the bottom. None where several ways lead there, or the source is not there."""
    program = decode(code)
    targets = {item.target for item in program.instructions} - {None}
    at = index
    while at > 0 and at not in targets and falls_through(before := program.instructions[at - 1]):
        if depth == slot + 1:  # it is on top: what ran last has put it there
            return excerpt_at(code, span) if (span := span_of(code, before.offset)) is not None else None
        depth -= dis.stack_effect(before.opcode, before.arg if before.opcode >= dis.HAVE_ARGUMENT else None)
        at -= 1
        if depth <= slot:
            return None
    return None


def users_place(stack: Iterable[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Of a stack, outermost first, the innermost place that is not torch's, the standard library's or ours."""
    places = [*stack]
    return next((place for place in reversed(places) if not is_library(place[0])), places[-1] if places else None)


def names_in(code: types.CodeType, offset: int) -> list[str]:
    """The local variables that the instruction's expression reads, in their order."""
    around, found = span_of(code, offset), {}
    if around is None:
        return []
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    for instruction in dis.get_instructions(code):
        place = instruction.positions
        if place is None or place.lineno is None or place.end_lineno is None or place.col_offset is None:
            continue
        inside = around[:2] <= (place.lineno, place.col_offset) and place.end_lineno <= around[2]
        if inside and place.lineno == around[2] and place.col_offset >= around[3]:
            continue
        if inside and instruction.opname.startswith("LOAD_"):
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            found.update(dict.fromkeys(name for name in names if isinstance(name, str) and name in local))
    return [*found]
