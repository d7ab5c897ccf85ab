"""Of a loop over experts that stays one, the report names the user's line that is in the way, in the field's words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, explain
from moebius.lowering.experts import facts
from moebius.report.text import render

LINES = {  # what stands in the loop -> the line that is named, and what is said of it
    "y = expert(rows - rows.mean(0))": "the rows of one expert",
    "y = expert(rows); state = state + y.sum(0); y = y + state": "what the one before it has computed",
    "y = expert(rows) if len(token) else 1 / 0": "",
    "y = expert(rows); y = y - y.max()": "the rows of one expert",
    "y = expert(rows).cumsum(0)": "the rows of one expert",
}
SCRIPT = """\
import torch

def step(x, router, experts):
    weight, chosen = router(x).softmax(-1).topk(2)
    out, state = torch.zeros_like(x), x.new_zeros(x.shape[-1])
    for i, expert in enumerate(experts):
        token, slot = torch.where(chosen == i)
        rows = x[token]
        {written}
        out.index_add_(0, token, y * weight[token, slot, None])
    return out
"""
PRIVATE = re.compile(r"\b(" + "|".join(name for name, kind in vars(facts).items() if isinstance(kind, type)) + r")\b")


@pytest.mark.parametrize("written", LINES)
def test_a_refusal_names_the_line(written: str, tmp_path: Any) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(written=written))
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    report = explain(capture(namespace["step"]))(torch.randn(12, 8), nn.Linear(8, 4), experts)
    refused = [region for region in report.expert_regions if not region.lowered]
    if not refused:  # (one operator is as well: there is nothing to say)
        assert report.lowered or report.breaks
        return
    for region in refused:
        assert region.refusal and LINES[written] in region.refusal, region.refusal
        assert not PRIVATE.search(region.refusal.replace("Tensor.", "")), region.refusal
        assert region.blocker is not None and tuple(region.blocker)[:2] == (str(path), 9), region
    assert str(path) not in render(report, 200) or len(str(path)) < 20


def count(x: torch.Tensor, router: nn.Module, experts: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    weight, chosen = router(x).softmax(-1).topk(2)
    out, load = torch.zeros_like(x), x.new_zeros(len(experts))
    for i, expert in enumerate(experts):
        token, slot = torch.where(chosen == i)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    with torch.no_grad():
        for i in range(len(experts)):
            load[i] = (chosen == i).float().mean()
    return out, load


def test_a_loop_that_only_counts_is_no_expert_loop() -> None:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8)) for _ in range(4))
    report = explain(capture(count))(torch.randn(12, 8), nn.Linear(8, 4), experts)
    assert report.lowered == len(report.expert_regions) == 1
