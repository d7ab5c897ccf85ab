"""Functions of torch's that are one node, but where their own Python code warns: then they are interpreted."""

from __future__ import annotations

import types

NAMES = frozenset({"warnings", "_get_softmax_dim"})


class TellsInPython(Exception):
    """An operator on fakes warned, and its Python code may be what did."""


def may_warn(function: types.FunctionType) -> bool:
    """Whether the function's own code can give a warning (``mse_loss`` of two sizes, ``softmax`` without ``dim``)."""
    return not NAMES.isdisjoint(function.__code__.co_names)
