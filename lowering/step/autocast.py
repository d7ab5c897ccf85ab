"""Autocast in a graph: its switches are nodes, and what depends on the program around them is asked when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def depth_of_autocast() -> int:
    """How many blocks are open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def leave_to_depth(depth: int) -> None:
    """Leave the blocks that are open beyond so many, or count those again that were left."""
    for _ in range(depth, now := depth_of_autocast()):
        leave_autocast()
    for _ in range(now, depth):
        torch.autocast_increment_nesting()


def leaving_blocks(run: Callable[..., tuple]) -> Callable[..., tuple]:
    """The function, which leaves as many blocks as it enters where it raises, too."""

    def running(*inputs: Any) -> tuple:
        depth = depth_of_autocast()
        try:
            return run(*inputs)
        except BaseException:
            leave_to_depth(depth)
            raise

    return running
