"""Such experts (row_experts.py) under autocast: each projection in the dtype that it has in the loop."""

from __future__ import annotations

import pytest
import torch
from row_experts import (
    Experts,
    apart,
    deep,
    dropping_three_times,
    in_one_tensor,
    low_rank,
    normed_before,
    over_hits,
    own_scales,
    shared_norm,
    transposed,
)
from spellings import D
from torch.nn.functional import layer_norm, linear, relu

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import by_row
from moebius.lowering.experts.rows_written import KERNEL


def under_autocast(expert, loop):
    """(the largest relative difference from plain PyTorch in results and gradients, the regions), weights in fp32."""
    moebius.reset()
    torch.manual_seed(0)
    layers = [Experts(), Experts()]
    layers[1].load_state_dict(layers[0].state_dict())

    def step(x, moe):
        with torch.autocast("cpu", torch.bfloat16):
            return loop(expert)(x, moe)

    captured, worst = capture(step), 0.0
    for seed in range(2):
        found = []
        for run, moe in zip((captured, step), layers, strict=True):
            moe.zero_grad()
            x = torch.randn(10, D, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            torch.manual_seed(seed)
            out = run(x, moe)
            out.square().sum().backward()
            found.append([out, x.grad, *(p.grad for p in moe.parameters())])
        for ours, plain in zip(*found, strict=True):
            assert (ours is None) == (plain is None)
            if plain is not None:
                assert ours.dtype == plain.dtype
                worst = max(worst, ((ours - plain).norm() / plain.norm().clamp_min(1e-6)).item())
    return worst, report_of(captured_of(captured)).expert_regions


@pytest.mark.parametrize(("expert", "loop"), [
    (transposed, apart), (deep, apart), (normed_before, over_hits), (shared_norm, apart),
    (dropping_three_times, apart), (own_scales, in_one_tensor), (low_rank, apart)])  # fmt: skip
def test_under_autocast(expert, loop):
    worst, regions = under_autocast(expert, loop)
    assert worst < 1e-6, worst
    assert regions and all(region.lowered and region.kernel == KERNEL for region in regions), regions


def partly_out_of_autocast(h, p, w, moe):
    h = linear(layer_norm(h, (D,)), p["square"])
    with torch.autocast("cpu", enabled=False):
        h = linear(h.float(), p["up"])
    return linear(relu(h), p["down"]).float() * w


def test_autocast_that_changes_in_a_iteration():
    worst, regions = under_autocast(partly_out_of_autocast, in_one_tensor)
    assert worst < 1e-6, worst


def test_autocast_is_asked_for(monkeypatch):
    monkeypatch.setattr(by_row, "autocast_at", lambda loop: ())
    _, regions = under_autocast(normed_before, over_hits)
    assert not regions[0].lowered and "one dtype" in regions[0].refusal
