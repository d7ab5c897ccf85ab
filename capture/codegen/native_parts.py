"""The native part after a graph break, and how long it takes.

A clock is read before and behind it in each call (some 80 ns), so that a report knows what a break costs a
step, and no trace function needs to run for that.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ..hook import call_timed

KEPT = 16  # runs of a part, the newest


class NativePart:
    """What runs as Python after one graph break. times: seconds of its newest runs that no report has counted. runs:
    how many all were. met: whether the first run has been taken out of them; it captures what is below, fills caches,
    imports modules. raised: whether a run has; returned: told when one has raised nothing, and none before."""

    __slots__ = ("code", "met", "raised", "returned", "runs", "times")

    def __init__(self, code: Any, returned: Callable[[], None] | None = None):
        self.code, self.met, self.raised, self.returned = code, False, False, returned
        self.times: deque[float] = deque(maxlen=KEPT)
        self.runs = 0

    @property
    def seconds(self) -> float | None:
        """What it takes, None as long as only its first run has been seen."""
        known = list(self.times)
        if not self.met and len(known) < KEPT:
            del known[:1]
        return statistics.median(known) if known else None

    def take_back(self) -> float:
        """The newest run, which is not to be one of ``times``: a report slowed it down."""
        self.met = True
        return self.times.pop()

    def ended(self, began: float, raised: bool) -> None:
        """A run of it."""
        self.times.append(perf_counter() - began)
        self.runs += 1
        self.raised |= raised
        if self.returned is not None and not self.raised:
            self.returned()
        for listener in LISTENERS:
            listener(self)

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which is this part, with its time noted."""
        return functools.partial(call_timed, perf_counter, self.ended, run)


# Told when a native part has ended, in any thread: by reports that are being made.
LISTENERS: list[Callable[[NativePart], None]] = []
