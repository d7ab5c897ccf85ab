"""An error of ours in a pass costs the lowering and nothing else: the graph runs as it was captured, and is hit."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moebius import capture, explain, stats
from moebius.lowering import entry
from moebius.lowering.contract import Contract, Work
from moebius.lowering.pipeline import PASSES

E, D, N, K = 4, 8, 12, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(E, 2 * N, D)), nn.Parameter(torch.randn(E, D, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in F.one_hot(index, E).sum((0, 1)).nonzero()[:, 0]:
            token, slot = torch.where(index == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weight[token, slot, None])
        return x + out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(D, D), nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        for layer in self.layers:
            x = layer(x)
        with torch.inference_mode():
            scale = torch.ones(()) * 2
        return x * scale.clone()


def fail(*_: Any) -> None:
    raise KeyError("planted")


def plant(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, when = place.partition(", ")
    if name in ("lower_layers", "ready"):
        monkeypatch.setattr(entry, name, fail)
        return
    monkeypatch.setattr(entry, "lower_layers", lambda graph, options: None)
    apply = Contract.apply

    def failing(self: Contract, work: Work) -> None:
        if when == "after" or self.name != name:
            apply(self, work)
        if self.name == name:
            fail()

    monkeypatch.setattr(Contract, "apply", failing)


PLACES = ["lower_layers", "ready", *(f"{one.name}, {when}" for one in PASSES for when in ("before", "after"))]


@pytest.mark.faults
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_leaves_the_captured_graph(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(place, monkeypatch)
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)

    def training(model: nn.Module) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            model.zero_grad()
            loss.backward()
            return loss.detach()

        return step

    step, ours = training(plain), capture(training(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed, n in enumerate((16, 16, 5, 16)):
            x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(step(x), ours(x))
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    said = [str(w.message) for w in caught if "moebius" in str(w.message)]
    assert len(said) == stats(ours).graphs == 2 and stats(ours).hits == 2, said
    for one in said:
        assert "as it was captured: KeyError: 'planted'" in one, one
        Path(re.search(r"with (\S+\.txt)$", one).group(1)).unlink()
    report = explain(ours)(x)
    assert str(report).count("lowering failed, KeyError: 'planted'") == len(report.graphs)
    assert report.expert_regions and all("defect" in region.refusal for region in report.expert_regions)


def test_no_fault_is_said_where_there_is_none() -> None:
    report = explain(capture(Model()))(torch.randn(6, D))
    assert "lowering failed" not in str(report) and all(graph.fault is None for graph in report.graphs)
