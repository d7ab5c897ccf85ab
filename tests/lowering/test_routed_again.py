"""Checkpointed layers whose router's bias changes before backward computes them again: an expert may have other rows
then. torch says so of the loops (`CheckpointError`), or of numbers alone computes with the new ones; so does the graph.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from moe_models import EXPERTS, LOOPS, D, E
from torch import nn
from torch.utils.checkpoint import checkpoint

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import by_row, proof

SEEDS = range(3)


class Layer(nn.Module):
    """when: the bias is written behind the routing, behind the experts, by the step, or never."""

    def __init__(self, experts: str, loop: str, when: str) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E, bias=False), EXPERTS[experts](E)
        self.loop, self.when = LOOPS[loop], when
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        index = (scores + self.bias).topk(2, -1).indices
        if self.when == "routing":
            self.rebalance(index)
        out = self.loop(self.experts, x, index, scores.gather(-1, index))
        if self.when == "experts":
            self.rebalance(index)
        return out

    @torch.no_grad()
    def rebalance(self, index: torch.Tensor) -> None:
        counts = torch.bincount(index.flatten(), minlength=E).double()
        self.bias.add_((counts.mean() - counts).sign(), alpha=0.3)


def step(model: Layer, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    out = checkpoint(model, x, use_reentrant=reentrant)
    loss = out.square().mean()
    if model.when == "step":
        with torch.no_grad():
            model.bias[0] += 0.5
    loss.backward()
    return loss.detach()


def outcome(function: Any, model: Layer, x: torch.Tensor, reentrant: bool) -> list[Any]:
    try:
        found = [function(model, x, reentrant)]
    except torch.utils.checkpoint.CheckpointError as error:
        return [str(error).partition("\n")[0]]
    return [*found, model.bias, *(p.grad for p in (x, *model.parameters()))]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (torch.allclose(a, b) if isinstance(a, torch.Tensor) else a == b)


def differs(experts: str, loop: str, when: str, reentrant: bool) -> list[int]:
    """The seeds with another outcome than plain Python's."""
    wrong = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = Layer(experts, loop, when).double()
        x = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
        plain = outcome(step, copy.deepcopy(model), x, reentrant)
        x.grad = None
        captured = outcome(capture(step), model, x, reentrant)
        if len(plain) != len(captured) or not all(map(same, plain, captured)):
            wrong.append(seed)
    return wrong


@pytest.mark.share(3)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("when", ["routing", "experts", "step", "never"])
@pytest.mark.parametrize("experts,loop", [*(("Stacked", loop) for loop in LOOPS), ("Modules", "all_of_them"),
                                          ("Adapted", "hits")])
def test_the_bias_of_a_checkpointed_router(experts: str, loop: str, when: str, reentrant: bool) -> None:
    assert not differs(experts, loop, when, reentrant)


@pytest.mark.parametrize("experts", ["Stacked", "Adapted"])  # of the operator, and projections of sorted rows
def test_the_step_is_needed(experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (proof, by_row):
        monkeypatch.setattr(module, "STEPS", tuple(s for s in module.STEPS if s.name != "routed again"))
    assert differs(experts, "hits", "experts", False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_routes_alike_is_one_operator(reentrant: bool) -> None:
    """A reentrant call compares nothing: it goes by what it computes again."""
    torch.manual_seed(0)
    model = Layer("Stacked", "hits", "experts" if reentrant else "never").double()
    captured = capture(step)
    captured(model, torch.randn(7, D, dtype=torch.float64, requires_grad=True), reentrant)
    assert [region.lowered for region in report_of(captured_of(captured)).expert_regions] == [True]
