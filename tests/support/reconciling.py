"""The instructions that a report counts, beside those that ``sys.settrace`` counts on the plain run."""

from __future__ import annotations

import contextlib
import io
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
    """Of one program. differs: the calls whose counts are others, in words. compared: how many calls were."""

    differs: list[str]
    compared: int
    statuses: list[str]


def outcome(make: Callable[[], tuple[Callable[..., Any], Callable[..., Any]]], calls: list[tuple]) -> Outcome:
    """A program's calls, plain and explained, one after the other. make: gives it twice, each with a state of its own.
    A call that raises has no report, and one with a loop or branch over data counts each instruction in that once."""
    plain, other = make()
    captured = capture(other, backend="eager")
    found = Outcome([], 0, [])
    for number, args in enumerate(calls):
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = plain_counts(plain, *args)
            except Exception:
                with contextlib.suppress(Exception):
                    captured(*args)
                continue
            report = explain(captured)(*args)
        got = reported_counts(report)
        found.statuses.append(report.status)
        if report.in_loops:
            continue
        found.compared += 1
        assert sum(report.coverage.values()) == sum(got.values())
        if got != expected:
            names = {k: (expected[k], got[k]) for k in expected | got if expected[k] != got[k]}
            found.differs.append(f"call {number} ({report.status}): plain against report {names}")
    return found
