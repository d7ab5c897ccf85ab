"""torch's random state, and whether Python collects garbage: tracing leaves both as they were, but for what the user's
own code draws or sets while it is traced, which finds them so."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Preserved(threading.local):
    """The states that are to be put back, the innermost last. collects: whether the collector is paused, and was on."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self.collects = False


PRESERVED = Preserved()


@contextmanager
def preserved() -> Iterator[None]:
    PRESERVED.states.append(torch.get_rng_state())
    try:
        yield
    finally:
        torch.set_rng_state(PRESERVED.states.pop())


@contextmanager
def paused_collector() -> Iterator[None]:
    """No cyclic garbage collection: a trace makes many objects that live as long as it does, and each collection
    would go through all of them again."""
    outer, PRESERVED.collects = PRESERVED.collects, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if PRESERVED.collects:
            gc.enable()
        PRESERVED.collects = outer


def drawing(function: Callable[[], Any]) -> Any:
    """``function()``, the user's own, which runs while tracing: the random numbers that it draws stay drawn."""
    states, collects = PRESERVED.states, PRESERVED.collects
    if states:
        tracing = torch.get_rng_state()
        torch.set_rng_state(states[-1])
    if collects:
        gc.enable()
    try:
        return function()
    finally:
        if collects:
            PRESERVED.collects = gc.isenabled()
            gc.disable()
        if states:
            states[-1] = torch.get_rng_state()
            torch.set_rng_state(tracing)
