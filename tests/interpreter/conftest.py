"""Makes `moebius.interpreter` importable from the checkout where moebius is not installed (no build, no torch)."""
from __future__ import annotations

import contextlib
import gc
import io
import re
import types
from typing import Any

import pytest
from fuzz.provide import provide_interpreter

provide_interpreter()


def drive(code: types.CodeType, log: list[str]) -> Any:
    """Run a program: its module body, then its main(log)."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(code, namespace)
    return namespace["main"](log)


def describe(error: BaseException | None, seen: tuple[int, ...] = ()) -> Any:
    """An exception as data: type, arguments, the program's traceback lines, notes, and all that hangs on it."""
    if error is None or id(error) in seen:
        return None
    seen = (*seen, id(error))
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == "<program>":
            lines.append((code.co_qualname, trace.tb_lineno))
        trace = trace.tb_next
    return (
        type(error).__qualname__,
        steady(repr(error.args)),
        lines,
        getattr(error, "__notes__", None),
        getattr(error, "name", None) if isinstance(error, (NameError, AttributeError)) else None,
        error.__suppress_context__,
        describe(error.__cause__, seen),
        describe(error.__context__, seen),
        [describe(inner, seen) for inner in error.exceptions] if isinstance(error, BaseExceptionGroup) else None,
    )


def steady(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def outcome(run: Any, source: str) -> tuple[Any, Any, list[str], str]:
    log: list[str] = []
    printed = io.StringIO()
    result, error = None, None
    with contextlib.redirect_stdout(printed):
        try:
            result = steady(repr(run(compile(source, "<program>", "exec", dont_inherit=True), log)))
        except BaseException as raised:
            if type(raised).__name__ == "InterpreterError":
                raise
            error = describe(raised)
    return result, error, [steady(str(entry)) for entry in log], printed.getvalue()


@pytest.fixture(name="drive")
def drive_fixture() -> Any:
    return drive


@pytest.fixture
def same() -> Any:
    """same(source): the program does natively what it does interpreted, with each step's stack effect checked."""
    from moebius.interpreter import interpret
    from moebius.interpreter.machine import CHECKS

    def compare(source: str) -> None:
        native = outcome(drive, source)
        CHECKS.on = True
        try:
            interpreted = outcome(interpret(drive), source)
        finally:
            CHECKS.on = False
        assert interpreted == native

    return compare


@pytest.fixture
def no_gc_callbacks():
    """hypothesis leaves one behind: it runs natively, wherever the collector happens to start."""
    before = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = before
