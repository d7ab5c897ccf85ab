"""A report about a small real file: a traced graph, a break, expert regions, guards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moebius.lowering.graph import CapturedGraph, ExpertRegion
from moebius.report import GraphBreak, Guard, Recompile, Report

SOURCE = '''\
"""A step with "quotes" & <tags>."""
import torch


def experts(x, w):
    out = torch.zeros_like(x)
    for e in range(4):
        out = out + x @ w  # one iteration
    return out


def step(x, w):
    h = experts(x, w)
    loss = h.sum()
    if loss > 0:
        print("a < b")
    return loss
'''


def traced(file: str) -> CapturedGraph:
    """x @ w and a sum, its nodes placed at lines 8 and 14 of ``file``."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum()

    gm = torch.fx.symbolic_trace(run)
    places = {"matmul": (file, 8, "experts"), "sum_1": (file, 14, "step")}
    for node in gm.graph.nodes:
        if node.name in places:
            node.meta["where"] = places[node.name]
            node.meta["stack"] = ((file, 13, "step"), places[node.name])
    return CapturedGraph(gm, file, 12, cold_seconds=0.0123, name="step_0")


@pytest.fixture
def source_file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def report(source_file: str) -> Report:
    return Report(
        result=torch.ones(()),
        graphs=[traced(source_file)],
        breaks=[
            GraphBreak(
                reason="data-dependent branch",
                detail="the branch needs the value of loss > 0",
                hint="use torch.where, or keep the branch out of the step",
                file=source_file,
                line=15,
                function="step",
                instruction="POP_JUMP_FORWARD_IF_FALSE",
                stack=((source_file, 15, "step"),),
                cost_us=12.5,
            )
        ],
        guards=[
            Guard("L['x']", "torch.float32 of shape [s0, 8]", source_file, 8, cost_ns=21.0),
            Guard("L['w']", "torch.float32 of shape [8, 8]", source_file, 8, cost_ns=19.0),
            Guard("G['torch'].zeros_like", "the same function", source_file, 6),
        ],
        expert_regions=[
            ExpertRegion(source_file, 7, "range(num_experts)", 4, 2, lowered=True, kernel="cpu", saved_bytes=2_637_888),
            ExpertRegion(
                source_file,
                13,
                "for row in nonzero()",
                4,
                2,
                refusal="carried value is read before it is written, line 13",
            ),
        ],
        coverage={"captured": 90, "opaque": 4, "native": 6},
        name="step",
        file=source_file,
        line=12,
        lines={source_file: {6: "captured", 16: "native"}},
        recompiles=[Recompile("L['x'] shape", "[4, 8]", "[6, 8]", source_file, 8)],
    )
