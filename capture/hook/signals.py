"""Handlers of signals (Ctrl-C, a time limit) wait while capture works.

torch's fake tensors and dispatch modes do not stand an exception at any instruction: one between the taking and the
giving back of a mode leaves it in place for the thread, and the next operator aborts the process. Python runs handlers
in the main thread, between any two instructions. So while capture works each handler is replaced by one that notes the
signal. Before its next instruction the symbolic interpreter gives up (`stop_for_signals`), and when capture's work has
unwound in order the program's handlers run; what the call does then is for its owner to say.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from moebius.interpreter.errors import Signal

Handler = Callable[[int, types.FrameType | None], Any]


NUMBERS = sorted(signal.valid_signals())


class SignalArrived(Signal):
    """A signal came while capture worked: it stops, and its handler runs."""


class Waiting:
    """The signals whose handlers wait, in the main thread. arrived: those that came."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.arrived: list[int] = []
        self.holding = self.stops = False

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """Stands in for a program's handler. The second time the first was not enough: somebody presses Ctrl-C again,
        as what runs asks no more."""
        if self.holding and number not in self.arrived:
            self.arrived.append(number)
        else:
            self.handlers[number](number, frame)

    def begin(self, stops: bool) -> None:
        self.holding, self.stops = True, stops
        for number in NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.note:  # (not those of C, nor "ignore" and "default")
                self.handlers[number] = handler
                signal.signal(number, self.note)

    def end(self) -> None:
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self.note:
                signal.signal(number, handler)
        self.holding = False
        arrived, self.arrived = self.arrived, []
        with contextlib.ExitStack() as stack:  # (each, also where one before it raises)
            for number in reversed(arrived):
                stack.callback(self.handlers[number], number, sys._getframe())


WAITING = Waiting()


@contextlib.contextmanager
def signals_wait(stops: bool = True) -> Iterator[None]:
    """No handler runs within the block; what came meanwhile is handled at its end. stops: whether a trace gives up."""
    if WAITING.holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        WAITING.begin(stops)
        yield
    finally:
        WAITING.end()


def stop_for_signals() -> None:
    """Raise SignalArrived where a handler waits. Asked once ``WAITING.arrived`` is not empty."""
    if WAITING.stops and threading.current_thread() is threading.main_thread():
        raise SignalArrived
