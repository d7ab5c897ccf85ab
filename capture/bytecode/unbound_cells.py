"""What reading a variable that inner functions share raises where it is unset, behind a graph break.

There the frame's own cells are the continuation's free variables, and Python has another exception for those
(format_exc_unbound in Python/ceval.c). So where one may be unset, the continuation asks first.
"""

from __future__ import annotations

import types
from typing import Any, cast

from bytecode import FreeVar, Instr, Label

from moebius.interpreter import decode

from .hidden_frames import hidden
from .instruction_templates import JUMP_IF_FALSE, LOAD_CELL, call_sequence
from .liveness import ways_on

EMPTY = types.CellType()
# A comprehension in the frame makes a cell of its own for a variable, and puts back the one that this has hidden.
EMPTIES = frozenset({"DELETE_DEREF", "MAKE_CELL", "STORE_FAST"})
READS = frozenset({"LOAD_DEREF", "DELETE_DEREF"})


@hidden
def is_unset(cell: types.CellType) -> bool:
    """Whether the cell is empty: what two cells hold is compared only where both hold something."""
    return cell == EMPTY


def unset_reads(code: types.CodeType) -> dict[int, str]:
    """The instructions that read a cell of the code's own which may be empty by then, with its name.

    The usual forward analysis: which cells may be empty before each instruction. From 3.13 on none where a
    comprehension in the frame has a variable of such a name: the ``bytecode`` package cannot read back a code that has
    one name for a local and a free variable, and loads the cell.
    """
    if not code.co_cellvars:
        return {}
    program = decode(code)
    own = frozenset(code.co_cellvars)
    hidden_by = {i.argval for i in program.instructions if i.opname == "LOAD_FAST_AND_CLEAR"}
    if LOAD_CELL == "LOAD_FAST" and not own.isdisjoint(hidden_by):
        return {}
    emptied = own & deleted_inside(code)
    begins = next(i for i, instruction in enumerate(program.instructions) if instruction.opname == "RESUME")
    empty: dict[int, frozenset[str]] = {}
    work = [(0, own.difference(code.co_varnames[: program.n_bound]))]
    while work:
        i, before = work.pop()
        known = empty.get(i)
        if i >= len(program.instructions) or (known is not None and before <= known):
            continue
        before = empty[i] = before | (known or frozenset())
        instruction = program.instructions[i]
        after = before
        if instruction.opname == "STORE_DEREF":
            after = before - {instruction.argval}
        elif instruction.opname in EMPTIES and i > begins:
            after = before | (own & {instruction.argval})
        work += [(way, after) for way in ways_on(program, i)]
        if (handler := program.handler_at(i)) is not None:
            work.append((handler[0], before))
    return {
        i: instruction.argval
        for i, instruction in enumerate(program.instructions)
        if instruction.opname in READS and i in empty and instruction.argval in empty[i] | emptied
    }


def deleted_inside(code: types.CodeType) -> set[str]:
    """The variables that inner functions unset: ``nonlocal a; del a``."""
    found: set[str] = set()
    for inner in [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]:
        deleted = {i.argval for i in decode(inner).instructions if i.opname == "DELETE_DEREF"}
        found |= (deleted | deleted_inside(inner)).intersection(inner.co_freevars)
    return found


def asked_first(name: str, at: Any) -> list[Any]:
    """Instructions that raise what Python does where the cell is empty."""
    words = f"cannot access local variable '{name}' where it is not associated with a value"
    on = Label()
    ask, error = (Instr("LOAD_CONST", cast(Any, called), location=at) for called in (is_unset, UnboundLocalError))
    return [
        *call_sequence(ask, [Instr(LOAD_CELL, FreeVar(name), location=at)], at),
        Instr(JUMP_IF_FALSE, on, location=at),
        *call_sequence(error, [Instr("LOAD_CONST", words, location=at)], at),
        Instr("RAISE_VARARGS", 1, location=at),
        on,
    ]
