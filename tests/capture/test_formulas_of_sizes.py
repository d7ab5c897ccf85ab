"""Sizes computed of sizes, twice, as capacities of experts are: known by today's number wherever one is asked."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from moebius import capture, stats

FORMULAS = {
    "capacity": lambda n: max(4, min(n, int(n * 1.25 / 2))),
    "share": lambda n: min(n, int(n / 3) + 1),
    "ceil": lambda n: math.ceil(n / 3),
    "round": lambda n: round(n * 0.7),
    "whole": lambda n: n // 2 * 3,
    "root": lambda n: int(n**0.5) + 1,
    "factor": lambda n: max(1, int(n * 0.3)),
}
USES = {
    "compared": lambda x, n: x * (x.cumsum(0) < float(n)),
    "made": lambda x, n: torch.zeros(2, n).sum() + x,
    "counted": lambda x, n: torch.arange(n).float().mean() + x,
    "cut": lambda x, n: x[: n + 1],
    "scaled": lambda x, n: x * n / float(n + 1),
    "filled": lambda x, n: x.masked_fill(x > 1.0 / n, float(n)),
}


def empty(x, n):
    """The size as a tensor has it."""
    return torch.empty(3, n).shape[1]


def cut_from_data(x, n):
    """The same, of what values decided the size of: torch notes no number of today (``safe_one_hot`` of layers)."""
    places = (x * 3).long()
    return F.one_hot(places, max(int(places.max()) + 1, n))[..., :n].shape[-1]


@pytest.mark.share(30)
@pytest.mark.parametrize("shape", [empty, cut_from_data])
@pytest.mark.parametrize("first, second, use", [*itertools.product(FORMULAS, FORMULAS, USES)])
def test_as_in_python(shape, first, second, use):
    def step(x):
        return USES[use](x, FORMULAS[second](shape(x, FORMULAS[first](x.shape[0]))))

    captured = capture(step, backend="eager")
    for n in (16, 16, 17, 21, 30, 45, 64, 18):
        x = torch.rand(n)
        assert torch.equal(captured(x), step(x))
    if shape is empty or "round" not in (first, second):  # (a break: round() asks for more than today's number)
        assert stats(captured).breaks == 0
