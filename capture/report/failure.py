"""What is said when capture or lowering itself fails: a warning, and a file for who is to find out why."""

from __future__ import annotations

import dis
import io
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable

import torch

from ..errors import MoebiusWarning
from ..versions import __version__


def failure_file(function: types.FunctionType, error: BaseException) -> str | None:
    """A file to attach to a report: versions, the function's place and code, the traceback. None: cannot be written."""
    code = function.__code__
    text = io.StringIO()
    print(f"moebius {__version__}, torch {torch.__version__}, Python {sys.version}", file=text)
    print(f"while capturing {code.co_qualname}, {code.co_filename}:{code.co_firstlineno}\n", file=text)
    traceback.print_exception(error, file=text)
    print("\nIts instructions:", file=text)
    dis.dis(code, file=text, depth=0)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="moebius-failure-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text.getvalue())
        return file.name
    except OSError:
        return None


def capture_failed(function: types.FunctionType, error: BaseException, is_library: Callable[[str], bool]) -> str:
    """What to warn of an error that capture ended in: one of ours, with a file, or one of the user's code that capture
    calls: a backend's."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = (
        f"moebius could not capture {function.__qualname__} and runs it natively: {type(error).__name__}: {error} "
        f"(in {place.name}, {place.filename}:{place.lineno}); "
    )
    if not is_library(place.filename):
        return said + "it was raised by code of yours that capture calls, as a backend is"
    written = failure_file(function, error)
    return said + "please report this" + (f", with {written}" if written else "")


def lowering_failed(function: types.FunctionType, error: Exception) -> str:
    """An error of ours in lowering: say so, with a file. The captured graph runs as it is. Returns what to report."""
    place, written = traceback.extract_tb(error.__traceback__)[-1], failure_file(function, error)
    fault = f"{type(error).__name__}: {error} (in {place.name}, {place.filename}:{place.lineno})"
    warnings.warn(
        f"moebius could not lower the graph of {function.__qualname__} and runs it as it was captured: {fault}; please "
        "report this" + (f", with {written}" if written else ""),
        MoebiusWarning,
        stacklevel=2,
    )
    return fault
