"""A report of all calls so far: what it says of one call is of the captures that a call runs, and it outlives them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import moebius
from moebius import api, capture, disable, explain
from moebius.api import Reporter, captured_of, report_of
from moebius.report import Report
from moebius.report.groups import guard_groups
from moebius.report.page import tiles

X = torch.ones(4, 3)


@disable
def native(x: torch.Tensor) -> torch.Tensor:
    return x


def step(x: torch.Tensor, mode: str) -> torch.Tensor:
    y = native(x + len(mode))
    for _ in range(2):
        y = native(y) * len(mode)
    return y


def all_calls(count: int) -> Report:
    captured = capture(step)
    for mode in ("", "a", "ab")[:count]:
        for _ in range(3):
            captured(X, mode)
    return report_of(captured_of(captured))


def test_what_is_said_of_a_call_is_not_summed_over_captures() -> None:
    one, three = all_calls(1), all_calls(3)
    assert len(three.guards) > 2 * len(one.guards) and len(three.breaks) > len(one.breaks)
    assert len(three.of_a_call(three.guards)) == len(one.guards) == len(one.of_a_call(one.guards))
    assert [sum(item.cost_us is not None for item in report.breaks) for report in (one, three)] == [3, 3]
    of_groups = sum(group.cost_ns or 0.0 for group in guard_groups(three))
    of_a_call = sum(guard.cost_ns or 0.0 for guard in three.of_a_call(three.guards))
    assert of_groups == pytest.approx(of_a_call)
    assert of_a_call < sum(guard.cost_ns or 0.0 for guard in three.guards) or not of_a_call


def test_what_experts_keep_is_that_of_a_call() -> None:
    def experts(x: torch.Tensor, weights: torch.Tensor, mode: str) -> torch.Tensor:
        out, chosen = torch.zeros_like(x), x.argmax(-1)
        for expert in range(3):
            token = torch.where(chosen == expert)[0]
            out.index_add_(0, token, (x[token] @ weights[expert]).relu() @ weights[expert].T * len(mode))
        return out

    captured, weights = capture(experts), torch.randn(3, 3, 3, requires_grad=True)
    said = []
    for mode in ("a", "ab"):
        captured(X, weights, mode)
        report = report_of(captured_of(captured))
        for region in report.expert_regions:
            region.saved_bytes = 1024
        said.append(tiles(report).count("1.0 KiB"))
    assert len(report.expert_regions) == 2 and said == [1, 1]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As ``moebius explain SCRIPT`` does."""
    monkeypatch.setattr(api, "BEFORE_IT_GOES", api.BEFORE_IT_GOES)
    had = list(api.BEFORE_IT_GOES)
    api.watch_captures()
    yield
    api.BEFORE_IT_GOES[:] = had


def test_a_report_outlives_a_reset(watched: None) -> None:
    captured = capture(step)
    captured(X, "a")
    moebius.reset()
    report = Reporter(captured_of(captured)).report()
    assert report.graphs and report.breaks and "nothing was called" not in report.verdict


def test_a_scripted_module_is_captured() -> None:
    module = torch.nn.Linear(3, 2)
    assert torch.equal(explain(capture(torch.jit.script(module)))(X).result, module(X))
