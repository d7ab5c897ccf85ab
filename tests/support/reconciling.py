"""The instructions that a report counts, beside those that ``sys.settrace`` counts on the plain run."""

from __future__ import annotations

import contextlib
import io
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moebius import capture, explain
from moebius.bytecode.user_code import is_library
from moebius.report import Report


def plain_counts(function: Callable[..., Any], *args: Any) -> Counter[tuple[str, int]]:
    """How many instructions of each function a plain call executes, outside of torch and the standard library."""
    found: Counter[tuple[str, int]] = Counter()

    def step(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            found[frame.f_code.co_qualname, frame.f_code.co_firstlineno] += 1
        return step

    def enter(frame: types.FrameType, event: str, arg: Any) -> Any:
        if is_library(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return found


def reported_counts(report: Report) -> Counter[tuple[str, int]]:
    return Counter({(name, line): sum(known.values()) for (_, name, line), known in report.functions.items()})


@dataclass
class Outcome:
    """Of one program. differs: the calls whose counts are others, in words. compared: how many calls were. in_loops:
    in how many of these the data decides on a part of the count."""

    differs: list[str] = field(default_factory=list)
    compared: int = 0
    in_loops: int = 0
    statuses: list[str] = field(default_factory=list)

    def compare(self, expected: Counter[tuple[str, int]], report: Report) -> None:
        """Each function of a call but those in which the data decides how often a part of it runs."""
        got, by_data = reported_counts(report), {(name, line) for _, name, line in report.in_loops}
        self.compared += 1
        self.in_loops += bool(by_data)
        self.statuses.append(report.status)
        assert sum(report.coverage.values()) == sum(got.values())
        names = {k: (expected[k], got[k]) for k in expected | got if expected[k] != got[k] and k not in by_data}
        if names:
            self.differs.append(f"call {self.compared} ({report.status}): plain against report {names}")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(make: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]], calls: list[tuple]) -> Outcome:
    """A program's calls, plain and explained, one after the other. make: gives it twice, each with a state of its own.
    A call that raises has no report."""
    plain, other = make()
    captured, found = capture(other, backend="eager"), Outcome()
    for args in calls:
        with silent():
            try:
                expected = plain_counts(plain, *args)
            except Exception:
                with contextlib.suppress(Exception):
                    captured(*args)
                continue
            report = explain(captured)(*args)
        found.compare(expected, report)
    return found
