"""Sizes that torch's fakes take to be equal, though the data decides it: the graph holds the data to that.

``x[mask] + y`` runs where ``mask`` has as many rows as ``y``, and where it has one, which is spread over all of ``y``.
The trace goes on as if there were as many; a node in front of the operator compares, and where they are not, plain
Python goes on from the operator's instruction (``failures``). Where that cannot be done, or where it has happened
before, the operator is a graph break.
"""

from __future__ import annotations

from typing import Any

from moebius.lowering.step import require_equal, rows_between

from ..torch_facts.torch_fakes import FakeWorld
from ..torch_facts.torch_private import free_unbacked_symbols
from .attempt import Attempt
from .may_raise import asks_of_sizes
from .speculation import name_of


class AssumedSizes:
    """Those of one trace."""

    def __init__(self, trace: Attempt, world: FakeWorld):
        self.trace, self.env, self.counted = trace, world.shape_env, world.counted
        world.shape_env.listener.assume = self.assume

    def assume(self, one: Any, other: Any) -> None:
        """Two sizes, as expressions, are taken to be equal by the operator that runs now."""
        trace, writer, assumptions = self.trace, self.trace.writer, self.trace.assumptions
        if (frame := trace.machine.frame) is None:  # the trace is over: lowering answers for what it writes
            return
        place = name_of(frame, frame.pc)
        known = all(self.is_known(symbol) for size in (one, other) for symbol in free_unbacked_symbols(size))
        if not known or assumptions.on_a_mesh or not assumptions.runs_here or place in assumptions.unpredictable:
            raise asks_of_sizes(one, other)
        pair, held = frozenset((one, other)), writer.scope.held_equal
        if pair in held:
            return
        held.add(pair)
        writer.call(require_equal, *(self.env.create_symintnode(size, hint=None) for size in (one, other)), place)

    def is_known(self, symbol: Any) -> bool:
        """Whether the graph has the size. What a region takes for granted is so in it alone, and nobody asks where it
        does not run: it is to be a size of the region's own."""
        writer = self.trace.writer
        if symbol in writer.scope.symbols or (not writer.is_inner and writer.bound(symbol)):
            return True
        given = self.counted.get(symbol)  # inside an operator, of a slice
        if given is None or writer.bound(symbol):
            return False
        node = writer.node("call_function", rows_between, given, {})
        node.meta["val"] = self.env.create_symintnode(symbol, hint=None)
        writer.scope.symbols[symbol] = lambda: node
        return True
