"""What of the user's code runs as Python while a reported call runs: counted by a trace function.

A trace function makes Python slower by some hundred times, so what a native part costs is taken from calls without one
(``codegen.native_parts``). Of a part that has not run in such a call, the beginning is counted, and an estimate of what
that added is taken off; behind it nothing is counted, so that the clock tells the truth. A later report counts all.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ..bytecode.counting import Counted, Counts, Reached, counts_of
from ..bytecode.reported import REPORTED
from ..codegen.native_parts import LISTENERS, NativePart
from ..hook import set_own_tracer

RESIDUAL = "<moebius residual"  # how the file names of residual code begin
BUDGET = 50_000  # events in a native part whose time is not known yet
PROBE = "def probe():\n    total = 0\n    for i in range(1000):\n        total += i * 2\n    return total\n"


@dataclass
class NativeCounts:
    """native: the user's instructions that Python itself ran. opaque: those that it ran inside of a graph (a hook that
    the graph calls). seconds: of each native part that ran, by its id, what it took in this call. stopped: whether
    there were more than were counted."""

    native: Counts = field(default_factory=Counts)
    opaque: Counts = field(default_factory=Counts)
    seconds: dict[int, float] = field(default_factory=dict)
    stopped: bool = False


@dataclass
class Open:
    """A native part that runs. events, added: the tracer's, as it began."""

    part: NativePart
    events: int
    added: float


class NativeTracer:
    """A trace function (``sys.settrace``) for one thread and one call. parts: by the id of their code; more may come
    while it runs. measures: whether a native part runs whose time is to be found out; only then it looks at the clock.
    events: how many it got. added: seconds that it has added to the run so far, and capture has."""

    def __init__(self, parts: Mapping[int, NativePart]):
        self.parts = parts
        self.known: dict[int, Counted] = {}
        self.inside: dict[int, Counted] = {}  # the same for what runs inside of a graph
        self.seconds: dict[int, float] = {}
        self.locals = {False: functools.partial(self.step, self.known), True: functools.partial(self.step, self.inside)}
        self.events, self.added, self.left = 0, 0.0, perf_counter()
        self.in_library = self.measures = True
        self.open: list[Open] = []
        self.stopped: Open | None = None  # the part in which it counts no more
        self.was_stopped = False
        self.outer: NativeTracer | None = None  # of an explained call around this one, where it counts no more
        self.event_seconds, self.instruction_seconds = 0.0, 0.0

    def __enter__(self) -> NativeTracer:
        self.event_seconds, self.instruction_seconds = speeds()
        self.outer, REPORTED.tracer = REPORTED.tracer, self
        set_own_tracer(self)
        LISTENERS.append(self.ended)
        self.left = perf_counter()
        begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        REPORTED.tracer = self.outer
        set_own_tracer(self.outer)
        LISTENERS.remove(self.ended)

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        """A frame begins (or goes on, a generator's)."""
        now = self.arrive()
        code = frame.f_code
        part = self.parts.get(id(code))
        if part is not None:
            self.open.append(Open(part, self.events, self.added))
            self.measures = any(one.part.seconds is None for one in self.open)
        entry = self.entry(self.known, code)
        self.in_library, found = not entry.users, None
        if not self.in_library:
            found = self.locals[part is None and not entry.goes_on and self.is_inside(frame)]
            frame.f_trace = found  # before the next line: from 3.13 on a code's first frame has no events otherwise
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.leave(now)
        return found

    def entry(self, known: dict[int, Counted], code: types.CodeType) -> Counted:
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = Counted(code)
        return found

    def step(self, known: dict[int, Counted], frame: types.FrameType, event: str, arg: Any) -> Any:
        now = self.arrive() if self.measures else 0.0
        if event == "opcode":
            found = known.get(id(frame.f_code)) or self.entry(known, frame.f_code)
            if weight := found.flags[frame.f_lasti >> 1]:
                found.kept += weight
                found.offsets[frame.f_lasti] = None
        if self.measures:
            self.in_library = False
            if self.open and self.events - self.open[-1].events > BUDGET:
                self.stopped, self.was_stopped = self.open[-1], True
                sys.settrace(None)
            self.leave(now)
        return self.locals[known is self.inside]

    def arrive(self) -> float:
        """An event: what lies between it and the last one is the program's, but for what Python does to tell us."""
        now = perf_counter()
        self.events += 1
        gap = now - self.left
        if self.in_library or gap > 3 * self.event_seconds:
            self.added += min(gap, self.event_seconds)
        else:  # an instruction that only computes
            self.added += max(gap - self.instruction_seconds, 0.0)
        return now

    def leave(self, arrived: float) -> None:
        self.left = perf_counter()
        self.added += self.left - arrived

    def ended(self, part: NativePart) -> None:
        """A native part has ended, in any thread."""
        if REPORTED.tracer is not self:  # another thread's, or of a call that is explained in this one
            return
        took = part.take_back()
        index = next((i for i in reversed(range(len(self.open))) if self.open[i].part is part), None)
        if index is not None:  # (else it began where nothing is counted)
            one = self.open[index]
            del self.open[index:]
            self.measures = any(one.part.seconds is None for one in self.open)
            took = max(took - (self.added - one.added), 0.0)
            if self.stopped is one:
                self.stopped = None
                self.left = perf_counter()
                sys.settrace(self)
        known = part.seconds
        self.seconds[id(part)] = self.seconds.get(id(part), 0.0) + (took if known is None else known)

    def is_inside(self, frame: types.FrameType) -> bool:
        """Whether a graph calls it: residual code stands nearer on the stack than code of the user's that is Python."""
        outer = frame.f_back
        while outer is not None:
            if outer.f_code.co_filename.startswith(RESIDUAL):
                return True
            if (local := outer.f_trace) is not None:
                return local is self.locals[True]
            outer = outer.f_back
        return False

    def found(self) -> NativeCounts:
        """What was counted."""
        native, opaque = (
            counts_of(Reached(one, one.kept, 0) for one in known.values()) for known in (self.known, self.inside)
        )
        return NativeCounts(native, opaque, self.seconds, self.was_stopped)


def begin(tracer: NativeTracer) -> None:
    """As trace function. 3.12 asks as one is set whether any frame has wanted to hear of its instructions."""
    sys._getframe().f_trace_opcodes = True
    sys.settrace(tracer)


@functools.lru_cache(maxsize=1)
def speeds() -> tuple[float, float]:
    """Seconds from one event to the next where an instruction only computes, without the tracer's own time; and what
    such an instruction takes without a tracer. Measured once, by a small loop."""
    namespace: dict[str, Any] = {}
    exec(compile(PROBE, "<probe>", "exec"), namespace)
    probe = namespace["probe"]
    plain, gaps = [], []
    for _ in range(3):
        plain.append(seconds_of(probe))
        tracer = NativeTracer({})
        begin(tracer)
        took = seconds_of(probe)
        sys.settrace(None)
        gaps.append((took - tracer.added) / tracer.events)
    return min(gaps), min(plain) / tracer.events


def seconds_of(function: Callable[[], Any]) -> float:
    began = perf_counter()
    function()
    return perf_counter() - began
