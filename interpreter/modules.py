"""Imports whose module bodies are interpreted: importlib's own Python implementation, run by the machine."""
from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any

from .private_builtins import ORIGINAL as builtins
from .protocols import Machine
from .tracebacks import GET_TRACEBACK, SET_TRACEBACK, entries_of, linked

# importlib.__import__ is importlib's Python form of builtins.__import__
PYTHON_IMPORT = importlib.__import__


def import_interpreted(machine: Machine, name: str, globals_: Any, locals_: Any, fromlist: Any, level: int) -> Any:
    """builtins.__import__ with interpreted finders, loaders and module bodies."""
    if not isinstance(name, str):
        raise TypeError(f"module name must be str, not {type(name).__name__}")
    if level < 0:
        raise ValueError("level must be >= 0")
    if name == "" and level == 0:
        raise ValueError("Empty module name")
    if sys.modules.get(name) is not None and level == 0 and not fromlist:
        return builtins.__import__(name, globals_, locals_, fromlist, level)
    try:
        return machine.domain.call(PYTHON_IMPORT, [name, globals_, locals_, fromlist or (), level], {})
    except BaseException as error:
        trim(error)
        raise


def trim(error: BaseException) -> None:
    """Leave importlib's own frames out of the traceback (Python/import.c remove_importlib_frames)."""
    always = isinstance(error, ImportError)
    kept: list[TracebackType] = []
    pending: list[TracebackType] = []
    for entry in entries_of(GET_TRACEBACK(error)):
        code = entry.tb_frame.f_code
        if code.co_filename in ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"):
            pending.append(entry)
            if always or code.co_name == "_call_with_frames_removed":
                pending.clear()
        else:
            kept += [*pending, entry]
            pending = []
    SET_TRACEBACK(error, linked([*kept, *pending]))
