"""Calls whose code backward runs: of an ``autograd.Function``, and checkpointed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from .interfaces import StateRead


@dataclass(eq=False)
class Applied:
    """A call of an ``autograd.Function``, or a checkpointed one, which backward looks at again. histories: the autograd
    nodes of its results' fakes. casts: the autocast that backward was interpreted for, None for any. is_unchanged:
    whether it would be interpreted as the same graph now. unseen: whether that has to be known, and is not yet. ran:
    whether a backward of the graph has run it, the last that can. copied: whether it stands in a module's call that was
    written again. read: what of older state it reads. reads_state: whether some of that is a value that may well be
    another one when a backward runs later. ask_later: has that backward ask for what was read once more. node: of the
    call. renew: writes, when it is called, that the backward that would be run now is run; None where that is not to
    be had."""

    name: str
    histories: frozenset[Any]
    casts: list[Any] | None
    is_unchanged: Callable[[], bool]
    unseen: bool = False
    ran: bool = False
    copied: bool = False
    read: StateRead | None = None
    reads_state: bool = False
    ask_later: Callable[[Applied], None] = lambda applied: None
    node: fx.Node | None = None
    renew: Callable[[], Callable[[], None] | None] = lambda: None
