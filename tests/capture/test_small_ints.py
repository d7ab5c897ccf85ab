"""Ints that are 0 or 1 in some calls: of a sampled batch, a count, an axis. torch takes sizes of 0 and 1 for constants;
what is a number of the graph is one for these too.

What is done with the number × the values that it takes, then batches of a replay buffer.
"""

from __future__ import annotations

import collections
import itertools
import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from moebius import capture, stats

USES = (
    "x.new_zeros(n).sum() + x.sum()", "x[:n].sum()", "x[n]", "x.sum() if n == 0 else x.sum() * 2",
    "sum(x[i] for i in range(n))", "torch.arange(n).sum() + x.sum()", "x.narrow(0, n, 1).sum()",
    "[x, x * 2, x * 3][n].sum()",
    "x.repeat(n).sum()", "x.view(n + 1, -1).sum() if 4 % (n + 1) == 0 else x.sum()", "torch.roll(x, n).sum()",
    "x.sum(0) if n else x * 2", "x.reshape(2, 2).sum(n % 2)", "F.one_hot(torch.tensor([0]), n + 1).sum() + x.sum()",
    "x.unsqueeze(n % 2).sum()", "torch.zeros(2, n).shape[1] + x.sum()", "torch.full((n,), 2.0).sum() + x.sum()",
    "x.split(n + 1)[0].sum()", "x * n", "x.sum() ** n", "table[n] * x", "x * (n is True)", "x * int(str(n))",
)  # fmt: skip
VALUES = ([0, 1, 2, 3, 0, 1, 2], [1, 0, 1, 0, 3, 2, 0, 1], [2, 1, 0, 1, 2, 0], [1, True, 0, False, 1])
FIXED = ("table[n]", "str(n)", "n is", "[x, x", "range(n)")  # what Python itself asks of each value


def outcome(step: Any, *args: Any) -> Any:
    try:
        return step(*args).tolist()
    except Exception as error:
        return type(error).__name__


@pytest.mark.share(21)
@pytest.mark.parametrize(("use", "values"), [*itertools.product(USES, VALUES)])
def test_a_number_that_is_zero_or_one(use: str, values: list[int]) -> None:
    namespace: dict[str, Any] = {"torch": torch, "F": functional, "table": {i: i * 2 for i in range(9)}}
    exec(f"def step(x, n):\n    return {use}", namespace)
    captured = capture(namespace["step"], backend="eager")
    for n in values:
        assert outcome(captured, torch.arange(4.0), n) == outcome(namespace["step"], torch.arange(4.0), n)
    if not any(word in use for word in FIXED):
        assert stats(captured).misses <= 4


def columns(rows: list[tuple]) -> torch.Tensor:
    action, reward, done = zip(*rows, strict=True)
    return torch.LongTensor(action).sum() + torch.FloatTensor(reward).sum() * torch.tensor(done).sum()


def each_row(rows: list[tuple]) -> torch.Tensor:
    return torch.stack([torch.tensor(reward) * action - done for action, reward, done in rows]).sum()


def one_column(rows: list[tuple]) -> torch.Tensor:
    return torch.tensor([row[0] for row in rows]).sum() * rows[0][1]


@pytest.mark.parametrize("use", [columns, each_row, one_column])
def test_batches_of_a_replay_buffer(use: Any) -> None:
    """All numbers of a row vary, most of them small: few captures, however large the batch is."""
    random.seed(0)
    buffer = collections.deque((random.randrange(4), random.random(), random.randrange(2)) for _ in range(200))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * use(random.sample(buffer, 16))

    captured = capture(step, backend="eager")
    for seed in range(12):
        random.seed(seed)
        expected = step(torch.ones(2))
        random.seed(seed)
        assert torch.equal(captured(torch.ones(2)), expected)
    assert stats(captured).misses <= 12 and stats(captured).graphs <= 6
