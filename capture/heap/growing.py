"""Containers that hold something else in each call: a list of losses, a deque of the last hundred.

To append to them reads nothing. What reads one as a whole (``len``, ``sum``, ``torch.stack``, an item of a list) is a
guard on all that it holds, and so another capture in each call. Once that has been seen some times, such a read is a
graph break: what stands before it and after it is captured once. A frame with a loop over one runs natively as a whole.
"""

from __future__ import annotations

from moebius.lowering.step.filters import recorders

from ..values.values import Break
from .records import Record

GROWN = 4  # times that a container was not what it had been, from which on it is one of these (captures end at 16)


IN_EACH_TURN = "each turn of the loop would be a graph break"


class Growing:
    """Part of ``Objects``. growing: names of such containers."""

    growing: frozenset[str] = frozenset()

    def is_growing(self, record: Record) -> bool:
        """Whether it is one of these, and this call has not read it as a whole."""
        return record.source.name in self.growing and record.shadow is None

    def refuse_recorder(self, record: Record) -> None:
        """A graph break where the items are read of a list to which every warning of the graph's is added."""
        if type(record.obj) is list and any(one is record.obj for one in recorders()):
            detail = f"{record.source.name} is read, and the block that records in it is open or was left just now"
            raise Break("warnings that were recorded", detail, "read it after the step")

    def refuse_growing(self, record: Record) -> None:
        """A graph break where one of these is to be read as a whole."""
        self.refuse_if_growing(record, "read as a whole")

    def refuse_loop(self, record: Record) -> None:
        """The same where a loop is to go through one."""
        self.refuse_if_growing(record, "gone through", IN_EACH_TURN)

    def refuse_if_growing(self, record: Record, what: str, in_each_turn: str = "") -> None:
        if self.is_growing(record):
            kind = type(record.obj).__name__
            raise Break(
                "container that changes from call to call",
                f"{record.source.name} is {what}, and the {kind} held something else in each call",
                "read it outside of the step: append() alone reads nothing",
                in_each_turn,
            )
