"""Rows of unknown number that meet a known number of rows: as many, or one that is spread over these."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss, pairwise_distance

from moebius import capture, stats
from moebius.torch_facts.torch_pointwise import PointwiseOnRows

OPERATORS = {
    "add": lambda rows, y_KD: rows + y_KD,
    "the other way round": lambda rows, y_KD: y_KD - rows.relu(),
    "where": lambda rows, y_KD: torch.where(y_KD > 0, rows, y_KD),
    "three": lambda rows, y_KD: torch.addcmul(y_KD, rows, y_KD),
    "maximum": torch.maximum,
    "compared": lambda rows, y_KD: (rows < y_KD).float() * y_KD,
    "masked": lambda rows, y_KD: y_KD.masked_fill(rows[:, :1] > 0, 1.0),
    "clamp": lambda rows, y_KD: torch.clamp(y_KD, min=rows),
    "loss": lambda rows, y_KD: mse_loss(rows, y_KD, reduction="none"),
    "distance": lambda rows, y_KD: pairwise_distance(rows, y_KD)[:, None] * y_KD,
    "with an axis in front": lambda rows, y_KD: (rows + y_KD[:, None])[:, 0],
    "twice": lambda rows, y_KD: (rows + y_KD) * rows + y_KD,
}
# What is asked of the number of rows behind the operator.
ASKED = {
    "number": lambda out, rows, index: out.sum() * 0 + index.numel(),
    "size of the result": lambda out, rows, index: out.sum() + out.shape[0],
    "size of the rows": lambda out, rows, index: out.sum() + rows.shape[0] * 2,
    "as a size": lambda out, rows, index: out.sum() + torch.ones(index.numel()).sum(),
    "mean": lambda out, rows, index: out.sum() / len(index),
    "decides": lambda out, rows, index: out.sum() * (2.0 if len(index) == 3 else 1.0),
}
CHOSEN = ([0, 1, 2], [3], [0, 2, 5], [6], [0, 1])  # of seven rows, in five calls


def outcome(step, chosen, x_TD, y_KD):
    mask_T = torch.zeros(7, dtype=torch.long)
    mask_T[chosen] = 1
    x_TD.grad = y_KD.grad = None
    try:
        result = step(mask_T, x_TD, y_KD)
    except RuntimeError:
        return "an error"
    return [result.item(), *(None if one.grad is None else one.grad.tolist() for one in (x_TD, y_KD))]


def differing(operator, asked, trains: bool) -> list[int]:
    """The calls that differ from plain Python."""

    def step(mask_T, x_TD, y_KD):
        index_t = torch.where(mask_T == 1)[0]
        rows_tD = x_TD[index_t]
        out = asked(operator(rows_tD, y_KD), rows_tD, index_t)
        if trains:
            out.backward()
        return out.detach()

    torch.manual_seed(0)
    captured = capture(step, backend="eager")
    x_TD, y_KD = (torch.randn(size, 4, requires_grad=trains) for size in (7, 3))
    calls = [[outcome(each, chosen, x_TD, y_KD) for each in (captured, step)] for chosen in CHOSEN]
    assert stats(captured).graphs
    return [number for number, (ours, plain) in enumerate(calls) if ours != plain]


@pytest.mark.share(30)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_as_in_python(operator, asked, trains):
    assert differing(OPERATORS[operator], ASKED[asked], trains) == []


def test_where_they_are_taken_to_be_as_many(monkeypatch):
    monkeypatch.setattr(PointwiseOnRows, "spread", lambda self, args: args)
    assert differing(OPERATORS["add"], ASKED["number"], False) == [1, 3]
