"""A captured function's own code where it runs as Python after all."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from ..bytecode.counting import copied
from ..hook import call_with_cells, leave_to, mark_skip
from ..torch_facts import torch_private
from .continuation_code import Beginning


def left_alone(function: types.FunctionType) -> types.FunctionType:
    """The function over code of its own that the frame hook leaves alone: where it runs as Python after all, it is not
    to be captured as a function that was met there."""
    code, globals_ = copied(function.__code__), function.__globals__
    mark_skip(code)
    alone = types.FunctionType(code, globals_, function.__name__, function.__defaults__, function.__closure__)
    alone.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(alone, function, ("__module__", "__qualname__", "__doc__"), ())
    return alone


def as_python(
    function: types.FunctionType, beginning: Beginning | None
) -> tuple[Callable[..., Any], types.CodeType]:
    """A callable that runs a captured function as Python, and its code. beginning: of a continuation, which takes a
    list then."""
    if beginning is None:
        alone = left_alone(function)
        return alone, alone.__code__
    code = skipped(beginning.native_code())
    return over(code, function.__globals__, len(beginning.state.cells)), code


def skipped(code: types.CodeType) -> types.CodeType:
    """Code of a frame that goes on natively: nothing captures it."""
    mark_skip(code)
    torch_private.skip_code(code)  # torch.compile cannot read code whose constants are callables
    return code


def over(code: types.CodeType, globals_: dict[str, Any], n_cells: int) -> Callable[[list[Any]], Any]:
    """A callable over such code, with a list of the frame's cells and then of its state, which is empty afterwards."""
    if not n_cells:
        return types.FunctionType(code, globals_)
    return functools.partial(call_with_cells, code, globals_, n_cells)


def left_first(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """What a frame returns to be left before ``run`` takes its values: nobody else holds them then, so that they die
    where Python lets go of them."""
    return functools.partial(leave_to, run)
