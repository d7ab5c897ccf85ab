"""One call, as a report tells of it: which captures ran, which were made for it, and what ran as Python."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from ..codegen.native_parts import NativePart
from ..hook import Entry, GuardProgram, is_disabled, is_traced
from ..trace.segment import Segment
from .native_counts import NativeCounts, NativeTracer

TRACED = "a trace function is set (a debugger's or coverage's), which is to see every line"


class Captured(Protocol):
    """What is asked of a captured function (``captured.CapturedFunction``)."""

    entry: Entry
    segments: list[Segment]

    def family(self) -> Iterator[Any]: ...


@dataclass
class Cold:
    """What a function did with a call that no guards fitted. segment: what was captured; None: it ran natively, for
    this reason. again: whether there were captures of it already."""

    captured: Any
    segment: Segment | None
    why: str
    again: bool


@dataclass
class CallRecord:
    """What one call did. runs: how often each captured segment ran."""

    cold: list[Cold] = field(default_factory=list)
    runs: list[tuple[Any, Segment, int]] = field(default_factory=list)
    native: NativeCounts = field(default_factory=NativeCounts)
    why_native: str = ""
    parts: dict[int, NativePart] = field(default_factory=dict)  # after graph breaks, by the id of their code
    tracer: NativeTracer | None = None
    before: dict[int, int] = field(default_factory=dict)  # by the id of a guard program: its hits when the call began

    @property
    def status(self) -> str:
        """"hit", "captured", "recaptured" or "native"."""
        made = [cold for cold in self.cold if cold.segment is not None]
        if self.why_native:
            return "native"
        if any(cold.again for cold in made):
            return "recaptured"
        return "captured" if made else "hit"


class Open(threading.local):
    """The record of the call that is being reported in this thread."""

    record: CallRecord | None = None


OPEN = Open()


def note(captured: Any, segment: Segment | None, why: str, again: bool) -> None:
    """What a cold call came to, for the report of the call around it, if there is to be one."""
    record = OPEN.record
    if record is not None:
        record.cold.append(Cold(captured, segment, why, again))
        if segment is not None and segment.native is not None:
            record.parts[id(segment.native.code)] = segment.native


def is_watched() -> bool:
    """Whether somebody wants a report of the call that runs now."""
    return OPEN.record is not None


def note_looked_at(segment: Segment) -> None:
    """A capture that was hit is entered anew, with a count of hits that begins again."""
    if OPEN.record is not None:
        OPEN.record.before[id(segment.guards.program)] = -1


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """While capture itself works, no trace function of ours looks at what runs, and its time is no native part's."""
    tracer = None if OPEN.record is None else OPEN.record.tracer
    if tracer is None:
        yield
        return
    began, traces = perf_counter(), sys.gettrace() is tracer
    if traces:
        sys.settrace(None)
    try:
        yield
    finally:
        tracer.added += perf_counter() - began
        if traces:
            tracer.left = perf_counter()
            sys.settrace(tracer)


@contextlib.contextmanager
def recorded(root: Captured) -> Iterator[CallRecord]:
    """For the call of a captured function in its body: the record of it, complete once the body has ended."""
    record, outer = CallRecord(), OPEN.record
    record.before = {id(program): hits for one in root.family() for program, _, hits in one.entry.targets}
    parts = [segment.native for one in root.family() for segment in one.segments]
    record.parts = {id(part.code): part for part in parts if part is not None}
    foreign = sys.gettrace() is not None
    tracer = NativeTracer(record.parts)
    record.tracer = None if foreign else tracer
    OPEN.record = record
    try:
        with contextlib.nullcontext() if foreign else tracer:
            yield record
    finally:
        OPEN.record = outer
        record.tracer = None
        record.native = tracer.found()
        record.runs = list(runs_of(root, record))
        record.why_native = why_native(root, record)


def runs_of(root: Captured, record: CallRecord) -> Iterator[tuple[Any, Segment, int]]:
    """Which segments have run, and how often: those that were captured ran once, and as often as they were hit then."""
    captured = {id(cold.segment): cold for cold in record.cold if cold.segment is not None}
    seen = set()
    for one in root.family():
        hits: dict[int, int] = {id(program): n for program, _, n in one.entry.targets}
        for segment in one.segments:
            program: GuardProgram = segment.guards.program
            count = hits.get(id(program), 0) - record.before.get(id(program), 0) + (id(segment) in captured)
            seen.add(id(segment))
            if count > 0:
                yield one, segment, count
    for cold in captured.values():  # those that have gone since, with the objects that they were for
        assert cold.segment is not None
        if id(cold.segment) not in seen:
            yield cold.captured, cold.segment, 1


def why_native(root: Captured, record: CallRecord) -> str:
    """Why the call ran natively as a whole; "" where it did not."""
    if is_disabled():
        return "moebius is switched off (MOEBIUS_DISABLE)"
    if is_traced():
        return TRACED
    for cold in record.cold:
        if cold.captured is root and cold.segment is None:
            return cold.why
    runs = [segment for one, segment, _ in record.runs if one is root]
    if runs and not any(segment.whole for segment in runs):
        stopped = runs[-1].graph_break
        return "" if stopped is None else f"{stopped.reason}: {stopped.detail}"
    return ""


def say_traced(function: Any) -> None:
    """Once for each process, from the entry: captured calls run as Python for now."""
    name = getattr(function, "__qualname__", "what is captured")
    logging.getLogger("moebius").warning("%s, and all that is captured, runs as Python: %s", name, TRACED)
