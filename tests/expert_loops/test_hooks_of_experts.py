"""Hooks of the experts' parameters run as in plain PyTorch: not for experts whose iteration did not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import stacking

D = 4


class Layer(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 6), nn.ModuleList(make() for _ in range(6))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = x * 1.0
        for e, expert in enumerate(self.experts):
            token = torch.where(chosen == e)[0]
            if token.numel() > 0:
                out = out.index_add(0, token, expert(x[token]) * weight[token, None])
        return out


def two():
    return nn.Sequential(nn.Linear(D, 5), nn.GELU(), nn.Linear(5, D))


def single():
    return nn.Linear(D, D)


def hook(name, log):
    def note(value):
        log.append((name, None if value is None else value.sum().item()))

    return note


def in_sections(log):
    sections = [[]]
    for entry in log:
        sections.append([]) if entry[0] == "end" else sections[-1].append(entry)
    return [dict(section) for section in sections], [sorted(name for name, _ in section) for section in sections]


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize("make", [two, single])
def test_only_of_experts_that_ran(make, kind):
    moebius.reset()
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        model, log = Layer(make).double(), []
        for name, p in model.named_parameters():
            note = hook(name, log)
            p.register_hook(note) if kind == "gradient" else p.register_post_accumulate_grad_hook(note)
        forward = capture(loss_of) if captures else loss_of
        for seed in range(3):
            model.zero_grad()
            x = torch.randn(4, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            forward(model, x).backward()
            log.append(("end", None))
        found.append(in_sections(log))
        if captures:
            assert [r.lowered for r in report_of(captured_of(forward)).expert_regions] == [True]
    (plain, names), (ours, our_names) = found
    assert names == our_names and any(len(section) < len(max(names, key=len)) for section in names[:3])
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs)


def loss_of(model, x):
    return model(x).square().sum()


def test_a_stack_leaves_out_who_did_not_run():
    parts = [torch.ones(2, requires_grad=True) for _ in range(3)]
    called = []
    for e, part in enumerate(parts):
        part.register_post_accumulate_grad_hook(lambda p, e=e: called.append(e))
    stacking.stack_experts(torch.tensor([2, 0, 2]), *parts).sum().backward()
    assert sorted(called) == [0, 2] and parts[1].grad is None
