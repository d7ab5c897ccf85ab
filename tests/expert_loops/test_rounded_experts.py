"""Experts whose weights or tokens go through another precision in the turn, fp8 above all, and come back."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from spellings import E
from test_by_row import Experts
from torch.nn.functional import linear, silu

from moebius.lowering.experts import rules_rows


def through(x, dtype=torch.float8_e4m3fn):
    return x.to(dtype).to(x.dtype)


def loop(expert, hits=False, whole=True):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in index.unique() if hits else range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token], moe.of(e, whole)) * weight[token, slot, None])
        return out

    return layer


def weights(h, p):
    return linear(silu(linear(h, through(p["up"]))), through(p["down"]))


def tokens_too(h, p):
    return linear(silu(linear(through(h), through(p["up"]))), through(p["down"]))


def between(h, p):
    return linear(through(silu(linear(through(h), through(p["up"]), p["b_up"]))), through(p["down"]), p["b_down"])


def vectors(h, p):
    return linear(silu(linear(h, through(p["up"]), through(p["b_up"], torch.bfloat16))), through(p["down"]))


def turned(h, p):
    return (h @ through(p["square"].T, torch.float8_e5m2)).tanh() @ through(p["square"]).T


RIGHT = [weights, tokens_too, between, vectors, turned]


@pytest.mark.parametrize("expert", RIGHT)
@pytest.mark.parametrize(("hits", "whole"), [(False, True), (True, True), (False, False)])
def test_through_another_precision(expert, hits, whole):
    _, regions = regions_of(loop(expert, hits, whole), layer=Experts)
    assert regions and all(region.lowered for region in regions), regions


def scaled(h, p):
    """By the largest of its own weights: no element's own business."""
    largest = p["up"].abs().amax() / 448
    return linear(silu(linear(h, through(p["up"] / largest) * largest)), p["down"])


@pytest.mark.parametrize("whole", [True, False])
def test_scaled_by_its_own_weights(whole):
    regions_of(loop(scaled, whole=whole), layer=Experts)


@pytest.mark.parametrize("expert", [weights, vectors, turned])
def test_rounding_is_no_rounding_back(monkeypatch, expert):
    monkeypatch.setattr(rules_rows, "holds", lambda *_: True)
    with pytest.raises(AssertionError):
        regions_of(loop(expert), layer=Experts)
