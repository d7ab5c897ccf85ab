"""Ends of a function, and conditions of ``while``, that the compiler wrote more than once.

CPython writes a jump to a short block that returns as a copy of it (Python/flowgraph.c), from 3.12 on more of them than
before: after ``if … else …`` each side goes on in its own. Where the sides meet is in the last copy. That runs as the
others do: the same instructions, in the same places of the source, with the same handlers around them. The condition
of ``while`` stands before the loop and at its end: ``continue`` leads to one, the end of an iteration to the other.
"""

from __future__ import annotations

from moebius.interpreter.program import Program

RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})


def copies(program: Program) -> dict[int, int]:
    """The index of each instruction of a copy, and of the same one in a later copy (of which a part may be one)."""
    if program.copies is None:
        program.copies = find(program)
    return program.copies


def find(program: Program) -> dict[int, int]:
    instructions, found = program.instructions, {}
    ends = [index for index, instruction in enumerate(instructions) if instruction.opname in RETURNS]
    places = list(program.code.co_positions())

    def returned(index: int) -> tuple[int, ...] | None:
        """Which constant an instruction is a part of returning, if that is all that it does. Nothing can fail there:
        of which line it is does not matter."""
        first = index - (instructions[index].opname == "RETURN_VALUE")
        loads = first >= 0 and instructions[first].opname in ("LOAD_CONST", "RETURN_CONST")
        if not loads or instructions[first + (instructions[first].opname == "LOAD_CONST")].opname not in RETURNS:
            return None
        return instructions[first].opcode, instructions[first].arg or 0

    def same(i: int, j: int) -> bool:
        a, b = instructions[i], instructions[j]
        if a.target is not None or b.target is not None:
            if (a.opcode, a.target) != (b.opcode, b.target):
                return False
        elif (a.opcode, a.arg) != (b.opcode, b.arg):
            return False
        if program.handler_at(i) != program.handler_at(j):
            return False
        constant = returned(i)
        return places[a.offset // 2] == places[b.offset // 2] or (constant is not None and constant == returned(j))

    def length(i: int, j: int) -> int:
        """How many instructions before the returns i and j, with these, are the same ones."""
        count = 0
        while j - count > i >= count and same(i - count, j - count):
            if count and instructions[i - count].opname in RETURNS:
                break
            count += 1
        return count

    for place, i in enumerate(ends):
        count, j = max(((length(i, j), j) for j in ends[place + 1 :]), default=(0, 0))
        found.update({i - back: j - back for back in range(count)})
    for i, j in conditions_of_loops(program, found):
        count = 0 if places[instructions[i].offset // 2] != places[instructions[j].offset // 2] else 1
        while count and j - count > i >= count and same(i - count, j - count):
            count += 1
        found.update({i - back: j - back for back in range(count) if i - back not in found})
    return found


def conditions_of_loops(program: Program, returns: dict[int, int]) -> list[tuple[int, int]]:
    """(the last jump of a ``while`` condition before the loop, the same at the loop's end): on one truth both lead into
    the loop, on the other both behind it."""
    instructions, found = program.instructions, []
    jumps = [i for i, one in enumerate(instructions) if one.target is not None and "_IF_" in one.opname]

    def ways(index: int) -> tuple[str, int, int]:
        """What it asks for; where it leads where that is so, and where not."""
        _, _, asks = instructions[index].opname.partition("_IF_")
        leads = [past_jumps(program, way) for way in (instructions[index].target, index + 1) if way is not None]
        to, on = (returns.get(way, way) for way in leads)
        opposite = {"FALSE": "TRUE", "NOT_NONE": "NONE"}.get(asks)
        return (asks, to, on) if opposite is None else (opposite, on, to)

    for j in jumps:
        found += [(i, j) for i in jumps if i < j and ways(i) == ways(j) and i < min(ways(j)[1:]) < j]
    return found


def past_jumps(program: Program, index: int) -> int:
    """Where jumps backward lead to that stand there; the index itself where none does."""
    one = program.instructions[index]
    if one.opname == "NOT_TAKEN":
        return past_jumps(program, index + 1)
    return one.target if one.opname.startswith("JUMP_BACKWARD") and one.target is not None else index
