"""The file that a warning names when capture itself fails: what somebody needs who is to find out why."""

from __future__ import annotations

import dis
import io
import sys
import tempfile
import traceback
import types

import torch

import moebius


def failure_file(function: types.FunctionType, error: BaseException) -> str | None:
    """A file to attach to a report: versions, the function's place and code, the traceback. None: cannot be written."""
    code = function.__code__
    text = io.StringIO()
    print(f"moebius {moebius.__version__}, torch {torch.__version__}, Python {sys.version}", file=text)
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
