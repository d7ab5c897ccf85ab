"""When a frame runs natively as a whole after a graph break.

So do functions that know nothing of torch: they compute with numpy or plain Python what a step needs (masks, boxes, a
store). What one calls is met by the frame hook as anything below a native call is, so that no operator outside of its
own lines is lost to the graph.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from moebius.interpreter import Frame, is_kind

from ..heap.records import raw_dict
from ..heap.varying import REASON as VARIES
from ..python.reach import cells, code_names
from ..values.values import Break

NO_TENSORS = "it knows no tensors"
MOST = 64  # things that are looked at in an object
THEIRS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


class Call(Protocol):
    """What is captured (``trace.Request``)."""

    function: types.FunctionType
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def why_whole(stop: Break, frame: Frame, pc: int, alone: bool, call: Call) -> str:
    """Why this frame runs natively as a whole; "" where it goes on after the break. alone: whether the break is in it.
    (Of a value that varies it is said of each, and holds in a loop alone.)"""
    if knows_no_torch(call.function, (*call.args, *call.kwargs.values())):
        return NO_TENSORS
    instructions = frame.program.instructions
    again = any(step.target is not None and step.target <= pc <= index for index, step in enumerate(instructions))
    return stop.in_each_iteration if alone and (again or stop.reason != VARIES) else ""


def knows_no_torch(function: types.FunctionType, arguments: Iterable[Any]) -> bool:
    """Whether nothing of torch's is among what the function names, is given, or finds one step from there."""
    names = {*code_names(function.__code__)}
    named = [value for name, value in list(function.__globals__.items()) if name in names]
    given = [*arguments, *cells(function)]
    return not any(map(is_of_torch, named)) and not any(is_of_torch(v) for g in given for v in (g, *held_by(g)))


def held_by(value: Any) -> list[Any]:
    """What an object holds; nothing of its own code runs."""
    if type(value) in (list, tuple):
        return list(value[:MOST])
    namespace = value if type(value) is dict else raw_dict(value)
    return [] if namespace is None else list(dict.values(namespace))[:MOST]


def is_of_torch(value: Any) -> bool:
    """Whether it is a tensor, a module, an optimizer, or something that torch defines."""
    kind = type(value)
    if kind is torch.Size:
        return False
    if issubclass(kind, THEIRS) or (issubclass(kind, type) and issubclass(value, THEIRS)):
        return True
    if issubclass(kind, types.ModuleType):
        name = vars(value).get("__name__")
    elif issubclass(kind, type | types.FunctionType | types.BuiltinFunctionType):
        name = value.__module__
    else:
        name = kind.__module__
    return is_kind(name, str) and name.partition(".")[0] == "torch"
