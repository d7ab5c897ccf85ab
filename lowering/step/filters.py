"""Which warnings are shown, for a part of the step: ``with warnings.catch_warnings(): warnings.simplefilter(…)``.

What is restored at the end of the block is kept here, by thread, and not in an object of the step's: the block may be
entered by a graph and left by Python code, after an operator that failed or a graph break.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

ENTERED = threading.local()


def blocks() -> list[Any]:
    """The blocks that this thread is in, outermost first."""
    if not hasattr(ENTERED, "blocks"):
        ENTERED.blocks = []
    return ENTERED.blocks


def enter_block(record: bool = False) -> list[warnings.WarningMessage] | None:
    """record: the list, given back, in which warnings are kept rather than shown."""
    block = warnings.catch_warnings(record=record)
    recorded = block.__enter__()
    blocks().append(block)
    return recorded


def recorders() -> list[Any]:
    """The lists in which ``catch_warnings(record=True)`` keeps warnings: now, or when the open blocks have been left.

    What shows a warning is ``warnings._showwarnmsg_impl``, of a recording block its list's ``append`` (CPython 3.6 on).
    """
    shown_by = [warnings, *blocks()]
    owners = (getattr(getattr(one, "_showwarnmsg_impl", None), "__self__", None) for one in shown_by)
    return [owner for owner in owners if isinstance(owner, list)]


def leave_block() -> None:
    blocks().pop().__exit__(None, None, None)


def leave_to(depth: int) -> None:
    """Leave blocks until ``depth`` of them are open."""
    while len(blocks()) > depth:
        leave_block()


def filter_call(function: Callable[..., None], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """``warnings.simplefilter(*args)`` and its kin."""

    def change_filters() -> None:
        function(*args, **kwargs)

    return change_filters
