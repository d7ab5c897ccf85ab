"""Slots of experts that are counted while graphs run: those that the router chose, as often as forward ran."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moebius
from moebius.lowering.roofline import RECORDER
from moebius.lowering.roofline.slots import render

E, K, D, N = 6, 2, 8, 5


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(RECORDER, "on", True)
    monkeypatch.setattr(RECORDER, "graphs", {})
    return RECORDER


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up_EMD, self.down_EDN = (nn.Parameter(torch.randn(E, *s) / 3) for s in ((2 * N, D), (D, N)))

    def choose(self, x_TD):
        return torch.topk(torch.softmax(self.router(x_TD), -1), K)

    def forward(self, x_TD):
        weight_TK, index_TK = self.choose(x_TD)
        out_TD = torch.zeros_like(x_TD)
        for e in range(E):
            token, slot = torch.where(index_TK == e)
            gate, up = F.linear(x_TD[token], self.gate_up_EMD[e]).chunk(2, dim=-1)
            h = F.linear(F.silu(gate) * up, self.down_EDN[e])
            out_TD.index_add_(0, token, h * weight_TK[token, slot, None])
        return x_TD + out_TD


def plain(layers, batches):
    """[layers][E] that the routers choose, computed without capture."""
    found = torch.zeros(len(layers), E, dtype=torch.long)
    with torch.no_grad():
        for x_TD in batches:
            for i, layer in enumerate(layers):
                found[i] += layer.choose(x_TD).indices.flatten().bincount(minlength=E)
                x_TD = layer(x_TD)
    return found


def once(layers, x_TD):
    for layer in layers:
        x_TD = layer(x_TD)
    x_TD.square().mean().backward()


def twice(layers, x_TD):
    once(layers, x_TD[: len(x_TD) // 2])
    once(layers, x_TD[len(x_TD) // 2 :])


def again(layers, x_TD):
    for layer in layers:
        x_TD = checkpoint(layer, x_TD, use_reentrant=False)
    x_TD.square().mean().backward()


@pytest.mark.parametrize("step, runs", [(once, 1), (twice, 1), (again, 2)])
def test_slots_are_those_that_the_router_chose(recorder, step, runs):
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    batches = [torch.randn(tokens, D) for tokens in (8, 8, 12, 6, 20)]
    run = moebius.capture(step)
    for x_TD in batches:
        run(layers, x_TD)
    assert recorder.rows() == (runs * plain(layers, batches)).tolist()


def test_what_is_printed():
    text = render([[90, 2, 2, 2, 2, 2], [10, 10, 10, 10, 10, 10], [0] * 6])
    assert "layer 0" in text and f"{5.4:>6.2f}" in text and "by load, 1 more on each rank" in text
    assert "layer 0" not in render([])
