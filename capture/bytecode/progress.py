"""A line on the terminal while a capture takes long.

It is written from where capture passes by, without a thread: at each operator of the graph, and as lowering begins.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from time import perf_counter

LONG, AGAIN = 2.0, 0.2  # seconds until the line comes, and until it is written anew


class Line:
    """Of one capture. shown: how many characters of it stand on the terminal."""

    def __init__(self, name: str):
        self.name, self.began, self.operators = name, perf_counter(), 0
        self.next, self.shown = self.began + LONG, 0

    def tick(self, stage: str = "capturing") -> None:
        now = perf_counter()
        if now >= self.next:
            self.next = now + AGAIN
            self.write(f"moebius: {stage} {self.name}: {self.operators} operators, {now - self.began:.0f} s")

    def write(self, text: str) -> None:
        sys.stderr.write(f"\r{text:<{self.shown}}\r" if not text else f"\r{text:<{self.shown}}")
        sys.stderr.flush()
        self.shown = len(text)


class Open(threading.local):
    """The line of the capture that this thread works at."""

    line: Line | None = None


OPEN = Open()


def step() -> None:
    """An operator was written."""
    line = OPEN.line
    if line is not None:
        line.operators += 1
        line.tick()


def stage(name: str) -> None:
    """Something begins that may take long."""
    if OPEN.line is not None:
        OPEN.line.tick(name)


@contextlib.contextmanager
def progress(name: str) -> Iterator[None]:
    """For a capture in its body: a line on stderr, where that is a terminal, if it takes long; gone at its end."""
    if OPEN.line is not None or not is_terminal():
        yield
        return
    line = OPEN.line = Line(name)
    try:
        yield
    finally:
        OPEN.line = None
        if line.shown:
            line.write("")


def is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except Exception:  # (whatever a program has put there)
        return False
