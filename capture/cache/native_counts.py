"""What of the user's code runs as Python while a reported call runs: counted by a trace function, which also times the
native parts after graph breaks."""

from __future__ import annotations

import functools
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..bytecode.counting import Counted, Counts
from ..hook import set_own_tracer

RESIDUAL = "<moebius residual"  # how the file names of residual code begin
PROBE = "def probe():\n    total = 0\n    for i in range(1000):\n        total += i * 2\n    return total\n"


@dataclass
class NativeCounts:
    """native: the user's instructions that Python itself ran. opaque: those that it ran inside of a graph (a hook that
    the graph calls). seconds: by the id of a code object, how long its frames ran, without what counting adds."""

    native: Counts = field(default_factory=Counts)
    opaque: Counts = field(default_factory=Counts)
    seconds: dict[int, float] = field(default_factory=dict)


class NativeTracer:
    """A trace function (``sys.settrace``) for one thread and one call. timed: code objects to be timed, by id."""

    def __init__(self, timed: Mapping[int, types.CodeType]):
        self.timed = timed
        self.known: dict[int, Counted] = {}
        self.inside: dict[int, Counted] = {}  # the same for what runs inside of a graph
        self.seconds: dict[int, float] = {}
        self.events = 0
        self.locals = {False: functools.partial(self.step, self.known), True: functools.partial(self.step, self.inside)}

    def __enter__(self) -> NativeTracer:
        event_seconds()
        set_own_tracer(self)
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        set_own_tracer(None)

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        """A frame begins (or goes on, a generator's)."""
        self.events += 1
        code = frame.f_code
        if not self.entry(self.known, code).users:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.timing(frame) if id(code) in self.timed else self.locals[self.is_inside(frame)]

    def entry(self, known: dict[int, Counted], code: types.CodeType) -> Counted:
        found = known.get(id(code))
        if found is None:
            found = known[id(code)] = Counted(code)
        return found

    def step(self, known: dict[int, Counted], frame: types.FrameType, event: str, arg: Any) -> Any:
        self.events += 1
        if event == "opcode":
            found = self.entry(known, frame.f_code)
            if found.flags[frame.f_lasti >> 1]:
                found.kept += 1
                found.offsets.add(frame.f_lasti)
        return self.locals[known is self.inside]

    def timing(self, frame: types.FrameType) -> Callable[..., Any]:
        """The trace function of one native part."""
        began, before, key = time.perf_counter(), self.events, id(frame.f_code)

        def step(frame: types.FrameType, event: str, arg: Any) -> Any:
            if event == "return":
                took = time.perf_counter() - began - (self.events - before) * event_seconds()
                self.seconds[key] = self.seconds.get(key, 0.0) + max(took, 0.0)
            self.step(self.known, frame, event, arg)
            return step

        return step

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
        return NativeCounts(counts_of(self.known), counts_of(self.inside), self.seconds)


def counts_of(known: dict[int, Counted]) -> Counts:
    counts = Counts()
    for found in known.values():
        if found.kept:
            counts.add(found.function, found.kept)
            counts.lines.setdefault(found.code.co_filename, set()).update(found.lines())
    return counts


@functools.lru_cache(maxsize=1)
def event_seconds() -> float:
    """What one event of the trace function adds to a run: a loop with and without it, measured once."""
    namespace: dict[str, Any] = {}
    exec(compile(PROBE, "<probe>", "exec"), namespace)
    probe = namespace["probe"]
    plain, traced, tracer = [], [], NativeTracer({})
    for _ in range(3):
        plain.append(seconds_of(probe))
        sys.settrace(tracer)
        traced.append(seconds_of(probe))
        sys.settrace(None)
    return max(min(traced) - min(plain), 0.0) / (tracer.events / 3)


def seconds_of(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
