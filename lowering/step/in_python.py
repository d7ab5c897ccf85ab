"""Nodes that may say that the data is not what the graph was made for, and plain Python is to go on from there."""

from __future__ import annotations

from typing import Any

ASKING = frozenset({"moebius.lowering.step.arrays", "moebius.lowering.step.assumed_sizes"})  # files of such functions
NEVER = frozenset({"array_item"})  # (fails as the user's own code would)


class InPythonError(ArithmeticError):
    """No error of the user's: a captured step goes on as plain Python, with the instruction that the node is of."""


def asks_plain_python(target: Any) -> bool:
    """Whether a node's function may raise InPythonError."""
    return getattr(target, "__module__", None) in ASKING and target.__name__ not in NEVER
