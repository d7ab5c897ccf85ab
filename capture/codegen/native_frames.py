"""A captured function's own code where it runs as Python after all."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ..hook import mark_skip
from .resume import with_cells


def left_alone(function: types.FunctionType) -> types.FunctionType:
    """The function over code of its own that the frame hook leaves alone: where it runs as Python after all, it is not
    to be captured as a function that was met there."""
    code, globals_ = function.__code__.replace(), function.__globals__
    mark_skip(code)
    alone = types.FunctionType(code, globals_, function.__name__, function.__defaults__, function.__closure__)
    alone.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(alone, function, ("__module__", "__qualname__", "__doc__"), ())
    return alone


def run_cells_natively(function: types.FunctionType, n_cells: int) -> Callable[..., Any]:
    """The function itself, or for a resume function a callable that takes the cells first."""
    if not n_cells:
        return function
    return with_cells(function.__code__, function.__globals__, function.__name__, n_cells)
