"""What torch's settings, the thread and the process are asked for: as they are in each call, without a break."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.torch_facts.torch_flags import GETTERS


def flips(getter: Any) -> Any:
    """What turns a setting over and back, None where it is no switch that this build lets us set."""
    setter = getattr(torch._C, getter.__name__.replace("_get_", "_set_", 1))
    try:
        before = getter()
        if type(before) is not bool:
            return None
        setter(not before)
        other = getter()
        setter(before)
        return setter if (other, getter()) == (not before, before) else None
    except (RuntimeError, TypeError):
        return None


SWITCHES = {one.__name__: (one, flips(one)) for one in sorted(GETTERS, key=lambda g: g.__name__) if flips(one)}


def test_there_are_switches() -> None:
    assert len(SWITCHES) >= 5


@pytest.mark.share(6)
@pytest.mark.parametrize("place", ["asked", "set in the step", "set and asked"])
@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str, place: str) -> None:
    getter, setter = SWITCHES[name]

    def step(x: torch.Tensor, turn: bool) -> Any:
        y, found = x * (2 if getter() else 3), [getter()]
        if place != "asked" and turn:
            setter(not getter())
            found.append(getter() if place == "set and asked" else None)
            y = y + (5 if getter() else 7)
            setter(not getter())
        return y, found, getter()

    captured, before = capture(step, backend="eager"), getter()
    try:
        for call in range(7):
            if call in (3, 5):
                setter(not getter())
            x = torch.ones(2)
            (a, *want), (b, *got) = step(x, call % 2 == 1), captured(x, call % 2 == 1)
            assert torch.equal(a, b) and want == got
    finally:
        setter(before)
    assert place != "asked" or stats(captured).breaks == 0


def test_threads_and_the_process() -> None:
    def step(x: torch.Tensor) -> Any:
        return x * 2, threading.get_ident(), threading.get_native_id(), os.getpid()

    captured, found = capture(step, backend="eager"), []
    for _ in range(3):
        assert captured(torch.ones(2))[1:] == step(torch.ones(2))[1:]
        other = threading.Thread(target=lambda: found.append(captured(torch.ones(2))[1:] == step(torch.ones(2))[1:]))
        other.start()
        other.join()
    assert found == [True] * 3 and stats(captured).breaks == 0 and stats(captured).hits >= 2
