"""What a graph break costs is measured without a trace function: Python code is not dearer than what C does in that
time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from reconciling import plain_counts, reported_counts

from moebius import capture, disable, explain, stats
from moebius.api import captured_of, report_of
from moebius.cache import native_counts
from moebius.codegen import native_parts
from moebius.report.records import GraphBreak, counted

SLEEP = 0.02


@disable
def sleeps() -> None:
    time.sleep(SLEEP)


@disable
def loops(count: int) -> int:
    total = 0
    for i in range(count):
        if i % 3:
            total += i * 2
    return total


def seconds_of_loop(count: int) -> float:
    began = native_parts.perf_counter()
    loops(count)
    return native_parts.perf_counter() - began


def count_for(seconds: float) -> int:
    """How many iterations take so long, about."""
    return int(seconds / min(seconds_of_loop(20_000) for _ in range(3)) * 20_000)


def step(x: torch.Tensor, count: int) -> torch.Tensor:
    y = x * 2
    sleeps()
    y = y + 1
    loops(count)
    return y - 1


@pytest.fixture
def cpu_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks that stand while another process runs."""
    monkeypatch.setattr(native_parts, "perf_counter", time.thread_time)
    monkeypatch.setattr(native_counts, "perf_counter", time.thread_time)
    native_counts.speeds.cache_clear()
    yield
    native_counts.speeds.cache_clear()


def test_the_cost_is_that_of_the_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the functions set: what the explained call takes is no part of it, nor the first call."""
    now = [0.0]
    monkeypatch.setattr(native_parts, "perf_counter", lambda: now[0])

    @disable
    def waits(length: float) -> None:
        now[0] += length

    def two(x: torch.Tensor, lengths: list[float]) -> torch.Tensor:
        y = x * 2
        waits(lengths[0])
        y = y + 1
        waits(lengths[1])
        return y - 1

    captured, x, lengths = capture(two), torch.ones(3), [0.0, 0.0]
    for lengths[0], lengths[1] in ((9.0, 9.0), (2.0, 1.0), (3.0, 1.0), (7.0, 1.0)):
        captured(x, lengths)
    lengths[:] = 100.0, 100.0
    for _ in range(2):
        report = explain(captured)(x, lengths)
        assert sorted(item.cost_us or 0.0 for item in report.breaks) == [1e6, 3e6]
        assert "3.00 s" in report.verdict


def test_the_verdict_says_which_part_of_a_step_it_is() -> None:
    """Of calls with a break, but the first and those of a report."""

    def one_break(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        loops(2000)
        return y - 1

    captured, x = capture(one_break), torch.ones(3)
    first = explain(captured)(x)
    assert first.step_seconds is None and first.verdict.endswith(" natively)")
    for _ in range(20):
        captured(x)
    known = captured.times
    assert len(known) == 16 and 0 < min(known)
    for report in (explain(captured)(x), report_of(captured_of(captured))):
        (item,) = report.breaks
        assert item.cost_us is not None and report.step_seconds == statistics.median(captured.times)
        share = f"{item.cost_us * 1e-6 / report.step_seconds:.0%}"
        assert report.verdict.endswith(f" of a step ({share}))") and captured.times == known
    item.cost_us = 2e6 * report.step_seconds
    assert report.verdict.endswith(" natively)")


def test_a_call_without_a_break_is_not_timed() -> None:
    captured = capture(lambda x: x + 1)
    for _ in range(3):
        captured(torch.ones(3))
    assert captured.times == () and explain(captured)(torch.ones(3)).step_seconds is None


def test_a_break_in_a_loop_costs_what_all_its_runs_take() -> None:
    def in_a_loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = inner(x)
        return x

    @capture
    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        loops(500)
        return y * 2

    captured = capture(in_a_loop)
    for _ in range(6):
        captured(torch.ones(3))
    report = report_of(captured_of(captured))
    parts = [segment.native for member in captured_of(captured).family() for segment in member.segments]
    expected = sorted({part.seconds * 1e6 * part.runs / 6 for part in parts if part is not None})
    assert max(part.runs for part in parts if part is not None) > 6
    assert sorted({item.cost_us for item in report.breaks}) == pytest.approx(expected)


@pytest.mark.usefixtures("cpu_time")
def test_cost_of_python_in_a_first_call() -> None:
    """Noise makes single measurements greater; what counting adds would make all of them greater."""
    ratios = []
    for _ in range(5):
        count = count_for(SLEEP)
        report = explain(capture(step))(torch.ones(3), count)
        slept, looped = report.breaks
        assert looped.cost_us is not None and slept.cost_us is not None and slept.cost_us < looped.cost_us
        ratios.append(looped.cost_us / 1e6 / seconds_of_loop(count))
        assert report.counting_stopped and "counting stopped" in str(report)
    assert min(ratios) < 1.3 and max(ratios) > 0.7


@pytest.mark.usefixtures("cpu_time")
@pytest.mark.usefixtures("cpu_time")
def test_what_counting_adds_has_to_be_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_counts.NativeTracer, "leave", lambda self, arrived: None)
    count = count_for(SLEEP)
    report = explain(capture(step))(torch.ones(3), count)
    assert (report.breaks[1].cost_us or 0.0) / 1e6 > 1.3 * min(seconds_of_loop(count) for _ in range(3))


def test_a_later_report_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_counts, "BUDGET", 500)
    captured, x = capture(step), torch.ones(3)
    expected = plain_counts(step, x, 200)
    first = explain(captured)(x, 200)
    assert first.counting_stopped and sum(first.coverage.values()) < sum(expected.values())
    captured(x, 200)
    costs = []
    for _ in range(2):
        report = explain(captured)(x, 200)
        assert not report.counting_stopped and reported_counts(report) == expected
        costs.append([item.cost_us for item in report.breaks])
    assert costs[0] == costs[1]  # a report's own call is none of those that count


def test_a_call_that_is_explained_in_an_explained_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a native part of it in which nothing is counted any more, and where it still is."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        loops(3)
        return y * 2

    other, found = capture(inner), []

    @disable
    def explains(x: torch.Tensor, count: int) -> None:
        loops(count)
        found.append(explain(other)(x))

    def outer(x: torch.Tensor, count: int) -> torch.Tensor:
        y = x * 2
        explains(x, count)
        y = y + 1
        loops(5)
        return y - 1

    monkeypatch.setattr(native_counts, "BUDGET", 500)
    for count in (1000, 2):
        captured = capture(outer)
        for _ in range(3):
            report = explain(captured)(torch.ones(3), count)
            assert torch.equal(report.result, torch.full((3,), 2.0)) and len(report.breaks) == 2
            assert report.status != "native" and all(item.cost_us is not None for item in report.breaks)
        assert torch.equal(found[-1].result, torch.full((3,), 4.0))
    assert not native_parts.LISTENERS


def test_a_break_in_a_loop_costs_the_sum() -> None:
    @disable
    def nap() -> None:
        time.sleep(0.002)

    def in_a_loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            nap()
            x = x + 1
        return x

    captured = capture(in_a_loop)
    for _ in range(3):
        captured(torch.ones(3))
    report = explain(captured)(torch.ones(3))
    assert sum(item.cost_us or 0.0 for item in report.breaks) >= 8_000


def test_what_raises_is_timed_too() -> None:
    @disable
    def fails() -> None:
        time.sleep(0.002)
        raise KeyError("gone")

    def tries(x: torch.Tensor) -> torch.Tensor:
        try:
            fails()
        except KeyError:
            x = x + 1
        return x * 2

    captured = capture(tries)
    for _ in range(3):
        assert captured(torch.ones(3)).tolist() == [4.0] * 3
    report = explain(captured)(torch.ones(3))
    assert report.breaks[0].cost_us is not None and report.breaks[0].cost_us >= 2_000
    assert not native_parts.LISTENERS


def test_a_script_s_report_has_costs() -> None:
    """Which is of all calls so far, none of them explained."""
    from moebius.api import captured_of, report_of

    def naps(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        sleeps()
        return x + 1

    captured = capture(naps)
    for _ in range(3):
        captured(torch.ones(3))
    found = captured_of(captured)
    assert found is not None and stats(captured).breaks
    assert (report_of(found).breaks[0].cost_us or 0.0) >= SLEEP * 1e6


def test_a_break_in_a_call_is_not_paid_twice() -> None:
    """What runs natively after the caller's break is the call, and in it what runs natively after the callee's own."""
    inside, around = ("train.py", 9, "helper"), ("train.py", 3, "step")
    found = [GraphBreak("r", "d", "h", *inside, "CALL", (inside,), cost) for cost in (2.0, 3.0)]
    calls = [GraphBreak("r", "d", "h", *inside, "CALL", (around, inside), 1000.0)]
    ((merged, count),) = counted([*found, *calls])
    assert (merged.cost_us, count) == (5.0, 3)
    ((merged, _),) = counted(calls)
    assert merged.cost_us == 1000.0


def test_a_call_in_which_something_is_captured_is_no_step() -> None:
    def one_break(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        loops(10)
        return y - 1

    captured = capture(one_break, dynamic=False)
    for size in (2, 3, 4):
        captured(torch.ones(size))
    assert captured.times == ()
    captured(torch.ones(3))
    assert len(captured.times) == 1
