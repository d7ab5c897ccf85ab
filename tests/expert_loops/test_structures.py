"""Layers of public structure with modules of their own (structures.py): equal to eager, and what becomes of each."""

from __future__ import annotations

import pytest
import structures_by_statement  # noqa: F401 (adds to STRUCTURES)
import structures_in_other_words  # noqa: F401
import structures_of_libraries  # noqa: F401
import structures_of_papers  # noqa: F401
import structures_otherwise  # noqa: F401
import torch
from spellings import BROKEN, CAPTURED, LOWERED, PROJECTED
from structures import STRUCTURES
from table import SEEDS, tensors

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts.rows_written import KERNEL


def outcome(call, layer, seed):
    layer.zero_grad()
    x = tensors(seed)[0]
    torch.manual_seed(seed)
    out = call(x)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@pytest.mark.share(8)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structure(name):
    moebius.reset()
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(STRUCTURES[name].layer().double())
        for parameter in layers[-1].parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    captured, becomes = capture(layers[0]), set()
    for seed in SEEDS:
        ours, plain = outcome(captured, layers[0], seed), outcome(layers[1], layers[1], seed)
        for a, b in zip(ours, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        becomes.add(said_of(captured))
    assert becomes == {STRUCTURES[name].outcome}


def said_of(captured):
    report = report_of(captured_of(captured))
    if report.breaks:
        return BROKEN
    regions = report.expert_regions
    if not regions or not all(region.lowered for region in regions):
        assert all(".py:" in region.refusal for region in regions if not region.lowered)
        return CAPTURED
    return PROJECTED if any(region.kernel == KERNEL for region in regions) else LOWERED
