"""torch's random state: tracing leaves it as it was, but for what the user's own code draws while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Preserved(threading.local):
    """The states that are to be put back, the innermost last."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []


PRESERVED = Preserved()


@contextmanager
def preserved() -> Iterator[None]:
    PRESERVED.states.append(torch.get_rng_state())
    try:
        yield
    finally:
        torch.set_rng_state(PRESERVED.states.pop())


def drawing(function: Callable[[], Any]) -> Any:
    """``function()``, the user's own, which runs while tracing: the random numbers that it draws stay drawn."""
    states = PRESERVED.states
    if not states:
        return function()
    tracing = torch.get_rng_state()
    torch.set_rng_state(states[-1])
    try:
        return function()
    finally:
        states[-1] = torch.get_rng_state()
        torch.set_rng_state(tracing)
