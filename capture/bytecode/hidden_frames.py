"""Frames of ours that stand between the user's, hidden from what counts frames.

``warnings.warn(stacklevel=n)`` and logging's ``findCaller`` name the n-th caller's file and line. Both pass over frames
of the import system, which they know by their file's name (``is_internal_frame`` in CPython's Python/_warnings.c and
``_is_internal_frame`` in Lib/logging/__init__.py, 3.11 to 3.13). Ours take such a name, so that a warning has
the place that plain Python gives it, and the same entry in the registry of those that were shown once.
``torch.compile`` around a captured call leaves them alone too: it is for the user's frames below.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

from ..torch_facts import torch_private

MARK = "importlib._bootstrap"

F = TypeVar("F", bound=Callable)


def hidden(function: F) -> F:
    """The function, its frames passed over when the user's callers are counted, and by ``torch.compile``."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__
    function.__code__ = hidden_code(code, code.co_filename)
    return function


@functools.cache
def hidden_code(code: types.CodeType, filename: str) -> types.CodeType:
    """One for each function that is written down, for good: torch's profiler reads the names of what ran at its end and
    holds no reference. (Codes of two files may be equal.)"""
    made = code.replace(co_filename=f"{filename} ({MARK})")
    torch_private.skip_code(made)
    return made


@hidden
def apart(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, which is capture's own work: ``torch.compile`` around the call is not to compile it."""
    compiling, outer = torch_private.set_eval_frame(None), AROUND.compiling
    AROUND.compiling = outer or compiling is not None
    try:
        return function(*args)
    finally:
        AROUND.compiling = outer
        torch_private.set_eval_frame(compiling)


class Around(threading.local):
    """compiling: whether capture works for a call that ``torch.compile``, too, would compile what it runs of."""

    compiling = False


AROUND = Around()


@functools.cache
def residual_file(name: str) -> str:
    """The file name of residual code made for a function of this name; one string, for good (see ``hidden_code``)."""
    return f"<moebius residual of {name}, {MARK}>"
