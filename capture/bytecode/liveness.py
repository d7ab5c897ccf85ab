"""Which of a frame's locals are read again: a name that is stored before it is loaded on every way on is dead."""

from __future__ import annotations

import types
from typing import Any

from moebius.interpreter import decode
from moebius.interpreter.program import Program

LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
# Builtins, and ways to a frame object or into a debugger, that may read locals without naming them.
FRAME_READERS = frozenset({"_getframe", "currentframe", "f_locals"})
READERS = frozenset({"locals", "vars", "dir", "eval", "exec", "super", "breakpoint", "set_trace"}) | FRAME_READERS


def falls_through(instruction: Any) -> bool:
    """Whether the next instruction may be what runs next."""
    return instruction.opname not in LEAVES and instruction.opname not in JUMPS


def ways_on(program: Program, index: int, handlers: bool = False) -> list[int]:
    """What may run after an instruction, what handles its exception included where that is asked for."""
    instruction = program.instructions[index]
    ways = [] if instruction.target is None else [instruction.target]
    if handlers and (handler := program.handler_at(index)) is not None:
        ways.append(handler[0])
    return [*ways, index + 1] if falls_through(instruction) else ways


def reads_unnamed(code: types.CodeType) -> bool:
    """Whether the code may read locals that no instruction names."""
    return not READERS.isdisjoint(code.co_names)


def read_later(code: types.CodeType, index: int) -> set[str]:
    """Names that some way on from ``index`` loads or deletes before it stores them; every name where the code calls a
    builtin that reads locals unnamed."""
    if reads_unnamed(code):
        return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return read_by_name(decode(code))[index]


def read_by_name(program: Program) -> list[set[str]]:
    """The same for each instruction, and behind the last, without what reads locals unnamed. The usual backward
    analysis, handlers being a way on from each instruction."""
    if program.live is not None:
        return program.live
    instructions = program.instructions
    live: list[set[str]] = [set() for _ in range(len(instructions) + 1)]
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            before = before_one(instructions[i], set().union(*(live[way] for way in ways_on(program, i))))
            handler = program.handler_at(i)
            if handler is not None:
                before |= live[handler[0]]
            if before != live[i]:
                live[i], changed = before, True
    program.live = live
    return live


def set_before(code: types.CodeType, index: int, name: str) -> tuple[list[int], bool]:
    """The instructions that may have given a local the value that it has before ``index``; whether it may also be the
    one that it has at the beginning. Handlers are left out: where an exception came from, nobody asks."""
    program = decode(code)
    instructions = program.instructions
    ways: dict[int, list[int]] = {}
    for i in range(len(instructions)):
        for way in ways_on(program, i):
            ways.setdefault(way, []).append(i)
    seen, work, found = {index}, [index], []
    while work:
        for i in ways.get(work.pop(), ()):
            if i not in seen:
                seen.add(i)
                if instructions[i].opname == "STORE_DEREF" and instructions[i].argval == name:
                    found.append(i)
                elif ("STORE", name) in accesses(instructions[i]):
                    found.append(i)
                else:
                    work.append(i)
    return sorted(found), 0 in seen and 0 not in found


def before_one(instruction: Any, after: set[str]) -> set[str]:
    """What is live before an instruction."""
    if names_a_cell(instruction):
        return after | {instruction.argval}
    live = set(after)
    for kind, name in reversed(accesses(instruction)):
        live = live - {name} if kind == "STORE" else live | {name}
    return live


def names_a_cell(instruction: Any) -> bool:
    return instruction.opname == "LOAD_CLOSURE" or instruction.opname.endswith("_DEREF")


def accesses(instruction: Any) -> list[tuple[str, str]]:
    """What an instruction does to locals, in order: "LOAD", "STORE" or "DELETE", and the name.

    3.13 has two in one (STORE_FAST_LOAD_FAST), where they stand on one line; 3.14 loads that borrow.
    """
    if "FAST" not in instruction.opname:
        return []
    given = instruction.argval
    kinds = [part.strip("_").rpartition("_")[2] for part in instruction.opname.split("FAST")[:-1]]
    return list(zip(kinds, given if isinstance(given, tuple) else (given,), strict=True))
