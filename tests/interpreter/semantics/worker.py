"""Runs one module of Lib/test in this process: `worker.py MODULE native|interpreted RECORD [TESTS]`.

Appends to RECORD one JSON list a line: [test, "start"] before a test, [test, outcome, text] after it. A test that began
and has no outcome killed the process. TESTS is a file with the names of the tests to run, one a line.
"""
from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import json
import os
import resource
import sys
import traceback
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

SECONDS = 300  # of one test, wall clock; some tests hang when a signal or a finalizer does not come
MEMORY = 4 << 30  # bytes; tests of MemoryError ask for more than any machine has


def interpret_tests() -> None:
    """unittest calls test methods, setUp, tearDown and cleanups interpreted; COUNTERS gets what ran natively."""
    here = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, here)
    os.environ["MOEBIUS_INTERPRETER_ALONE"] = "1"  # no torch in this process
    from fuzz.provide import provide_interpreter

    provide_interpreter()
    del os.environ["MOEBIUS_INTERPRETER_ALONE"]
    sys.path.remove(here)
    from moebius.interpreter import count_native_frames, interpret

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        with count_native_frames() as seen:
            try:
                return interpret(function)(*args, **kwargs)
            finally:
                COUNTERS.append(seen)

    def call_method(case: Any, method: Any) -> None:
        if counted(method) is not None:
            warnings.warn(f"{method} returned a value", DeprecationWarning, stacklevel=2)

    def call_maybe_async(case: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if asyncio.iscoroutinefunction(function):
            with count_native_frames() as seen:
                try:
                    made = interpret(function)(*args, **kwargs)
                    return case._asyncioRunner.run(made, context=case._asyncioTestContext)
                finally:
                    COUNTERS.append(seen)
        return case._asyncioTestContext.run(counted, function, *args, **kwargs)

    base: Any = unittest.TestCase
    base._callSetUp = lambda case: counted(case.setUp) and None
    base._callTearDown = lambda case: counted(case.tearDown) and None
    base._callTestMethod = call_method
    base._callCleanup = lambda case, function, /, *args, **kwargs: counted(function, *args, **kwargs) and None
    unittest.IsolatedAsyncioTestCase._callMaybeAsync = call_maybe_async  # type: ignore[attr-defined]


COUNTERS: list[Counter[str]] = []


class Recorder(unittest.TestResult):
    """Writes each test's outcome down as soon as it is known."""

    def __init__(self, record: Any, names: dict[int, str]) -> None:
        super().__init__()
        self.record, self.names = record, names
        self.outcome: list[str] = ["none", ""]

    def write(self, *entry: str) -> None:
        print(json.dumps(entry), file=self.record, flush=True)

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.outcome = ["none", ""]
        COUNTERS.clear()
        if isinstance(test, unittest.IsolatedAsyncioTestCase):
            gc.collect()  # the event loop of the test before is not this test's garbage
        self.write(self.names[id(test)], "start")
        faulthandler.dump_traceback_later(SECONDS, exit=True)

    def stopTest(self, test: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
        seen = sorted(set().union(*COUNTERS))
        if self.outcome[0] == "passed" and seen:
            self.outcome = ["native", "ran natively: " + ", ".join(seen)]
        self.write(self.names[id(test)], *self.outcome)
        super().stopTest(test)

    def addSuccess(self, test: Any) -> None:
        if self.outcome[0] == "none":
            self.outcome = ["passed", ""]

    def failed(self, error: Any) -> None:
        self.outcome = ["failed", "".join(traceback.format_exception(*error))[-4000:]]

    def addError(self, test: Any, err: Any) -> None:
        if hasattr(test, "_testMethodName"):
            self.failed(err)
        else:
            self.write(str(test), "fixture", "".join(traceback.format_exception(*err))[-4000:])

    def addFailure(self, test: Any, err: Any) -> None:
        self.failed(err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.failed(err)

    def addSkip(self, test: Any, reason: str) -> None:
        if self.outcome[0] == "none":
            self.outcome = ["skipped", reason]

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.outcome = ["passed", ""]

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.outcome = ["failed", "unexpected success"]


def flat(suite: Any) -> list[Any]:
    return [case for part in suite for case in flat(part)] if isinstance(suite, unittest.TestSuite) else [suite]


def main(name: str, mode: str, record: str, only: str | None = None) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).resolve().parent)]
    sys.argv[1:] = []
    if mode == "interpreted":
        interpret_tests()
    from test import support

    support.use_resources = []  # no network, no minutes of computing
    cases = flat(unittest.TestLoader().loadTestsFromModule(importlib.import_module(f"test.{name}")))
    names: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for case in cases:
        seen[case.id()] += 1
        again = "" if seen[case.id()] == 1 else f"#{seen[case.id()]}"
        names[id(case)] = case.id().removeprefix(f"test.{name}.") + again
    wanted = None if only is None else set(Path(only).read_text().splitlines())
    kept = [case for case in cases if wanted is None or names[id(case)] in wanted]
    with open(record, "a", encoding="utf-8") as stream:
        unittest.TestSuite(kept).run(Recorder(stream, names))


if __name__ == "__main__":
    main(*sys.argv[1:])
