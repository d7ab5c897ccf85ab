"""The instructions of a code object as they stand there: `dis`'s reading without its texts, in less than half the time.

Private names of dis, read on 3.11.7 to 3.15.0: see tables/caches.py. The tests compare with dis itself.
"""
from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from .tables.caches import CACHES

EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
LARGEST = 1 << 31  # a C int holds an argument: beyond, it is negative
# by how many bits the index into co_names stands above flags, and cmp_op's above its own
NAME_SHIFTS = {"LOAD_GLOBAL": 1} | ({"LOAD_ATTR": 1, "LOAD_SUPER_ATTR": 2} if sys.version_info >= (3, 12) else {})
NAME_SHIFTS |= {"IMPORT_NAME": 2} if sys.version_info >= (3, 15) else {}
COMPARE_SHIFT = {(3, 11): 0, (3, 12): 4}.get(sys.version_info[:2], 5)

PAIRS = frozenset({
    "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST",
})  # fmt: skip
LOOKS_BACK = frozenset({"END_ASYNC_FOR"})  # from 3.14 its argument says where its loop is: it does not jump there

Meaning = Callable[[CodeType, "tuple[str, ...]", int, int], Any]  # code, localsplus, argument, the next offset


@dataclass(slots=True, eq=False)
class Read:
    """One instruction. `argval` is what `arg` refers to: a constant, a name, an offset, or `arg` itself."""

    offset: int
    opcode: int
    opname: str
    arg: int | None
    argval: Any
    line: int | None


def shifted_name(shift: int) -> Meaning:
    return lambda code, localsplus, arg, following: code.co_names[arg >> shift]


def meanings() -> dict[int, Meaning]:
    found: dict[int, Meaning] = {}
    for op in dis.hasconst:
        found[op] = lambda code, localsplus, arg, following: code.co_consts[arg]
    for op in dis.hasname:
        found[op] = shifted_name(NAME_SHIFTS.get(dis.opname[op], 0))
    for op in (*dis.haslocal, *dis.hasfree):
        found[op] = lambda code, localsplus, arg, following: localsplus[arg]
    for op in dis.hascompare:
        found[op] = lambda code, localsplus, arg, following: dis.cmp_op[arg >> COMPARE_SHIFT]
    for op in dis.hasjrel:
        if "JUMP_BACKWARD" in dis.opname[op] or dis.opname[op] in LOOKS_BACK:
            found[op] = lambda code, localsplus, arg, following: following - 2 * arg
        else:
            found[op] = lambda code, localsplus, arg, following: following + 2 * arg
    for op in dis.hasjabs:
        found[op] = lambda code, localsplus, arg, following: 2 * arg
    for name in PAIRS:
        if name in dis.opmap:
            found[dis.opmap[name]] = lambda code, names, arg, following: (names[arg >> 4], names[arg & 15])
    return found


MEANINGS = meanings()
HAS_ARGUMENT = frozenset(getattr(dis, "hasarg", range(dis.HAVE_ARGUMENT, 256)))  # dis.hasarg: from 3.12
OPNAMES = tuple(dis.opname[:256])


def read_instructions(code: CodeType, localsplus: tuple[str, ...]) -> list[Read]:
    """All of them, EXTENDED_ARG too, caches left out. Where an argument refers to nothing, it is its own meaning."""
    raw = code.co_code
    lines = [position[0] for position in code.co_positions()]
    found: list[Read] = []
    add, size = found.append, len(raw)
    offset = extended = 0
    while offset < size:
        op = raw[offset]
        following = offset + 2 + 2 * max(CACHES[op], 0)
        line = lines[offset >> 1] if offset >> 1 < len(lines) else None
        if op in HAS_ARGUMENT:
            arg = raw[offset + 1] | extended
            extended = 0
            if op == EXTENDED_ARG:
                extended = arg << 8
                if extended >= LARGEST:
                    extended -= 2 * LARGEST
            meaning = MEANINGS.get(op)
            argval: Any = arg
            if meaning is not None:
                try:
                    argval = meaning(code, localsplus, arg, following)
                except IndexError:
                    pass
            add(Read(offset, op, OPNAMES[op], arg, argval, line))
        else:
            extended = 0
            add(Read(offset, op, OPNAMES[op], None, None, line))
        offset = following
    return found
