"""Functions met below native calls: each becomes a captured function of its own."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any, cast

from ..bytecode.hidden_frames import apart, hidden
from ..hook import hooked_for, set_frame_callback, set_settler
from ..options import Options
from ..torch_facts import torch_private
from .captured import Captured
from .frames import with_plain_arguments, worth_capturing

MAX_MADE = 4  # functions of one code with cells of their own; one that each call makes anew runs natively after that


@hidden
def entry_of(function: types.FunctionType) -> Any:
    """Asked by the frame hook once for each code object that a captured function meets below a native call."""
    return apart(captured_below, function)


def captured_below(function: types.FunctionType) -> Any:
    """The entry of a function that is met now, None where it runs as it is."""
    if not worth_capturing(function):
        return None
    owner: Captured | None = hooked_for()
    if owner is not None:
        owner.met[function.__code__] += 1
        if owner.met[function.__code__] > MAX_MADE:
            return None
    options = owner.options if owner is not None else Options()
    flat = with_plain_arguments(function)
    names = function.__code__.co_varnames[: flat.__code__.co_argcount]
    found = Captured(flat, replace(options, fullgraph=False), names=names, parent=owner)
    if owner is not None:
        found.assumptions.learn_from(owner.assumptions, function.__code__)
    found.met_as = function.__code__
    found.below_native.append(found)
    return found.entry


def install_frame_callback() -> None:
    """Let the frame hook ask us (the hook itself is on only while a native part of a captured frame runs)."""
    set_frame_callback(cast(Any, entry_of))
    set_settler(torch_private.set_eval_frame)
