"""An assembled code's tables, as the interpreter reads them: where the assembler's are others, they are mended."""

from __future__ import annotations

import dis
import itertools
import types

ONE_LINE = range(10, 13)  # kinds of entries in co_linetable with columns as bytes; the number of lines is added to 10
LONG = 14  # the kind that has all four numbers as varints


def with_tables(code: types.CodeType) -> types.CodeType:
    """The code with tables that Python can read."""
    table = line_table(code.co_linetable)
    return aligned(code if table == code.co_linetable else code.replace(co_linetable=table))


def line_table(table: bytes) -> bytes:
    """A table of places (Objects/locations.md) in which no byte but an entry's first has the highest bit.

    The assembler writes columns from 128 to 255 as bytes. Python takes each for the beginning of another entry, so that
    the table goes beyond the code; as soon as a trace function is set, Python writes into memory behind the code's.
    """
    made, at = bytearray(), 0
    while at < len(table):
        first, kind = table[at], table[at] >> 3 & 15
        end = at + 3 if kind in ONE_LINE else at + 1
        while end < len(table) and kind not in ONE_LINE and table[end] < 128:
            end += 1
        columns = table[at + 1 : end]
        if kind in ONE_LINE and max(columns) > 127:
            made += bytes([128 | LONG << 3 | first & 7, (kind - ONE_LINE.start) << 1, 0])
            made += b"".join(varint(column + 1) for column in columns)
        else:
            made += table[at:end]
        at = end
    return bytes(made)


def varint(number: int) -> bytes:
    """In six-bit pieces, low first."""
    made = bytearray()
    while number > 63:
        made.append(number & 63 | 64)
        number >>= 6
    return bytes([*made, number])


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
