"""Warnings that torch gives while operators run on fakes: none of them is the program's."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch


class Heard(threading.local):
    """text: of a thread's last warning on fakes. running: how many operators on fakes it is in."""

    text: str | None = None
    running = 0


class OnFakes:
    """The text of an entry in ``warnings.filters``: that of each warning given while this thread runs operators on
    fakes. The real operator gives it when the graph runs. ``FakeTensorMode`` reads ``.grad`` of each tensor that it
    converts, of non-leaves as well, which warns, too (2.13).

    An operator that has no form for fakes runs on zeros, with the mode off: ``with ON_FAKES`` around says it then."""

    def __init__(self) -> None:
        self.heard = Heard()

    def __enter__(self) -> None:
        self.heard.running += 1

    def __exit__(self, *_: Any) -> None:
        self.heard.running -= 1

    def match(self, text: str) -> bool:
        on = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if on or self.heard.running:
            self.heard.text = text
            return True
        return text.startswith("The .grad attribute of a Tensor")

    def forget(self) -> None:
        self.heard.text = None

    def last(self) -> str | None:
        """What a warning on fakes said since ``forget``."""
        return self.heard.text


ON_FAKES = OnFakes()


class ToldAlways:
    """torch's switch that C++ says each time what it says once in a process: on while any thread runs operators on
    fakes, and then what it was."""

    def __init__(self) -> None:
        self.lock, self.users, self.before = threading.RLock(), 0, False  # (a signal handler may capture, too)

    def __enter__(self) -> None:
        with self.lock:
            if not self.users:
                self.before = torch.is_warn_always_enabled()
                torch.set_warn_always(True)
            self.users += 1

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                torch.set_warn_always(self.before)


TOLD_ALWAYS = ToldAlways()


@contextlib.contextmanager
def fakes_without_warning() -> Iterator[None]:
    """No warnings of operators on fakes; what C++ says once in a process is still to be said by the real operator.

    The filter goes into the list in place: ``warnings.filterwarnings`` would also make every warning that was
    shown once count as not shown yet.
    """
    entry = ("ignore", ON_FAKES, Warning, None, 0)
    held = warnings.filters
    held.insert(0, entry)  # type: ignore[attr-defined]
    try:
        with TOLD_ALWAYS:
            yield
    finally:
        place = next((i for i, e in enumerate(held) if e is entry), None)
        if place is not None:
            del held[place]  # type: ignore[attr-defined]
