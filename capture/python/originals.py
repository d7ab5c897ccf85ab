"""Functions of Python's and torch's that calls are told by, whatever a program has put in their places.

What stands for ``torch.utils.checkpoint.checkpoint`` while tracing stands for torch's own function, and for no other
one that has its name. Those that programs are known to replace, or to wrap for other defaults, are named here as they
were when capture was imported; where that was too late, the name is nobody's.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from moebius.interpreter import is_kind

from ..bytecode.c_callables import owner_of

PYTHONS, TORCHS = os.path.dirname(os.__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep
OTHERS = tuple(os.path.join(PYTHONS, room) + os.sep for room in ("site-packages", "dist-packages"))
ROOMS = sys.stdlib_module_names | {"torch", "moebius"}
FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType
)  # fmt: skip
GENERATOR = getattr(random.random, "__self__", None)


def is_own(function: Any) -> bool:
    """Whether a function or class is Python's or torch's: by the file of its code, by its module, or as it is C's."""
    if is_kind(function, types.FunctionType):
        name = function.__code__.co_filename
        if name.startswith((TORCHS, "<frozen")) or str(function.__module__).startswith("moebius."):
            return True
        return name.startswith(PYTHONS) and not name.startswith(OTHERS)
    if is_kind(function, type):
        return str(function.__module__).partition(".")[0] in ROOMS
    owner = owner_of(function)
    known = owner is None or owner is GENERATOR or is_kind(owner, type)
    return is_kind(function, FUNCTIONS) and known


def own(function: Any) -> Any:
    """The function; where a program has replaced it, what nobody calls."""
    return function if is_own(function) else object()


def of_originals(stand_ins: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """What stands for functions that are Python's and torch's now."""
    return {function: stand_in for function, stand_in in stand_ins.items() if is_own(function)}


PRINT, LOADS, WARN, DRAW = own(print), own(json.loads), own(warnings.warn), own(random.random)
ROUNDINGS = tuple(map(own, (math.ceil, math.floor, math.trunc)))
CHECKPOINT = own(torch.utils.checkpoint.checkpoint)
IS_COMPILING = own(torch.compiler.is_compiling)
IS_DYNAMO_COMPILING = own(torch.compiler.is_dynamo_compiling)
IS_TENSOR = own(torch.is_tensor)
BACKWARD, GRAD = own(torch.autograd.backward), own(torch.autograd.grad)
TENSOR, EMPTY = own(torch.tensor), own(torch.empty)
