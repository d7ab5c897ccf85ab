"""Which instructions count in a report, and how often each function's ran.

An instruction counts where ``sys.settrace`` with ``f_trace_opcodes`` reports it on the plain run: what CPython runs
before a frame's first RESUME is no event, nor is RESUME itself. In code that begins in the middle of a frame (a
continuation after a graph break) the instructions of ours do not count: ``with_marks`` notes which those are.
"""

from __future__ import annotations

import bisect
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from .user_code import is_library

MARK = "moebius: instructions that are not the user's"  # a constant of such code: (MARK, "0110…"), one digit each
Function = tuple[str, str, int]  # file, qualified name, first line


def with_marks(code: types.CodeType, ours: list[bool]) -> types.CodeType:
    """The code, which knows from now on which of its instructions (EXTENDED_ARG aside) are not the user's."""
    digits = "".join("01"[own] for own in ours)
    if len(digits) != sum(1 for _ in instructions_of(code)):
        return code  # (the assembler has put in some of its own: then all count)
    return code.replace(co_consts=(*code.co_consts, (MARK, digits)))


def marks_of(code: types.CodeType) -> str:
    """The digits of ``with_marks``; "" for code of the user's."""
    last = code.co_consts[-1] if code.co_consts else None
    return last[1] if type(last) is tuple and len(last) == 2 and last[0] == MARK else ""


def instructions_of(code: types.CodeType) -> Iterator[dis.Instruction]:
    return (i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG")


def counted(code: types.CodeType) -> bytes:
    """For each two bytes of the code whether the instruction that begins there counts."""
    flags = bytearray(len(code.co_code) // 2 + 1)
    marks, begun = marks_of(code), False
    for index, instruction in enumerate(instructions_of(code)):
        ours = marks[index] == "1" if marks else False
        flags[instruction.offset // 2] = begun and not ours and instruction.opname != "RESUME"
        begun = begun or instruction.opname == "RESUME"
    return bytes(flags)


@dataclass
class Counts:
    """How many instructions of the user's ran, by function; in which lines. in_loops: those of them that stand in a
    loop or branch over data that one node of the graph says: each was counted once, however often the data runs it."""

    functions: dict[Function, int] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    in_loops: int = 0

    @property
    def total(self) -> int:
        return sum(self.functions.values())

    def add(self, function: Function, count: int) -> None:
        self.functions[function] = self.functions.get(function, 0) + count


class Counted:
    """One code object's instructions: which count, how many of them ran, and how many up to the last mark."""

    __slots__ = ("code", "count", "flags", "kept", "offsets", "users")

    def __init__(self, code: types.CodeType):
        self.code, self.users = code, not is_library(code.co_filename)
        self.flags = counted(code) if self.users else b""
        self.count = self.kept = 0
        self.offsets: set[int] = set()

    @property
    def function(self) -> Function:
        return self.code.co_filename, self.code.co_qualname, self.code.co_firstlineno

    def lines(self) -> set[int]:
        """The lines that the counted instructions stand in."""
        ran = sorted(self.offsets)
        return {
            line
            for begin, end, line in self.code.co_lines()
            if line is not None and (at := bisect.bisect_left(ran, begin)) < len(ran) and ran[at] < end
        }


class Counter:
    """Counts the instructions of one trace. What is counted stands from the next ``keep`` on; ``drop`` takes back what
    came after the last one: the half of a root instruction that runs natively after all."""

    def __init__(self) -> None:
        self.known: dict[int, Counted] = {}  # by the id of a code object, which is kept alive
        self.touched: list[Counted] = []
        self.in_loops = 0

    def step(self, code: types.CodeType, offset: int, in_loop: bool) -> None:
        known = self.known.get(id(code))
        if known is None:
            known = self.known[id(code)] = Counted(code)
        if known.users and known.flags[offset >> 1]:
            if known.count == known.kept:
                self.touched.append(known)
            known.count += 1
            known.offsets.add(offset)
            self.in_loops += in_loop

    def keep(self) -> None:
        for known in self.touched:
            known.kept = known.count
        self.touched.clear()

    def drop(self) -> None:
        for known in self.touched:
            known.count = known.kept
        self.touched.clear()

    def mark(self) -> dict[int, int]:
        """For ``since``: how many of each code object's have been counted."""
        return {key: known.count for key, known in self.known.items()}

    def since(self, mark: dict[int, int]) -> dict[int, int]:
        """What was counted since then, by code object."""
        return {k: n for k, known in self.known.items() if (n := known.count - mark.get(k, 0))}

    def repeat(self, counts: dict[int, int]) -> None:
        """The same instructions once more: a module that is like one that was interpreted."""
        for key, n in counts.items():
            known = self.known[key]
            if known.count == known.kept:
                self.touched.append(known)
            known.count += n

    def take_back(self, code: types.CodeType, offsets: list[int]) -> None:
        """Instructions that will run again, natively: those that only prepare a call."""
        known = self.known.get(id(code))
        if known is not None and known.users:
            known.kept -= sum(known.flags[offset >> 1] for offset in offsets)
            known.count = known.kept

    def counts(self) -> Counts:
        """What stands now."""
        found = Counts(in_loops=self.in_loops)
        for known in self.known.values():
            if known.kept:
                found.add(known.function, known.kept)
                found.lines.setdefault(known.code.co_filename, set()).update(known.lines())
        return found
