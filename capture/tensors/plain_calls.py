"""Calls of most operators: written in C, on tensors and Python's own numbers and texts.

What ``TensorOperations.looked_at`` asks is asked of some functions, or of an argument that is none of these. Any other
call, such as the dozen that an optimizer makes for each parameter, runs on the fakes at once.
"""

from __future__ import annotations

import types
from typing import Any

from moebius.lowering import may_write, returns_nothing, spelled_in_place

from ..values.values import TensorProxy
from . import layouts, offsets, packed, recurrent
from .counts import BINCOUNTS
from .ctc import CTC_LOSSES
from .fakes import PLAIN
from .method_kinds import MADE_OF_NUMBERS, OTHER_KIND, RECORDS
from .windows import POOLS

IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
ASKED_BY_NAME = RECORDS | OTHER_KIND | offsets.ASK | layouts.ASK | {layouts.GIVE_BACK, "_unpack_dual"}
ASKED = BINCOUNTS | CTC_LOSSES | MADE_OF_NUMBERS | frozenset((*POOLS, *packed.OPERATORS, *recurrent.OPERATORS))
KINDS = PLAIN | {TensorProxy}


def are_plain(args: list[Any] | tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these are tensors, plain numbers and texts alone."""
    return KINDS.issuperset(map(type, args)) and (not kwargs or KINDS.issuperset(map(type, kwargs.values())))


def fakes_of(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """What such an operator is given as its fake runs; None for a call of another kind."""
    if type(function) not in IN_C or not are_plain(args, kwargs) or "out" in kwargs:
        return None
    if function.__name__ in ASKED_BY_NAME or function in ASKED:
        return None
    given = tuple([value.fake if type(value) is TensorProxy else value for value in args])
    if kwargs:
        kwargs = {key: value.fake if type(value) is TensorProxy else value for key, value in kwargs.items()}
    return given, kwargs


def changes_in_place(target: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator that returned no tensor still did something: in-place names (foreach too), ``out=``, and
    operators of torch.ops whose schema says so (custom ones that return nothing are called for what they do)."""
    written = may_write(target)
    if written is not None:
        return written or returns_nothing(target)
    name = target if type(target) is str else getattr(target, "__name__", "")
    return spelled_in_place(name) or "out" in kwargs or name in ("setitem", "_set_grad_enabled")
