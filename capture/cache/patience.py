"""Functions below a step, and what follows its breaks, whose captures do not pay: calls do not come again.

Each would be captured many times, and one capture takes as long as some hundred calls. After a few in a row that served
less often than they were made, a call is captured only where something new was learnt of what varies, or the older ones
serve after all.
"""

from __future__ import annotations

from ..hook import Entry
from ..trace.segment import Segment

PATIENCE = 4  # captures in a row


class Patience:
    """Of one captured callable. looks: calls in a row that were not captured for that."""

    def __init__(self) -> None:
        self.looks = 0

    def lasts(self, alike: list[Segment], entry: Entry, learnt: bool, step: int) -> bool:
        """Whether the call is worth a capture. alike: those for the same modules, newest last. step: which it is; what
        was captured in it may serve in the next."""
        latest = [segment for segment in alike if segment.captured_in < step][-PATIENCE:]
        hits = {program: count for program, _, count in entry.targets}
        served = sum(hits.get(segment.guards.program, 0) for segment in latest)
        lasts = learnt or len(latest) < PATIENCE or served >= PATIENCE
        self.looks = 0 if lasts else self.looks + 1
        return lasts
