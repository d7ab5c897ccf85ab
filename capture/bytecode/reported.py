"""The call that a report is being made of, in this thread: what runs for it says here what only the running call knows.

Its trace function counts the user's instructions that Python runs. While capture itself works it looks away
(``uncounted``), but for what capture lets Python run of the user's in the call's stead (``counted``). Which captures a
call went through is known by their guards; where one was not run to its end is said here (``left``).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from .counting import Counts, Ran


class Reported(threading.local):
    """tracer: the innermost trace function of a report; None: none looks. left: by what a graph's failures go to
    (``trace.failures``), kept alive, the instructions that each run stands for that left it in the middle.
    ran: by the same, how often the loops and branches of the graph ran, in each run that is not over or ended well."""

    tracer: Any = None
    left: dict[int, tuple[Any, list[Counts]]] | None = None
    ran: dict[int, list[Ran]] | None = None


REPORTED = Reported()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """While capture itself works, no trace function of ours looks at what runs, and its time is no native part's."""
    tracer = REPORTED.tracer
    if tracer is None:
        yield
        return
    began, traces = perf_counter(), sys.gettrace() is tracer
    if traces:
        sys.settrace(None)
    try:
        yield
    finally:
        tracer.added += perf_counter() - began
        if traces:
            tracer.left = perf_counter()
            sys.settrace(tracer)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Code of the user's that the call is to run once runs now, while capture works (a cached function's first)."""
    tracer = REPORTED.tracer
    if tracer is None or sys.gettrace() is not None:
        yield
        return
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(None)


def left(graph: Any, counts: Callable[[], Counts]) -> None:
    """A graph was left in the middle, where it stands for so many instructions."""
    if REPORTED.left is not None and REPORTED.ran is not None:
        runs = REPORTED.ran.get(id(graph))
        REPORTED.left.setdefault(id(graph), (graph, []))[1].append(counts().in_runs([runs.pop() if runs else {}]))
