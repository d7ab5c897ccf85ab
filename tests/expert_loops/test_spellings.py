"""Every spelling of an expert layer gives eager's output and gradients in float64, and becomes what it is said to."""

from __future__ import annotations

import pytest
import torch
from spellings import BROKEN, CAPTURED, LOWERED, SPELLINGS, D, E, N, T

from moebius import capture
from moebius.api import captured_of, report_of


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (E, D), (E, 2 * N, D), (E, D, N))
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def compare(function, captured, seed):
    mine, plain = inputs(seed), inputs(seed)
    found, expected = captured(*mine), function(*plain)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for result in (found, expected):
        result.square().sum().backward()
    for a, b in zip(mine, plain, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def outcome(captured):
    report = report_of(captured_of(captured))
    if report.breaks:
        return BROKEN
    assert len(report.graphs) == 1
    regions = report.expert_regions
    return LOWERED if regions and all(region.lowered for region in regions) else CAPTURED


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name):
    spelling = SPELLINGS[name]
    captured = capture(spelling.function)
    for seed in range(4):
        compare(spelling.function, captured, seed)
    assert outcome(captured) == spelling.outcome, report_of(captured_of(captured)).expert_regions


@pytest.mark.parametrize("name", [n for n, s in SPELLINGS.items() if s.outcome != BROKEN])
def test_spelling_as_it_is_written(name):
    """Without lowering the same bits come out."""
    captured = capture(SPELLINGS[name].function, backend="eager")
    for seed in range(2):
        mine, plain = inputs(seed), inputs(seed)
        assert torch.equal(captured(*mine), SPELLINGS[name].function(*plain))
