"""One call, as a report tells of it: which captures ran, which were made for it, and what ran as Python."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moebius.lowering.how_often import how_often

from ..bytecode.counting import Counts, Ran
from ..bytecode.hidden_frames import hidden
from ..bytecode.reported import REPORTED, uncounted
from ..codegen.native_parts import NativePart
from ..hook import Entry, GuardProgram, is_disabled, is_traced
from ..trace.segment import Segment
from .interfaces import Captured
from .native_counts import NativeCounts, NativeTracer

TRACED = "a trace function or sys.monitoring is in use (by a debugger or coverage), which is to see every line"


@dataclass
class Cold:
    """What a function did with a call that no guards fitted. segment: what was captured; None: it ran natively, for
    this reason. again: whether there were captures of it already."""

    captured: Any
    segment: Segment | None
    why: str
    again: bool


@dataclass
class Runs:
    """A captured segment that ran. whole: what the runs to its end stand for. left: the same of each other run."""

    captured: Any
    segment: Segment
    whole: Counts
    left: list[Counts]


@dataclass
class CallRecord:
    """What one call did. runs: how often each captured segment ran, and what the runs of it that were left in the
    middle stand for."""

    cold: list[Cold] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)
    left: dict[int, tuple[Any, list[Counts]]] = field(default_factory=dict)  # see ``reported``, and for the next one
    ran: dict[int, list[Ran]] = field(default_factory=dict)
    native: NativeCounts = field(default_factory=NativeCounts)
    why_native: str = ""
    parts: dict[int, NativePart] = field(default_factory=dict)  # after graph breaks, by the id of their code
    # by the ids of an entry and of a guard program (rests of several frames may share one): its hits at the beginning
    before: dict[tuple[int, int], int] = field(default_factory=dict)

    gone: list[tuple[Captured, Segment, int]] = field(default_factory=list)  # during the call, and their hits in it

    def hits_of(self, captured: Captured, segment: Segment) -> int:
        """How often a capture that is there was hit in this call, before now."""
        entry, program = captured.entry, segment.guards.program
        hits = next((hits for one, _, hits in entry.targets if one is program), 0)
        return hits - self.before.get((id(entry), id(program)), 0)

    def tell_runs(self, captured: Captured, segment: Segment) -> Callable[[tuple], None] | None:
        """What writes down, before each run of the segment's graph, how often its loops and branches will run."""
        graph, failures = segment.captured, segment.failures
        if not segment.counts.parts or graph is None or failures is None:
            return None

        def tell(inputs: tuple) -> None:
            if REPORTED.ran is self.ran:  # (else it is told of a call in this one)
                with uncounted():
                    self.ran.setdefault(id(failures), []).append(how_often(graph.gm, inputs))

        return tell

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
    """The record of the call that is being reported in this thread; who looks at the graphs that run in it."""

    record: CallRecord | None = None

    def __init__(self) -> None:
        self.watching: list[WatchedGraphs] = []


OPEN = Open()


def note(captured: Any, segment: Segment | None, why: str, again: bool) -> None:
    """What a cold call came to, for the report of the call around it, if there is to be one."""
    record = OPEN.record
    if segment is not None:
        for one in OPEN.watching:
            one.add(captured, segment)
    if record is not None:
        record.cold.append(Cold(captured, segment, why, again))
        if segment is not None and segment.native is not None:
            record.parts[id(segment.native.code)] = segment.native


def is_watched() -> bool:
    """Whether somebody wants a report of the call that runs now."""
    return OPEN.record is not None


def note_looked_at(entry: Entry, program: GuardProgram, runs: bool) -> None:
    """A capture that was hit is entered anew, its hits are counted again. runs: whether this hit runs it."""
    if OPEN.record is not None:
        OPEN.record.before[id(entry), id(program)] = -1 if runs else 0


def note_gone(captured: Captured, segment: Segment) -> None:
    """A capture is about to go: with what it was for, or since the data or the graph was not as it says."""
    if OPEN.record is not None:
        OPEN.record.gone.append((captured, segment, OPEN.record.hits_of(captured, segment)))


class WatchedGraphs:
    """For a time, somebody looks at the inputs of graphs before these run in this thread: those of some segments, and
    of what is captured meanwhile. tell: gets the captured function, the segment and the inputs; None for one that is
    not wanted."""

    def __init__(self, segments: Iterable[tuple[Captured, Segment]], tell: Callable[[Captured, Segment], Any]):
        self.segments, self.tell = segments, tell
        self.patched: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> WatchedGraphs:
        OPEN.watching.append(self)
        for captured, segment in self.segments:
            self.add(captured, segment)
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.watching.remove(self)
        for namespace, graph in reversed(self.patched):
            namespace["m_graph"] = graph

    def add(self, captured: Captured, segment: Segment) -> None:
        namespace = getattr(segment.run, "__globals__", {})
        graph, tell = namespace.get("m_graph"), self.tell(captured, segment)
        if graph is None or tell is None or segment.captured is None:
            return

        @hidden
        def watched(*inputs: Any) -> Any:
            if self in OPEN.watching:  # (else it is another thread's)
                tell(inputs)
            return graph(*inputs)

        self.patched.append((namespace, graph))
        namespace["m_graph"] = watched


@contextlib.contextmanager
def recorded(root: Captured, every: Iterable[Captured]) -> Iterator[CallRecord]:
    """For the call of a captured function in its body: the record of it, complete once the body has ended. every: all
    captured functions: Python that runs in the call may call any of them, and one may come to stand below this one."""
    known = [*every]
    record, outer = CallRecord(), OPEN.record
    record.before = {(id(one.entry), id(p)): hits for one in known for p, _, hits in one.entry.targets}
    parts = [segment.native for one in known for segment in one.segments]
    record.parts = {id(part.code): part for part in parts if part is not None}
    foreign = sys.gettrace() is not None
    tracer = NativeTracer(record.parts)
    watched = WatchedGraphs([(one, segment) for one in known for segment in one.segments], record.tell_runs)
    OPEN.record, outside = record, (REPORTED.left, REPORTED.ran)
    REPORTED.left, REPORTED.ran = record.left, record.ran
    try:
        with watched, contextlib.nullcontext() if foreign else tracer:
            yield record
    finally:
        OPEN.record, (REPORTED.left, REPORTED.ran) = outer, outside
        if outer is not None:  # (what runs in this call is not told again of the one around it)
            for key, hits in [((id(one.entry), id(p)), hits) for one in [*every] for p, _, hits in one.entry.targets]:
                outer.before[key] = outer.before.get(key, 0) + hits - record.before.get(key, 0)
        record.native = tracer.found()
        record.runs = list(runs_of([*root.family(), *every], record))
        record.why_native = why_native(root, record)


def runs_of(members: Iterable[Captured], record: CallRecord) -> Iterator[Runs]:
    """Which segments have run, and how often: those that were captured ran once, and as often as they were hit then.
    members: all that may have, in order; one may stand there twice."""
    cold = {id(one.segment): (one.captured, one.segment, 0) for one in record.cold if one.segment is not None}
    once = {id(one): one for one in members}.values()
    here = [(one, each, record.hits_of(one, each)) for one in once for each in one.segments]
    seen = set()
    for captured, segment, hits in [*here, *record.gone, *cold.values()]:
        count = hits + (id(segment) in cold and id(segment) not in seen)
        seen.add(id(segment))
        if count > 0:
            yield runs(captured, segment, count, record)


def runs(captured: Any, segment: Segment, count: int, record: CallRecord) -> Runs:
    """Those of one segment, which ran so often."""
    _, left = record.left.get(id(segment.failures), (None, []))
    known, whole = record.ran.get(id(segment.failures), []), count - len(left)
    ran = [*known, *[{}] * (whole - len(known))][:whole] if segment.whole else []
    return Runs(captured, segment, segment.counts.in_runs(ran), left)


def why_native(root: Captured, record: CallRecord) -> str:
    """Why the call ran natively as a whole; "" where it did not."""
    if is_disabled():
        return "moebius is switched off (MOEBIUS_DISABLE)"
    if is_traced():
        return TRACED
    for cold in record.cold:
        if cold.captured is root and cold.segment is None:
            return cold.why
    own = [one.segment for one in record.runs if one.captured is root]
    if own and not any(segment.whole for segment in own):
        stopped = own[-1].graph_break
        return "" if stopped is None else f"{stopped.reason}: {stopped.detail}"
    return ""


def say_traced(cold: Any) -> None:
    """Once for each process, from the entry: captured calls run as Python for now."""
    name = cold.__self__.function.__qualname__
    logging.getLogger("moebius").warning("%s, and all that is captured, runs as Python: %s", name, TRACED)
