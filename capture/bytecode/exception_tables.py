"""A code's exception table, as the interpreter reads it: regions that begin and end between instructions."""

from __future__ import annotations

import dis
import itertools
import types


def aligned(code: types.CodeType) -> types.CodeType:
    """The code with its exception table's regions between instructions.

    The assembler lets a region begin behind the EXTENDED_ARG of its first instruction; read again, it would be lost.
    """
    begins = {}
    begin: int | None = None
    for instruction in dis.get_instructions(code):
        begin = instruction.offset if begin is None else begin
        begins[instruction.offset] = begin
        if instruction.opname != "EXTENDED_ARG":
            begin = None
    entries = vars(dis.Bytecode(code))["exception_entries"]  # (typeshed does not know it)
    moved = [(begins[e.start], begins.get(e.end, e.end), begins[e.target], e.depth, e.lasti) for e in entries]
    if all(begins[e.start] == e.start and begins.get(e.end, e.end) == e.end for e in entries):
        return code
    return code.replace(co_exceptiontable=b"".join(itertools.starmap(packed_entry, moved)))


def packed_entry(start: int, end: int, target: int, depth: int, lasti: bool) -> bytes:
    """One entry of co_exceptiontable (Objects/exception_handling_notes.txt): numbers in six-bit pieces, high first."""
    made = bytearray()
    for number in (start // 2, (end - start) // 2, target // 2, depth << 1 | lasti):
        pieces = [number & 63]
        while number := number >> 6:
            pieces.insert(0, number & 63 | 64)
        made += bytes(pieces)
    made[0] |= 128
    return bytes(made)
