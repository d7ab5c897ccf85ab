"""Which functions that are met below native calls are captured, and how the frame hook hands them over."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from ..bytecode.user_code import is_library
from ..hook import mark_skip
from ..trace.trace import traceable

TORCH = os.path.dirname(torch.__file__)
# Of torch's, yet captured: where a checkpoint runs natively (below FSDP's hooks), nothing in it could be.
WRAPPER = os.path.join(TORCH, "distributed/algorithms/_checkpoint/checkpoint_wrapper.py")
CHECKPOINTS = (WRAPPER, "CheckpointWrapper.forward")


def uses_torch(namespace: dict[str, Any]) -> bool:
    """Whether a module names torch, or something of torch's, among its globals."""
    for value in list(namespace.values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.split(".")[0] == "torch":
            return True
    return False


# Special methods that are captured where a native part meets them.
PROTOCOL = frozenset(
    ("__call__", "__init__", "__post_init__", "__enter__", "__exit__", "__getitem__", "__setitem__", "__next__")
) | {f"__{side}{name}__" for side in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "matmul", "pow")}


def worth_capturing(function: types.FunctionType) -> bool:
    """Whether a function below a native call is one of the user's that may hold operators of torch's."""
    code = function.__code__
    if code.co_name.startswith("__") and code.co_name not in PROTOCOL:
        return False  # guards and native code go through the others themselves
    if not uses_torch(function.__globals__):
        return False  # import hooks, loggers and the like are below native calls too
    if is_library(code.co_filename) and (code.co_filename, code.co_qualname) != CHECKPOINTS:
        return False
    if code.co_name in ("<module>", "<lambda>"):
        return False
    # (a comprehension's iterations are over an iterator that is there already: each would be a graph break)
    return code.co_varnames[:1] != (".0",) and traceable(function) is None


def with_plain_arguments(function: types.FunctionType) -> types.FunctionType:
    """The function with *args and **kwargs as plain positionals (a tuple and a dict): how the hook hands them over."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    flat = code.replace(co_argcount=count, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=code.co_flags & ~0x0C)
    mark_skip(flat)
    return types.FunctionType(flat, function.__globals__, function.__name__, None, function.__closure__)
