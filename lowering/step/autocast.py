"""Autocast in a graph: its switches are nodes, and what depends on the program around them is asked when they run."""

from __future__ import annotations

import torch
from torch import fx

DEVICES = ("cpu", "cuda")  # where it is looked at


def autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices on which operators cast their operands, and to what."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


def leave_autocast() -> None:
    """The end of a ``with torch.autocast``: whoever leaves the outermost one forgets the copies of weights. Which one
    that is, is not known while tracing: a backward runs inside of other blocks than it was traced in."""
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


fx.wrap("leave_autocast")
