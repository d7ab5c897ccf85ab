"""Marks that stand in frames where there is no value."""
from __future__ import annotations


class Sentinel:
    """A named, unique, falsy-free mark; compared by identity only."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNSET = Sentinel("UNSET")  # a local variable or cell without a value
NULL = Sentinel("NULL")  # CPython's NULL on the value stack, around calls
STOP = Sentinel("STOP")  # an iterator is exhausted
LEAVE = -1  # what a handler returns to leave the frame (a return or a yield)
