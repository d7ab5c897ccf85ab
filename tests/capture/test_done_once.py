"""What a first call does once, or not at all: traces and continuations are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.codegen import continuation_code
from moebius.trace import trace


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """How often a trace ran, and how often a continuation was assembled."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(trace.Trace, "run")
    count(continuation_code, "build_continuation")
    return found


class Tried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, rows):
        try:
            return self.linear(x[rows])
        except RuntimeError:
            return None


def test_operators_that_may_fail_in_a_try_block_below(counted):
    model, x = Tried(), torch.randn(5, 4)
    step = capture(lambda x, rows: model(x, rows), backend="eager")
    assert torch.equal(step(x, torch.tensor([1, 2])), model(x, torch.tensor([1, 2])))
    assert counted["run"] == 1


@pytest.mark.parametrize("branches", [1, 4, 16])
def test_side_exits_are_assembled_as_they_are_taken(counted, branches):
    def inner(x, log):
        if x.sum() > 0:
            log.append(len(log))
            x = x + 1
        return x

    def plain(x, log):
        for _ in range(branches):
            x = inner(x, log)
        return x

    step = capture(plain, backend="eager")
    for x, assembled in ((torch.ones(4), False), (-torch.ones(4), True)):
        logs: tuple[list, list] = [], []
        assert torch.equal(step(x, logs[0]), plain(x, logs[1])) and logs[0] == logs[1]
        assert bool(counted["build_continuation"]) is assembled
    assert stats(step).hits == 1 and counted["build_continuation"] <= 2 * 2
