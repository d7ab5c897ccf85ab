"""Sizes that torch's fakes take to be equal, though the data decides it: the graph holds the data to that.

``x[mask] + y`` runs where ``mask`` has as many rows as ``y``, and where it has one, which is spread over all of ``y``.
The trace goes on as if there were as many; a node in front of the operator compares, and where they are not, plain
Python goes on from the operator's instruction (``failures``). Where that cannot be done, or where it has happened
before, the operator is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind
from moebius.lowering.step import require_equal, rows_between

from ..tensors.counts import SlotCounts
from ..torch_facts.torch_fakes import FakeWorld
from ..torch_facts.torch_private import expression, free_unbacked_symbols
from ..values.values import TensorProxy
from .attempt import Attempt
from .may_raise import asks_of_sizes
from .speculation import name_of


class AssumedSizes:
    """Those of one trace. live_before: what Python goes on with before the instruction that runs now, None where it
    cannot."""

    def __init__(self, trace: Attempt, world: FakeWorld, live_before: Callable[[], tuple[Any, ...] | None]):
        self.trace, self.env, self.counted, self.world = trace, world.shape_env, world.counted, world
        self.writer, self.live_before = trace.writer, live_before
        world.shape_env.listener.assume, world.shape_env.listener.takes = self.assume, self.takes

    def assume(self, one: Any, other: Any) -> None:
        """Two sizes, as expressions, are taken to be equal by the operator that runs now."""
        trace, writer, assumptions = self.trace, self.writer, self.trace.assumptions
        if (frame := trace.machine.frame) is None:  # the trace is over: lowering answers for what it writes
            return
        if SlotCounts(writer.scope, trace.tensors.uncounted).are_equal(one, other):
            return
        place = name_of(frame, frame.pc)
        known = all(self.is_known(symbol) for size in (one, other) for symbol in free_unbacked_symbols(size))
        if not known or assumptions.on_a_mesh or not assumptions.runs_here or place in assumptions.unpredictable:
            raise asks_of_sizes(one, other)
        pair, held = frozenset((one, other)), writer.scope.held_equal
        if pair in held:
            return
        if (live := self.live()) is None:
            raise asks_of_sizes(one, other)
        held.add(pair)
        sizes = (self.env.create_symintnode(size, hint=None) for size in (one, other))
        writer.call(require_equal, *sizes, place, *live)

    def live(self) -> list[Any] | None:
        """What the graph keeps for Python to go on with, in case; None where it could not go on."""
        if self.writer.is_inner:
            return []
        if (found := self.live_before()) is None:
            return None
        # (the graph may be done with what it makes before Python is)
        return [one for one in found if is_kind(one, TensorProxy) and one.node.op != "placeholder"]

    def takes(self, size: int, part: slice, length: int) -> bool:
        """Whether a slice of so many rows is taken to be as long as its bounds say."""
        trace, writer, assumptions = self.trace, self.writer, self.trace.assumptions
        if (frame := trace.machine.frame) is None or writer.is_inner or assumptions.on_a_mesh:
            return False
        if trace.domain.loops.open:
            return False
        place = name_of(frame, frame.pc)
        if not assumptions.runs_here or place in assumptions.unpredictable:
            return False
        held, said = writer.scope.held_equal, frozenset((size, expression(part.start), expression(part.stop)))
        if said in held:
            return True
        if (live := self.live()) is None:
            return False
        count = self.counts(size, part.start, part.stop, 1)
        writer.call(require_equal, count, length, place, *live)
        held.add(said)
        return True

    def counts(self, *given: Any) -> Any:
        """The number of rows between two numbers, as one of the graph."""
        count = self.world.unknown_count()
        self.emit(expression(count), given)
        return count

    def is_known(self, symbol: Any) -> bool:
        """Whether the graph has the size. What a region takes for granted is so in it alone, and nobody asks where it
        does not run: it is to be a size of the region's own."""
        writer = self.writer
        if symbol in writer.scope.symbols or (not writer.is_inner and writer.bound(symbol)):
            return True
        given = self.counted.get(symbol)  # inside an operator, of a slice
        if given is None or writer.bound(symbol):
            return False
        self.emit(symbol, given)
        return True

    def emit(self, symbol: Any, given: tuple[Any, ...]) -> None:
        """The symbol stands for how many rows there are."""
        node = self.writer.node("call_function", rows_between, given, {})
        node.meta["val"] = self.env.create_symintnode(symbol, hint=None)
        self.writer.scope.symbols[symbol] = lambda: node
