"""One file of somebody's unittest tests in this process: as it is, or with the tests' compiler replaced by capture.

What is recorded of a test is what it showed: how it ended, which assertions failed (that does not end the test: many
count the frames of the compiler they were written for), what each compiled function gave, what was printed. The same
record without capture is what it has to be.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import random
import re
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from describe import described, without_addresses

from moebius import capture
from moebius.api import CapturedModule

Record = dict[str, Any]
INTERNAL: list[str] = []  # errors of capture's own in the running test


def load(path: Path) -> types.ModuleType:
    """The module; names that this torch has no more are functions that give back what they decorate."""
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    while True:
        torch.manual_seed(0)
        try:
            spec.loader.exec_module(module)
            return module
        except ImportError as error:
            if found := re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error)):
                setattr(sys.modules[found[2]], found[1], [] if found[1].endswith("_tests") else given_back)
            elif found := re.search(r"No module named '([\w.]+)'", str(error)):
                sys.modules[found[1]] = mock.MagicMock()
            else:
                raise
        except AttributeError as error:
            if not (found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", str(error))):
                raise
            setattr(sys.modules[found[1]], found[2], given_back)


def given_back(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else given_back


def note_internal_errors() -> None:
    """Capture's own errors are one warning each, and the test goes on: here they are counted."""
    from moebius.report import failure

    write = failure.failure_file

    def noted(function: types.FunctionType, error: BaseException) -> str | None:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        INTERNAL.append(f"{function.__qualname__}: {type(error).__name__}: {error}"[:300] + f" ({', '.join(places)})")
        return write(function, error)

    failure.failure_file = noted


def soften(cls: type, record: list[str]) -> None:
    """Assertions say what they found, and the test goes on."""
    inside = [0]

    def soft(name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return check(self, *args, **kwargs)
            inside[0] += 1
            try:
                return check(self, *args, **kwargs)
            except AssertionError:
                record.append(f"{name} failed")
            finally:
                inside[0] -= 1

        return run

    for name, check in assertions(cls):
        setattr(cls, name, soft(name, check))


def keep_what_is_asserted(cls: type, kept: list[tuple[str, tuple]]) -> None:
    """Assertions say what they are asked, and nothing else: no test ends at one, none takes part in a capture."""

    def keep(name: str) -> Callable[..., None]:
        return lambda self, *args, **kwargs: kept.append((name, args))

    for name, _ in assertions(cls):
        setattr(cls, name, keep(name))


def assertions(cls: type) -> list[tuple[str, types.FunctionType]]:
    left = ("assertRaises", "assertWarns", "assertLogs", "assertNoLogs")  # they are contexts, too
    return [
        (name, check)
        for name, check in vars(cls).items()
        if name.startswith("assert") and not name.startswith(left) and isinstance(check, types.FunctionType)
    ]


def replace_compiler(compiled: Callable[[Any], Any], record: list[str]) -> None:
    """``torch.compile`` and its older name give what ``compiled`` makes of a function; what it gives is recorded."""

    def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            record.append(f"raised {type(error).__name__}: {without_addresses(str(error))[:300]}")
            raise
        record.append(described(result))
        return result

    def compile_(model: Any = None, **_: Any) -> Any:
        if model is None:
            return compile_
        if isinstance(model, type):
            model.__call__ = compiled(model.__call__)
            return model
        if isinstance(model, torch.nn.Module):
            return module(vars(model)["__wrapped__"] if type(model) is CapturedModule else model)
        function = compiled(getattr(model, "plain", model))

        @functools.wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:
            return recorded(function, *args, **kwargs)

        run.plain = model  # type: ignore[attr-defined]
        return run

    def module(model: torch.nn.Module) -> Any:
        """On either side what capture gives for a model, which differs in nothing but how a call of it runs."""

        def call(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        shown = capture(model)
        vars(shown)["moebius_entry"] = functools.partial(recorded, compiled(call))
        return shown

    def not_here(*_: Any, **__: Any) -> None:
        raise unittest.SkipTest("exports")

    torch.compile = compile_
    torch._dynamo.optimize = torch._dynamo.optimize_assert = lambda *_, **__: compile_
    torch._dynamo.export = torch.export.export = not_here
    torch.nn.Module.compile = lambda self, *_, **__: None


def tests_of(module: types.ModuleType, part: str) -> Iterator[tuple[str, type[unittest.TestCase], str]]:
    for name, cls in list(vars(module).items()):
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and cls.__module__ == module.__name__:
            for method in unittest.TestLoader().getTestCaseNames(cls):
                if part in f"{name}.{method}":
                    yield f"{name}.{method}", cls, method


def run(
    cls: type[unittest.TestCase],
    method: str,
    record: list[str],
    kept: list[tuple[str, tuple]],
    wrapped: Callable[[Any], Any] | None,
) -> Record:
    """One test. record, kept: where its assertions write to. wrapped: what each test method itself is to be."""
    record.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    test, result, shown = cls(method), unittest.TestResult(), io.StringIO()
    bound = getattr(test, method)
    if wrapped is not None and hasattr(bound, "__func__"):
        setattr(test, method, types.MethodType(wrapped(bound.__func__), test))
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        test.run(result)
        record += [f"{name} {without_addresses(described(args))}" for name, args in kept]
    found = (result.errors or result.failures or [(None, "")])[0][1]
    advice = ("PYTORCH_", "python ", "To execute")  # how to run it again
    lines = [line for line in found.splitlines() if line.strip() and not any(word in line for word in advice)]
    state = "skipped" if result.skipped else "error" if result.errors else "failed" if result.failures else "passed"
    return {
        "state": state,
        "error": without_addresses(lines[-1])[:300] if lines else "",
        "record": [*record],
        "printed": without_addresses(shown.getvalue())[:2000],
        "internal": [*INTERNAL],
    }
