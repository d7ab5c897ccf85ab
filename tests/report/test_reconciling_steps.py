"""Generated training steps: each call's report counts what ``sys.settrace`` counts on the plain run."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzz.choices import SeededChoices
from reconciling import outcome_of_steps, plain_counts, reported_counts
from steps.grammar import generate

from moebius import capture, disable, explain, reset
from moebius.bytecode import reported
from moebius.trace import failures


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    """A collection runs whatever registered for it (hypothesis does), in one of the two runs."""
    kept, gc.callbacks[:] = gc.callbacks[:], []
    yield
    gc.callbacks[:] = kept


@pytest.mark.share(1)
@pytest.mark.parametrize("seed", range(200))
def test_generated_steps(seed: int) -> None:
    source = generate(SeededChoices(seed))
    found = outcome_of_steps(source)
    assert not found.differs, f"seed {seed}: {found.differs}\n{source}"


SKIPPED: list[int] = []


def helper(x: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = x * 2 + i
    return x


def a_side_exit(x: torch.Tensor) -> torch.Tensor:
    """The data goes the other way in a call of a call, behind which both have more to do."""

    def inner(y: torch.Tensor) -> torch.Tensor:
        y = helper(y)
        if y.sum() > 100:
            SKIPPED.append(len(SKIPPED))
            y = helper(y) - 1
        return y + 1

    return helper(inner(x + 1))


def a_failure(x: torch.Tensor) -> torch.Tensor:
    """An operator raises with some data, and the user handles it."""
    y = helper(x)
    try:
        y = y + y[(x.sum() > 9).long() * 7]
    except IndexError:
        y = helper(y)
    return y * 2


def a_failure_in_a_generator(x: torch.Tensor) -> torch.Tensor:
    """The loop's instruction advances the generator that goes on: it is the one that had begun to."""

    def rows() -> Iterator[torch.Tensor]:
        for n in range(2):
            yield x + n
            yield x[(x.sum() > 9).long() * 7]

    y = helper(x)
    try:
        for row in rows():
            y = y + row
    except IndexError:
        y = helper(y)
    return y * 2


@pytest.mark.parametrize("step", [a_side_exit, a_failure, a_failure_in_a_generator])
def test_a_graph_that_is_left_in_the_middle(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for what comes before; the rest runs as Python, which is neither captured nor opaque."""
    captured = capture(step, backend="eager")
    other, usual = torch.full((2,), 9.0), torch.full((2,), 0.5)
    captured(usual)
    ways = []
    for x in (other, usual, other):
        report = explain(captured)(x)
        assert reported_counts(report) == plain_counts(step, x)
        assert report.coverage["captured"] and not report.coverage["opaque"]
        ways.append(bool(report.coverage["native"]))
    assert any(ways)
    monkeypatch.setattr(failures, "left", lambda graph, counts: None)
    captured = capture(step, backend="eager")
    captured(usual)
    assert reported_counts(explain(captured)(other)) != plain_counts(step, other)


def cached_step() -> Callable[[torch.Tensor], torch.Tensor]:
    """A step with a cached function of its own."""

    @functools.lru_cache
    def constant(n: int) -> float:
        return float(n) / 2

    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x * constant(3) + constant(x.shape[0])

    return step


def test_a_cached_function_counts_where_it_runs() -> None:
    """Its first answers are computed once, in whichever way the step runs; later ones are looked up."""
    plain, captured = cached_step(), capture(cached_step())
    for size in (2, 2, 4, 2):
        expected, report = plain_counts(plain, torch.ones(size)), explain(captured)(torch.ones(size))
        assert reported_counts(report) == expected
    assert reported.REPORTED.tracer is None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_what_a_backward_runs_is_said() -> None:
    """Whether autograd comes to a function's backward is its own matter: here it needs no gradient of it."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((Doubled.apply(x) * w).sum(), [w])[0]

    x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    report, expected = explain(step)(x, w), plain_counts(step, x, w)
    by_name = {name: counts for (name, _), counts in reported_counts(report).items()}
    assert {name for _, name, _ in report.in_loops} == {"Doubled.backward"} and "run by backward()" in str(report)
    del by_name["Doubled.backward"]
    assert by_name == {name: n for (name, _), n in expected.items()}


@disable
def slow(n: int) -> int:
    return n + 1


def breaks_once_more(x: torch.Tensor, n: int) -> torch.Tensor:
    if n > 2:
        x = x * n
    slow(1)
    return helper(x)


def test_captures_that_share_what_goes_on_behind_a_break() -> None:
    """Two captures of a step go on, behind equal breaks, in one capture of the rest: its runs are told apart."""
    captured, x = capture(breaks_once_more, dynamic=False), torch.ones(3)
    for n in (1, 3, 4, 1, 3, 4, 5, 1, 5):
        report = explain(captured)(x, n)
        assert reported_counts(report) == plain_counts(breaks_once_more, x, n)


@capture
def nested(x: torch.Tensor, seen: list) -> torch.Tensor:
    y = helper(x)
    seen.append(opaque(len(seen)))
    return helper(y) - 1


@disable
def opaque(number: int) -> int:
    return number


@disable
def natively(x: torch.Tensor, seen: list) -> torch.Tensor:
    return nested(x, seen) + nested(x, seen)


def calls_it(x: torch.Tensor, seen: list) -> torch.Tensor:
    return nested(nested(x, seen) + 1, seen)


def calls_it_below_native(x: torch.Tensor, seen: list) -> torch.Tensor:
    return natively(helper(x), seen)


def calls_it_in_a_loop(x: torch.Tensor, seen: list) -> torch.Tensor:
    for _ in range(3):
        x = nested(x, seen) if opaque(1) else x
    return x


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("step", [calls_it, calls_it_below_native, calls_it_in_a_loop])
def test_what_is_captured_by_itself_counts_in_the_call_around_it(step: Callable[..., Any], warm: bool) -> None:
    captured, x = capture(step), torch.ones(3)
    reset()
    if warm:
        nested(x, [])
        captured(x, [])
    for _ in range(3):
        report = explain(captured)(x, [])
        assert reported_counts(report) == plain_counts(step, x, [])
        assert len(report.breaks) >= 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_a_backward_that_runs_once_counts_once(times: int, autocast: bool) -> None:
    """Capture interprets it for each autocast that it may run under, and again as it runs."""

    def step(w: torch.Tensor) -> torch.Tensor:
        y = w * 2
        for _ in range(times):
            with torch.autocast("cpu", enabled=autocast):
                y = Doubled.apply(y)
        y.sum().backward()
        return y.detach()

    report = explain(capture(step))(torch.ones(3, requires_grad=True))
    assert report.in_loops and not report.breaks
    assert reported_counts(report) == plain_counts(step, torch.ones(3, requires_grad=True))
