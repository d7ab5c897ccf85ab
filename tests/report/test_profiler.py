"""Under torch.profiler the graphs of warm calls are ranges with the user's function and line; else they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebius import capture, disable
from moebius.api import captured_of
from moebius.codegen import ranges


@disable
def native() -> None:
    pass


def step(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    native()
    return y + 1


LINE = step.__code__.co_firstlineno
EXPECTED = [f"moebius: step (test_profiler.py:{LINE + n})" for n in (1, 3)]


def names_of(function: Any, *args: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        function(*args)
    return [event.name for event in found.events() if event.name.startswith("moebius:")]


def test_each_graph_of_a_warm_call_is_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, x = capture(step), torch.ones(3)
    for _ in range(2):  # (the second call looks whether what broke still does)
        assert torch.equal(captured(x), step(x))
    assert names_of(captured, x) == EXPECTED
    ran = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda label: ran.append(label))
    assert torch.equal(captured(x), step(x)) and ran == []  # nothing of it without a profiler


def test_what_a_graph_raises_goes_through_its_range() -> None:
    def fails(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x * 2)[i] + 1

    captured, x = capture(fails), torch.ones(3)
    captured(x, torch.tensor([0, 1]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(IndexError):
            captured(x, torch.tensor([0, 7]))
    assert torch.equal(captured(x, torch.tensor([2, 1])), fails(x, torch.tensor([2, 1])))


def test_a_torch_that_does_not_say_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges.torch_private, "can_ask_for_profiler", False)
    captured, x = capture(step), torch.ones(3)
    for _ in range(2):
        captured(x)
    assert names_of(captured, x) == []


def test_names_of_what_ran_outlive_it() -> None:
    """torch's profiler, where it records stacks, reads them at its end, and holds no reference: what is ours and is
    dropped by then has names that stay."""
    files = []
    for _ in range(2):
        found = captured_of(capture(step))
        assert found is not None
        found.entry(torch.ones(3))
        files.append(found.segments[0].run.__code__.co_filename)
    assert files[0] is files[1]
