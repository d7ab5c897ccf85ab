"""An expert region's report: the steps of its proof with the user's lines, and what the loop and the operator keep."""

from __future__ import annotations

import json
import linecache
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, explain
from moebius.lowering.experts import proof
from moebius.report.page import page
from moebius.report.text import render

T, D, N, E, K = 24, 8, 6, 4, 2


def hit(x, router, gate_up, down, bias):
    weight, chosen = (x @ router.T).softmax(-1).topk(K)
    mask = F.one_hot(chosen, E).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in mask.sum((1, 2)).nonzero()[:, 0]:
        slot, token = torch.where(mask[expert])
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        out.index_add_(0, token, (F.silu(gate) * up) @ down[expert].T * weight[token, slot, None])
    return out


def counted(x, router, gate_up, down, bias):
    weight, chosen = (x @ router.T).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for expert in range(E):
        token, slot = torch.where(chosen == expert)
        hidden = F.gelu(F.linear(x[token], gate_up[expert][:N]))
        rows = F.linear(hidden, down[expert])
        out.index_add_(0, token, rows * weight[token, slot].unsqueeze(-1))
    return out


def skipping(x, router, gate_up, down, bias):
    weight, chosen = (x @ router.T).softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for expert in range(E):
        token, slot = torch.where(chosen == expert)
        if len(token) == 0:
            continue
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, token, rows * weight[token, slot].unsqueeze(-1))
    return out


SPELLINGS = (hit, counted, skipping)


def inputs(grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(T, D), (E, D), (E, 2 * N, D), (E, D, N), (D,)]
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def kept_by_running(function: Callable[..., Any], given: list[torch.Tensor]) -> int:
    """What autograd keeps while the loop of plain Python runs: what is kept before it does not count."""
    kept: dict[int, torch.Tensor] = {}
    own, zeros = {tensor.untyped_storage().data_ptr() for tensor in given}, torch.zeros_like

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def begins(x: torch.Tensor) -> torch.Tensor:
        kept.clear()
        return zeros(x)

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(torch, "zeros_like", begins)
        out = function(*given)
    assert out.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_what_a_loop_keeps_is_what_autograd_keeps_of_it(function: Callable[..., Any]) -> None:
    given = inputs()
    (region,) = explain(capture(function))(*given).expert_regions
    assert region.lowered and region.loop_saved_bytes == kept_by_running(function, given)
    assert 0 < region.saved_bytes < region.loop_saved_bytes


@pytest.mark.parametrize("function", SPELLINGS, ids=lambda f: f.__name__)
def test_each_step_of_a_proof_is_in_the_report_with_the_users_line(function: Callable[..., Any]) -> None:
    report = explain(capture(function))(*inputs())
    (region,) = report.expert_regions
    assert [step.name for step in region.proof] == ["expert function", *(step.name for step in proof.STEPS)]
    lines = {step.name: linecache.getline(step.file, step.line) for step in region.proof}
    wanted = {"every expert once": "for expert in", "own storage": "zeros_like", "one sum": "index_add_",
              "rows by token": "x[token]", "routing unchanged": "topk", "expert function": "x[token]"}  # fmt: skip
    assert [name for name, part in wanted.items() if part not in lines[name]] == []
    known = json.loads(report.to_json())["expert_regions"][0]
    assert [step["name"] for step in known["proof"]] == list(lines)
    assert known["loop_saved_bytes"] == region.loop_saved_bytes
    text, html = render(report, 400), unescape(page([report]))
    assert f"{len(lines)} steps, all hold" in text and [name for name in lines if name not in text] == []
    assert [step for step in region.proof if step.holds not in html or step.name not in html] == []


def wrong(found: str) -> Callable[..., Any]:
    """The first spelling, with one step of the proof that does not hold."""
    source = "".join(linecache.getlines(__file__)[hit.__code__.co_firstlineno - 1 :][:9])
    before, after = FAULTS[found]
    assert before in source
    space: dict[str, Any] = {"torch": torch, "F": F, "K": K, "E": E}
    name = f"<wrong {found}>"
    linecache.cache[name] = (1, None, source.replace(before, after).splitlines(True), name)
    exec(compile(source.replace(before, after), name, "exec"), space)
    return space["hit"]


FAULTS = {
    "nothing else written": ("    gate, up", "    bias.add_(1)\n        gate, up"),
    "one sum": ("    gate, up", "    out.index_add_(0, token, x[token])\n        gate, up"),
    "routing weights": ("weight[token, slot, None]", "weight[slot, slot, None]"),
}


@pytest.mark.parametrize("found", FAULTS)
def test_of_a_refused_loop_the_steps_before_the_one_that_fails_are_said(found: str) -> None:
    given = inputs()
    given[-1].requires_grad_(False)
    report = explain(capture(wrong(found)))(*given)
    (region,) = report.expert_regions
    assert not region.lowered and region.refusal.startswith(found), region.refusal
    names = [step.name for step in proof.STEPS]
    assert [step.name for step in region.proof] == ["expert function", *names[: names.index(found)]]
    assert f"{len(region.proof)} steps, then the one that fails" in render(report, 160)
    assert "before the one that fails" in page([report])
