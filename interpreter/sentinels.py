"""Marks that stand in frames where there is no value."""
from __future__ import annotations

from .natives import reentry


class Sentinel:
    """A unique mark; compared by identity only. gc.get_objects() does not list it: a program must not come by it."""

    __slots__ = ()


def sentinel(name: str) -> Sentinel:
    mark: Sentinel = type(name, (Sentinel,), {"__slots__": (), "__repr__": lambda self: name})()
    reentry.untrack(mark)
    return mark


UNSET = sentinel("UNSET")  # a local variable or cell without a value
NULL = sentinel("NULL")  # CPython's NULL on the value stack, around calls
STOP = sentinel("STOP")  # an iterator is exhausted
LEAVE = -1  # what a handler returns to leave the frame (a return or a yield)
