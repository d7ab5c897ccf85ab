"""Where the values at a graph break come from, in the user's names and lines."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable
from typing import Any

from moebius.interpreter import UNSET, Frame, decode, is_kind

from ..bytecode.counting import goes_on_with
from ..bytecode.expressions import Excerpt, Place, excerpt_of, names_in, on_the_stack, users_place
from ..bytecode.liveness import set_before
from ..bytecode.stack_layout import names_stored
from ..codegen.continuation_code import is_own, slot_of
from ..guards.sources import as_written, for_people
from ..heap.objects import Objects
from ..tensors.graphs import GraphWriter, Where
from ..values.numbers import Number
from ..values.values import SYMBOLIC, Break, TensorProxy

MOST = 4  # variables of one expression
KEYS = (TensorProxy, Number)  # which may be of the data
# Instructions whose value is their expression's.
MAKES_ONE = ("CALL", "BINARY_", "UNARY_", "COMPARE_", "LOAD_", "BUILD_", "LIST_", "IS_OP", "CONTAINS_OP", "FORMAT_")
LOCAL = re.compile(r"L\['([^']+)'\]")
OURS = re.compile(r"\bm_\w+")  # names that only a continuation's code has
CHOSEN = (  # detail and hint where data choose an item
    "which item this is follows from a number that only the running step knows",
    "loop over the items and give each its rows: `for e, item in enumerate(items): item(x[index == e])`",
)


def place_of(frame: Frame, index: int) -> Place:
    """The place of an instruction of a frame."""
    instruction, code = frame.program.instructions[index], frame.code
    place = code.co_filename, instruction.line or code.co_firstlineno, code.co_qualname
    return Place(place, code, instruction.offset)


def opened_by_user(stack: tuple[Where, ...], innermost: Frame | None) -> tuple[Frame | None, Frame | None]:
    """Of the open frames the user's innermost one, and the one that its instruction has called."""
    place, called, frame = users_place(stack), None, innermost
    while frame is not None and place_of(frame, frame.pc) != place:
        called, frame = frame, frame.back
    return frame, called


def where_data_choose(stop: Break, stack: tuple[Where, ...]) -> Frame | None:
    """The user's frame that asks for an item by a number of the data (``self.experts[n]``), where ``__getitem__`` of
    the container breaks. What it asks of that number says nothing to who wrote that line."""
    frame, called = opened_by_user(stack, stop.frame)
    if frame is None or called is None or called.code.co_name != "__getitem__":
        return None
    instruction, key = frame.program.instructions[frame.pc], next(iter(called.locals[1:]), None)
    by_data = type(key) in SYMBOLIC or issubclass(type(key), KEYS)
    return frame if by_data and instruction.opname == "BINARY_SUBSCR" else None


def shown_at(
    stack: tuple[Where, ...], frame: Frame | None, objects: Objects, writer: GraphWriter
) -> tuple[Excerpt | None, tuple[str, ...]]:
    """The user's line at the end of a stack of places, and of each variable in its expression what it is. frame: the
    innermost one that is open."""
    place = users_place(stack)
    if not is_kind(place, Place) or place.code is None:
        return None, ()
    frame, _ = opened_by_user(stack, frame)
    if frame is None or frame.code is not place.code:
        return excerpt_of(place), ()
    known = dict(zip(frame.program.localsplus, frame.locals, strict=True))
    names = names_in(place.code, place.offset)[:MOST]
    said = ((name, origin(name, known.get(name, UNSET), place.code, objects, writer)) for name in names)
    return excerpt_of(place), tuple(f"{name}: {text}" for name, text in said if text)


def said_of(
    stop: Break, stack: tuple[Where, ...], frame: Frame, tell: Callable[[str], str], chosen: bool
) -> tuple[str, str, str, str, int, str, str, tuple[Where, ...]]:
    """What a report says of a break, in the order of its record. tell: names what only capture has a name for; chosen:
    whether it is where data choose an item."""
    file, line, function = users_place(stack) or ("", 0, "")
    instruction = frame.program.instructions[frame.pc]
    operand = "" if instruction.arg is None else f" {instruction.argval!r:.60}"
    detail, hint = CHOSEN if chosen else (stop.detail, stop.hint)
    detail = tell(written(detail, frame.code))
    return stop.reason, detail, hint, file, line, function, instruction.opname + operand, stack


def origin(name: str, value: Any, code: types.CodeType, objects: Objects, writer: GraphWriter) -> str:
    """What a value is: where it was computed, or the way to it from the arguments; "" where that says nothing."""
    computed = issubclass(type(value), TensorProxy | Number)  # (isinstance asks a proxy of the user's for its class)
    source = value.source if computed else None
    if not computed and (record := objects.record_of(value)) is not None:
        source = record.source
    if source is not None:
        return by_source(name, source.name, code)
    node = value.node if computed else writer.node_of(value) if type(value) in SYMBOLIC else None
    place = None if node is None else users_place(node.meta.get("stack", ()))
    if place is None:
        return ""
    return "computed at " + told(place)


def told(place: tuple[Any, ...]) -> str:
    """A place, and the expression there."""
    excerpt, where = excerpt_of(place), f"{os.path.basename(place[0])}:{place[1]}"
    return where + (f" by `{excerpt.expression}`" if excerpt is not None else "")


def by_source(name: str, source: str, code: types.CodeType) -> str:
    if OURS.search(source):
        return ""
    if source == f"L[{name!r}]":
        return set_at(name, code)
    path = as_written(source)
    if path == f"cell {name}":
        return ""
    return f"the global {path}" if source.startswith("G(") else f"read from {path}"


def set_at(name: str, code: types.CodeType) -> str:
    """Where a local has its value from that it has as the code begins: a statement before the last graph break, or the
    call."""
    places: dict[str, None] = {}
    while (before := goes_on_with(code)) is not None:
        code, index, _ = before
        found, from_the_start = set_before(code, index, name)
        places = {**dict.fromkeys(told(value_of(code, i)) for i in found), **places}
        if not from_the_start:
            break
    else:
        given = f"an argument of {code.co_name}"
        return f"{given}, or set at {' or '.join(places)}" if places else given
    return f"set at {' or '.join(places)}"


def value_of(code: types.CodeType, index: int) -> Place:
    """Of an instruction that sets a local, the one that has made the value, where they are one statement's."""
    instructions = decode(code).instructions
    at, before = instructions[index], instructions[max(index - 1, 0)]
    joins = any(item.target == index for item in instructions)  # (several ways lead there)
    alone = len(names_stored(at)) == 1  # (3.13 sets two at once)
    simple = alone and before.line == at.line and before.opname.startswith(MAKES_ONE) and not joins
    place = code.co_filename, at.line or code.co_firstlineno, code.co_qualname
    return Place(place, code, before.offset) if simple else Place(place)


def written(text: str, code: types.CodeType) -> str:
    """A text of a report without the names that only a continuation's code has: a value on the stack is that of the
    user's expression."""
    for name in {*LOCAL.findall(text)}:
        if is_own(name) and (said := left_on_stack(name, code)) is not None:
            text = text.replace(f"L[{name!r}]", said.expression)
    return for_people(text)


def left_on_stack(name: str, code: types.CodeType) -> Excerpt | None:
    """The user's expression whose value a continuation takes by this name."""
    before, slot = goes_on_with(code), slot_of(name)
    return None if before is None or slot is None else on_the_stack(*before, slot)
