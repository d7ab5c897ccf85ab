"""``random.random()`` and what is made from it: drawn in the graph, where the program draws it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import broken, same

from moebius import capture, explain, stats
from moebius.python.calls import Calls


def scaled(x: torch.Tensor) -> Any:
    return x * random.random(), random.uniform(-1, 1)


def rows(x: torch.Tensor) -> Any:
    return torch.cat([row * random.uniform(1, 2) for row in x.split(2)])


def dropped_layers(x: torch.Tensor) -> Any:
    for depth in range(3):
        if random.random() < 0.3:
            continue
        x = x * 2 + depth
    return x, random.random()


def after_a_break(x: torch.Tensor) -> Any:
    y = x * random.random()
    return broken(y) + random.random()


def seeded(x: torch.Tensor) -> Any:
    random.seed(4)
    return x * random.random()


def other_generator(x: torch.Tensor) -> Any:
    return x * OWN.random() + random.random()


def failing(x: torch.Tensor) -> Any:
    first = random.random()
    try:
        x[torch.tensor([9])]
    except IndexError:
        return first, random.random()


def checkpointed(x: torch.Tensor) -> Any:
    y = torch.utils.checkpoint.checkpoint(lambda t: (t * random.random()).exp(), x.clone(), use_reentrant=False)
    return y, random.random()


OWN = random.Random(0)


def run(step: Callable[..., Any]) -> Any:
    random.seed(0)
    OWN.seed(0)
    results = [step(torch.arange(8.0).view(4, 2)) for _ in range(8)]
    return results, random.getstate()[1], OWN.getstate()[1]


@pytest.mark.parametrize(
    "step", [scaled, rows, dropped_layers, after_a_break, seeded, other_generator, failing, checkpointed]
)
def test_as_plain_python_draws(step: Callable[..., Any]) -> None:
    assert same(run(capture(step, backend="eager")), run(step))


@pytest.mark.parametrize("step", [scaled, rows])
def test_one_graph(step: Callable[..., Any]) -> None:
    captured = capture(step, fullgraph=True)
    run(captured)
    assert stats(captured).graphs == 1 and not stats(captured).recompiles


def test_noticed_when_drawn_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calls, "read_number", lambda self, name, function: function())
    assert not same(run(capture(scaled, backend="eager")), run(scaled))


def test_the_report_has_the_graph_that_a_branch_left() -> None:
    """The draw decides against what was captured, in the first call."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if random.random() < 2:
            x = x + 1
        return x

    report = explain(step)(torch.ones(2))
    assert report.result.tolist() == [3.0, 3.0]
    assert len(report.graphs) == 1 and report.coverage["captured"]
