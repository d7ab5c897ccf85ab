"""Exceptions that C code raised while tracing, and that the user's handler caught: whether they are plain Python's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind
from moebius.interpreter.tracebacks import entries_of

from ..heap.records import members
from ..values.tracebacks import module_of
from ..values.values import ATOMS, SYMBOLIC, TensorProxy

# What only an object of ours, or a fake tensor, can have put into a message.
OURS = re.compile(
    r"UndefinedAfterLoop|FakeTensor|SymInt|SymFloat|SymBool|Absent|moebius|\bmeta\b"
)


def raised_in_c(error: BaseException, known: Callable[[Any], bool]) -> bool:
    """Whether an exception of Python's own says in all its parts what it says in plain Python, so that the step may
    read it: C code raised it, of plain arguments, and no operator on fake tensors is behind it (fakes have messages
    of their own). ``known``: whether tracing knows an object."""

    def plain(value: Any) -> bool:
        return type(value) is TensorProxy or (type(value) in ATOMS and type(value) not in SYMBOLIC) or known(value)

    kind = type(error)
    # (a TypeError of a wrong operand: C code words it by the instruction, and tracing has other instructions)
    if kind.__module__ != "builtins" or not is_kind(error, Exception) or is_kind(error, TypeError):
        return False
    if is_kind(error, AttributeError) and " object has no attribute " not in str(error):
        return False
    # (besides the arguments: ``name``, ``obj``, ``value``)
    parts = [d.__get__(error) for d in members(kind)] + [error.__context__, error.__cause__]
    if not all(map(plain, (*error.args, *parts))) or tells_of_tracing(error):
        return False
    place = None if kind is StopIteration else error.__traceback__  # (a generator's end: no operator raises it)
    for entry in entries_of(place):
        module = module_of(entry)
        ours = "moebius.torch_facts.torch_private", "moebius.tensors.tensors"
        if module.split(".")[0] == "torch" or module in ours:
            return False
    return True


def is_of_fakes(error: BaseException) -> bool:
    """Whether torch has raised it as it answered for fake tensors or for sizes that vary: the operator may not."""
    module, ours = "", ("", "")
    for entry in entries_of(error.__traceback__):
        module = module_of(entry)
        ours = (module, entry.tb_frame.f_code.co_name) if module.startswith("moebius.") else ours
    interpreted = ours[0] == "moebius.interpreter.machine" or ours[1] == "reraise"
    return module.partition(".")[0] in ("torch", "sympy") and not interpreted


def tells_of_tracing(error: BaseException) -> bool:
    """Whether its words name an object of ours: C code that refuses one (``unhashable type: SymInt``) may do what it is
    asked with the number for which that stands."""
    return any(OURS.search(a) for a in error.args if is_kind(a, str))
