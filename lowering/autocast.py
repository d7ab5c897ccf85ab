"""Autocast in a graph: its switches are nodes, and what depends on the program around them is asked when they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

DEVICES = ("cpu", "cuda")  # where it is looked at


def autocast_now() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices on which operators cast their operands, and to what."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


def autocast_at(node: fx.Node) -> tuple[tuple[str, torch.dtype], ...]:
    """The same where a node runs: as it is around the graph, and as the switches before the node leave it. (A body runs
    as it is around its node.)"""
    on = {d: torch.is_autocast_enabled(d) for d in DEVICES}
    to = {d: torch.get_autocast_dtype(d) for d in DEVICES}
    for switch, state in ((torch.set_autocast_enabled, on), (torch.set_autocast_dtype, to)):
        for thrown in node.graph.find_nodes(op="call_function", target=switch):
            if thrown < node and thrown.args[0] in state:
                state[thrown.args[0]] = thrown.args[1]
    return tuple((d, to[d]) for d in DEVICES if on[d])


@contextlib.contextmanager
def casting(casts: tuple[tuple[str, torch.dtype], ...]) -> Iterator[None]:
    """Operators cast so, and keep no copy."""
    with contextlib.ExitStack() as stack:
        for device in DEVICES:
            to = dict(casts).get(device)
            stack.enter_context(torch.autocast(device, to, enabled=to is not None, cache_enabled=False))
        yield


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
