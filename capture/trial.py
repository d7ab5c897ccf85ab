"""Three training steps of a small MoE layer, captured, beside plain Python: for the doctor."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from .api import capture, explain, stats
from .selftest import CLOSE, apart, steps


@dataclass
class Outcome:
    """What became of three MoE training steps on one device."""

    graphs: int
    breaks: list[str]
    hits: int  # of the two calls after the first
    lowered: int
    regions: int
    refusals: list[str]
    kernels: list[str] = field(default_factory=list)
    losses: float = 0.0  # how far from plain Python: losses, gradients, parameters
    gradients: float = 0.0
    parameters: float = 0.0

    @property
    def equal(self) -> bool:
        return max(self.losses, self.gradients, self.parameters) <= CLOSE


def try_moe_step(device: str = "cpu") -> Outcome:
    """Three training steps of a small MoE layer, captured, beside the same in plain Python."""
    made = steps()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = made["Layer"]().to(device)
        of_its: dict[str, Any] = {"dtype": next(plain.parameters()).dtype, "device": "cpu"}
        x, y = (torch.randn(32, 16, **of_its).to(device) for _ in range(2))
    model = copy.deepcopy(plain)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain))
    step = capture(made["moe_step"])
    report = explain(step)(model, ours, x, y)
    losses = [apart(report.result, made["moe_step"](plain, theirs, x, y))]
    losses += [apart(step(model, ours, x, y), made["moe_step"](plain, theirs, x, y)) for _ in range(2)]
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    regions = report.expert_regions
    return Outcome(
        graphs=len(report.graphs),
        breaks=[f"{each.reason}: {each.detail}" for each in report.breaks],
        hits=stats(step).hits,
        lowered=sum(each.lowered for each in regions),
        regions=len(regions),
        refusals=[str(each.refusal) for each in regions if not each.lowered],
        kernels=[str(each.kernel) for each in regions if each.lowered],
        losses=max(losses),
        gradients=max(apart(a.grad, b.grad) for a, b in pairs),
        parameters=max(apart(a, b) for a, b in pairs),
    )
