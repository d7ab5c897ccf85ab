"""The native part after a graph break, and how long it takes.

A clock is read before and behind it in each call (some 80 ns), so that a report knows what a break costs a
step, and no trace function needs to run for that.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ..bytecode.hidden_frames import hidden

KEPT = 16  # runs of a part, the newest


class NativePart:
    """What runs as Python after one graph break. times: seconds of its newest runs that no report has counted.
    met: whether the first run has been taken out of them; it captures what is below, fills caches, imports modules."""

    __slots__ = ("code", "met", "times")

    def __init__(self, code: Any):
        self.code, self.met = code, False
        self.times: deque[float] = deque(maxlen=KEPT)

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


# Told when a native part has ended, in any thread: by reports that are being made.
LISTENERS: list[Callable[[NativePart], None]] = []


def timed(run: Callable[..., Any], part: NativePart) -> Callable[..., Any]:
    """``run``, the native part, with its time noted."""

    @hidden
    def around(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            part.times.append(perf_counter() - began)
            for listener in LISTENERS:
                listener(part)

    return around
