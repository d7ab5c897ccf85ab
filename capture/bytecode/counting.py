"""Which instructions count in a report, and how often each function's ran.

An instruction counts where ``sys.settrace`` with ``f_trace_opcodes`` reports it on the plain run: what CPython runs
before a frame's first RESUME is no event, nor is RESUME itself, nor what FOR_ITER skips at a loop's end. In code that
begins in the middle of a frame (a continuation after a graph break) the instructions of ours do not count:
``with_weights`` notes which those are.
"""

from __future__ import annotations

import bisect
import contextlib
import dis
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .stack_layout import AFTER_LOOP
from .user_code import is_library

MARK = "moebius: how often instructions count"  # a constant of such code: (MARK, weights)
Before = tuple[types.CodeType, int, int]
# By id of such code: what it goes on with. Not in the code, as continuations of equal code are one.
BEFORE: dict[int, tuple[weakref.ref[types.CodeType], Before]] = {}
PREFIXES_COUNT = sys.version_info >= (3, 12)  # sys.monitoring has an event for each of an instruction's prefixes
CACHE, RESUME, END_FOR = (dis.opmap.get(name, -1) for name in ("CACHE", "RESUME", "END_FOR"))
Function = tuple[str, str, int]  # file, qualified name, first line
# A part of the body of a loop or branch that one node of the graph says: its number, how many conditions in it have
# been passed, and whether it is what the last of them skips to.
Part = tuple[int, int, bool]
Ran = Mapping[int, Mapping[tuple[int, bool], int]]  # by these, how often each ran in a call; what is not there: unknown


def with_weights(code: types.CodeType, weights: list[int], goes_on: Before) -> types.CodeType:
    """The code, which knows from now on how often each of its instructions (EXTENDED_ARG aside) counts: 0 for what is
    not the user's. goes_on: the code that it goes on with, the instruction there, and the depth of the stack."""
    if len(weights) != sum(1 for _ in own_weights(code)):
        return code  # (the assembler has put in some of its own: then all count)
    return known(code.replace(co_consts=(*code.co_consts, (MARK, bytes(weights)))), goes_on)


def copied(code: types.CodeType) -> types.CodeType:
    """Another code object of the same."""
    made, before = code.replace(), goes_on_with(code)
    return made if before is None else known(made, before)


def known(code: types.CodeType, before: Before) -> types.CodeType:
    """The code, of which is known from now on what it goes on with."""
    place = id(code)
    BEFORE[place] = weakref.ref(code, lambda _: BEFORE.pop(place, None)), before
    return code


def weights_of(code: types.CodeType) -> bytes:
    """How often each instruction counts (EXTENDED_ARG aside), where it counts at all."""
    last = code.co_consts[-1] if goes_on(code) else None
    return bytes(own_weights(code)) if last is None else last[1]


def goes_on(code: types.CodeType) -> bool:
    """Whether it is code of ``with_weights``, which begins in the middle of a frame."""
    last = code.co_consts[-1] if code.co_consts else None
    return type(last) is tuple and len(last) == 2 and last[0] == MARK


def goes_on_with(code: types.CodeType) -> Before | None:
    """What ``with_weights`` was given."""
    found = BEFORE.get(id(code))
    return None if found is None else found[1]


def own_weights(code: types.CodeType) -> Iterator[int]:
    """The same of code of the user's: one that has prefixes (EXTENDED_ARG, in long functions) counts once, and from
    3.12 on, where Python reports each of them, as often as it has places."""
    weight = 1
    for _, opcode in places(code):
        if opcode != dis.EXTENDED_ARG:
            yield weight
        weight = weight + PREFIXES_COUNT if opcode == dis.EXTENDED_ARG else 1


def places(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """Half the offset of each instruction, and its opcode. (dis also says what each argument means, at ten times the
    time; what CPython keeps behind instructions for itself is CACHE in ``co_code``.)"""
    return ((place, opcode) for place, opcode in enumerate(code.co_code[::2]) if opcode != CACHE)


def counted(code: types.CodeType) -> bytes:
    """For each two bytes of the code how often the instruction that begins or ends there counts: at its own place, by
    which the interpreter knows it, and where 3.11 reports it, at its first prefix."""
    flags = bytearray(len(code.co_code) // 2 + 1)
    instructions = ((place, opcode) for place, opcode in places(code) if opcode != dis.EXTENDED_ARG)
    begun, first, skipped = False, 0, 0
    for weight, (last, opcode) in zip(weights_of(code), instructions, strict=True):
        skipped = AFTER_LOOP if opcode == END_FOR else max(skipped - 1, 0)
        if begun and not skipped and opcode != RESUME:
            first = last if PREFIXES_COUNT else first
            flags[first : last + 1] = bytes([weight]) * (last + 1 - first)
        begun, first = begun or opcode == RESUME, last + 1
    return bytes(flags)


@dataclass
class Counts:
    """How many instructions of the user's ran, by function; in which lines. in_loops: those of them that were counted
    once, however often they run: what a backward runs, and what stands in a loop or branch over data of which nobody
    could tell. parts: what stands in these, by part, as a run of it counts; ``in_runs`` has it among the rest."""

    functions: dict[Function, int] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    in_loops: dict[Function, int] = field(default_factory=dict)
    parts: dict[Part, Counts] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.functions.values())

    def include(self, other: Counts, times: int = 1) -> None:
        """Add what ran besides, so many times."""
        add(self.functions, other.functions, times)
        add(self.in_loops, other.in_loops, times)
        for file, lines in other.lines.items():
            self.lines.setdefault(file, set()).update(lines)

    def in_runs(self, runs: Iterable[Ran]) -> Counts:
        """What several runs of the graph count, each with how often its loops and branches ran."""
        total = Counts()
        for ran in runs:
            total.include(self)
            for (number, passed, skips), part in self.parts.items():
                known = ran.get(number)
                if times := int(not skips) if known is None else known.get((passed, skips), 0):
                    total.include(part, times)
                    add(total.in_loops, part.functions if known is None else {})
        return total


@dataclass
class Tally:
    """count: how many so far. kept: how many up to the last ``Counter.keep``."""

    count: int = 0
    kept: int = 0


class Counted(Tally):
    """One code object's instructions: which count, how many of them ran, and where they stand. part: in which part of
    a loop's or branch's body. in_loops: those of them of which only a backward knows how often they run. goes_on:
    whether the code begins in the middle of a frame."""

    def __init__(self, code: types.CodeType, part: Part | None = None):
        super().__init__()
        self.code, self.part, self.users = code, part, not is_library(code.co_filename)
        self.flags = counted(code) if self.users else b""
        self.goes_on = goes_on(code)
        self.offsets: dict[int, None] = {}  # in the order in which they first ran
        self.in_loops = Tally()

    @property
    def function(self) -> Function:
        return self.code.co_filename, self.code.co_qualname, self.code.co_firstlineno

    def times(self, offsets: Iterable[int]) -> int:
        """How many of these instructions count."""
        return sum(self.flags[offset >> 1] for offset in offsets) if self.users else 0

    def lines(self, first: int) -> set[int]:
        """The lines that the first so many of the counted instructions stand in."""
        ran = sorted(itertools.islice(self.offsets, first))
        return {
            line
            for begin, end, line in self.code.co_lines()
            if line is not None and (at := bisect.bisect_left(ran, begin)) < len(ran) and ran[at] < end
        }


class Counter:
    """Counts the instructions of one trace. What is counted stands from the next ``keep`` on; ``drop`` takes back what
    came after the last one: the half of a root instruction that runs natively after all."""

    def __init__(self) -> None:
        self.codes: dict[Any, Counted] = {}  # by the id of a code object, which is kept alive, or that and the part
        self.tallies: dict[Any, Tally] = {}  # these, and of each what autograd runs, by the negative id
        self.changed: dict[Any, Tally] = {}  # of these, since ``keep``
        self.log: list[tuple[Any, int]] = []  # what came to which, in order: one entry for many between two marks
        self.marked = 0  # entries by the last mark
        self.autograds = 0  # blocks that are open of ``by_autograd``
        self.bodies = 0  # of loops and branches, so far

    def step(self, code: types.CodeType, offset: int, times: int = 1, part: Part | None = None) -> None:
        """An instruction that runs so many times, or as often as the part of a body that it stands in."""
        key = id(code) if part is None else (id(code), part)
        known = self.codes.get(key)
        if known is None:
            known = self.tallies[key] = self.codes[key] = Counted(code, part)
            if part is None:
                self.tallies[-id(code)] = known.in_loops
        if known.users and (each := known.flags[offset >> 1]):
            known.offsets[offset] = None
            self.add(key, times * each)
            if self.autograds and part is None:
                self.add(-id(code), each)

    def body(self) -> Part:
        """The first part of a body that begins."""
        self.bodies += 1
        return self.bodies, 0, False

    @contextlib.contextmanager
    def by_autograd(self) -> Iterator[None]:
        """For what a backward runs (a hook, a function's backward) or runs again (a checkpoint): how often, only the
        backward knows, which may need no gradient of it, stop early or run twice."""
        self.autograds += 1
        try:
            yield
        finally:
            self.autograds -= 1

    def add(self, key: Any, count: int) -> None:
        known = self.changed[key] = self.tallies[key]
        known.count += count
        self.note(key, count)

    def note(self, key: Any, count: int) -> None:
        if len(self.log) > self.marked and self.log[-1][0] == key:
            count += self.log.pop()[1]
        self.log.append((key, count))

    def keep(self) -> None:
        for known in self.changed.values():
            known.kept = known.count
        self.changed.clear()

    def drop(self) -> None:
        for key, known in self.changed.items():
            self.note(key, known.kept - known.count)
            known.count = known.kept
        self.changed.clear()

    def mark(self) -> int:
        """What has been counted by now."""
        self.marked = len(self.log)
        return self.marked

    def back_to(self, mark: int) -> None:
        """As it was then: what came since is recorded again."""
        for key, count in self.since(mark).items():
            self.add(key, -count)

    @contextlib.contextmanager
    def counted_before(self) -> Iterator[None]:
        """For what is interpreted once more, and runs as often as it was counted."""
        before = self.mark()
        try:
            yield
        finally:
            self.back_to(before)

    def since(self, mark: int) -> dict[Any, int]:
        """What was counted since then, of each."""
        found: dict[Any, int] = {}
        for key, count in self.log[mark:]:
            found[key] = found.get(key, 0) + count
        return {key: count for key, count in found.items() if count}

    def repeat(self, counts: dict[Any, int]) -> None:
        """The same instructions once more: a module that is like one that was interpreted. (Its loops have the same
        numbers, and each counts the runs of all.)"""
        for key, count in counts.items():
            if type(key) is int:
                self.add(key, count)

    def so_far(self, again: Iterable[tuple[types.CodeType, list[int]]] = ()) -> Callable[[], Counts]:
        """What has been counted by now, without instructions (``stack_layout.run_again``) that will run again,
        natively: those that only prepare a call, ask for what decides a branch, or advance a generator that goes on. It
        is made when it is asked for."""
        reached = [Reached(known, known.count, known.in_loops.count) for known in self.codes.values()]
        for code, offsets in again:
            for one in reached:
                known = one.counted
                if known.code is code and known.part is None:
                    one.count -= known.times(offsets)
        return functools.partial(counts_of, reached)


class Reached:
    """How far one code object's counting had come: how often its instructions had run, and how many of them."""

    __slots__ = ("count", "counted", "first", "in_loops")

    def __init__(self, counted: Counted, count: int, in_loops: int):
        self.counted, self.count, self.in_loops, self.first = counted, count, in_loops, len(counted.offsets)


def counts_of(codes: Iterable[Reached]) -> Counts:
    """What was counted of each code."""
    found = Counts()
    for one in codes:
        known = one.counted
        to = found if known.part is None else found.parts.setdefault(known.part, Counts()) if one.count else found
        if one.count:
            add(to.functions, {known.function: one.count})
            to.lines.setdefault(known.code.co_filename, set()).update(known.lines(one.first))
        if one.in_loops:
            add(to.in_loops, {known.function: one.in_loops})
    return found


def add(total: dict[Function, int], more: Mapping[Function, int], times: int = 1) -> None:
    for function, count in more.items():
        total[function] = total.get(function, 0) + count * times
