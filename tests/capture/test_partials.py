"""``capture(functools.partial(...))``: what it calls is captured, with the arguments that it holds."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from moebius import NotCapturableError, capture, explain, stats

X = torch.ones(2, 4)
LAYER = nn.Linear(4, 4)


def step(scale: float, x: torch.Tensor, *rest: Any, power: int = 1) -> torch.Tensor:
    return (LAYER(x) * scale).pow(power).sum() + len(rest)


class Scaled(nn.Module):
    def forward(self, scale: float, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return step(scale, x, power=power)

    def method(self, scale: float, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return step(scale, x, power=power) + 1


class Callable:
    def __call__(self, scale: float, x: torch.Tensor, power: int = 1) -> torch.Tensor:
        return step(scale, x, power=power)


OF = {"a function": step, "a method": Scaled().method, "a module": Scaled(), "an object": Callable()}


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("nested", [False, True])
def test_a_partial_is_captured(of: str, nested: bool) -> None:
    given = functools.partial(OF[of], 2.0)
    given = functools.partial(given, power=2) if nested else given
    captured = capture(given)
    assert all(torch.equal(captured(X), given(X)) for _ in range(3))
    assert torch.equal(captured(X, power=3), given(X, power=3))
    assert (stats(captured).hits, stats(captured).breaks) == (2, 0)
    report = explain(captured)(X)
    assert report.status == "hit" and torch.equal(report.result, given(X)) and "scale" not in report.verdict
    with pytest.raises(NotCapturableError, match="captured already"):
        capture(captured)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="functools.Placeholder is new in Python 3.14")
def test_a_place_that_the_call_fills() -> None:
    given = functools.partial(step, functools.Placeholder, X, 1, 2)  # type: ignore[attr-defined]
    captured = capture(given)
    assert torch.equal(captured(2.0), given(2.0)) and torch.equal(explain(captured)(2.0).result, given(2.0))


def test_a_partial_of_what_is_captured_is_that() -> None:
    again = functools.partial(capture(step), 3.0)
    assert torch.equal(again(X), step(3.0, X)) and stats(again).misses == 1
    assert explain(again)(X).status == "hit"
