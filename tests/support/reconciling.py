"""The instructions that a report counts, beside those that ``sys.settrace`` counts on the plain run."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import random
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from steps.compare import NAME, prelude

from moebius import capture, explain, reset
from moebius.bytecode.user_code import is_library
from moebius.report import Report


def plain_counts(function: Callable[..., Any], *args: Any) -> Counter[tuple[str, int]]:
    """How many instructions of each function a plain call executes, outside of libraries."""
    return counted_call(function, *args)[0]


def counted_call(function: Callable[..., Any], *args: Any) -> tuple[Counter[tuple[str, int]], Any]:
    """The same, and what the call returns."""
    found: Counter[tuple[str, int]] = Counter()

    def step(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            found[frame.f_code.co_qualname, frame.f_code.co_firstlineno] += 1
        return step

    def enter(frame: types.FrameType, event: str, arg: Any) -> Any:
        if is_library(frame.f_code.co_filename):
            return None
        frame.f_trace = step  # from 3.13 on only a frame with a trace function can ask for its instructions
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # (3.12: somebody has to have asked before)
    sys.settrace(enter)
    try:
        result = function(*args)
    finally:
        sys.settrace(before)
    return found, result


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
        """Each function of a call but those of which a part was counted once: nobody could tell."""
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


def outcome_of_steps(source: str) -> Outcome:
    """The same of a generated training script (``steps.grammar``), run once plainly, and once with its step explained.
    It goes on after a call that raises."""
    found = Outcome()
    calls_of(source, lambda step: lambda *args: (None, step(*args)))  # imports what it needs
    counts = calls_of(source, lambda step: functools.partial(counted_call, step))
    reports = calls_of(source, reported_run)
    for expected, report in zip(counts, reports, strict=False):
        if expected is not None and report is not None:
            found.compare(expected, report)
    return found


def calls_of(source: str, run: Callable[..., Any]) -> list[Any]:
    """What ``run(step)`` says of each call of the script's step: a pair with its result; None where it raises."""
    said: list[Any] = []

    def captured(step: Callable[..., Any]) -> Callable[..., Any]:
        call = run(step)

        def one(*args: Any) -> Any:
            said.append(None)
            said[-1], result = call(*args)
            return result

        return one

    @contextlib.contextmanager
    def trying() -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield

    namespace: dict[str, Any] = {"__name__": "steps"}
    torch.manual_seed(7), random.seed(7)
    exec(prelude(), namespace)
    namespace |= {"captured": captured, "trying": trying}
    for line in ast.parse(source).body:
        with silent(), contextlib.suppress(Exception):
            exec(compile(ast.Module([line], []), NAME, "exec", dont_inherit=True), namespace)
    torch.set_default_dtype(torch.float32)
    reset()
    return said


def reported_run(step: Callable[..., Any]) -> Callable[..., Any]:
    captured = capture(step, backend="eager")

    def call(*args: Any) -> tuple[Report, Any]:
        report = explain(captured)(*args)
        return report, report.result

    return call
