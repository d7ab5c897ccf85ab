"""Experts with a capacity that is computed of the batch's size: one graph of all sizes, lowered as one of one size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moebius import capture
from moebius.api import captured_of, report_of

EXPERTS, WIDTH = 4, 8

CAPACITIES: dict[str, Callable[[int], int]] = {
    "a constant": lambda tokens: 9,
    "int of a product": lambda tokens: int((tokens * 2 / EXPERTS) * 0.6),
    "whole division": lambda tokens: tokens // EXPERTS + 1,
    "rounded up": lambda tokens: math.ceil(tokens * 0.3),
    "at least": lambda tokens: max(tokens // EXPERTS, 3),
}


def chosen(row, most):
    return row[:most] if row.numel() > most else row


def chosen_the_other_way(row, most):
    return row if row.numel() <= most else row[:most]


def asked_the_other_way(row, most):
    return row[:most] if most < len(row) else row


def cut_in_a_statement(row, most):
    if row.shape[0] >= most:
        row = row[:most]
    return row


def cut_unless_few(row, most):
    if not row.size(0) <= most:
        row = row[0:most]
    return row


def cut_at_another_place(row, most):
    return row[: most - 1] if row.numel() > most else row


SPELLINGS = [chosen, chosen_the_other_way, asked_the_other_way, cut_in_a_statement, cut_unless_few]


class Experts(nn.Module):
    def __init__(self, cut, capacity):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)) for _ in range(EXPERTS)
        )
        self.cut, self.capacity = cut, capacity

    def forward(self, x_TD):
        weight_TK, index_TK = self.router(x_TD).softmax(-1).topk(2, dim=-1)
        gates_TE = torch.zeros(len(x_TD), EXPERTS).scatter(1, index_TK, weight_TK)
        out_TD, most = torch.zeros_like(x_TD), self.capacity(x_TD.shape[0])
        for e, expert in enumerate(self.experts):
            row = self.cut(torch.nonzero((index_TK == e).any(-1)).squeeze(-1), most)
            if row.numel() > 0:
                out_TD.index_add_(0, row, expert(x_TD[row]) * gates_TE[row, e].unsqueeze(1))
        return out_TD


def trained(cut, capacity, captured: bool) -> tuple[list[torch.Tensor], list]:
    """Gradients of steps of several sizes, and the regions of the last graph."""
    torch.manual_seed(0)
    model = Experts(cut, CAPACITIES[capacity])

    def step(x_TD):
        model.zero_grad()
        (model(x_TD) ** 2).mean().backward()

    run, found = capture(step) if captured else step, []
    for tokens in (24, 9, 33, 24, 17):
        run(torch.randn(tokens, WIDTH))
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found, report_of(captured_of(run)).expert_regions if captured else []


@pytest.mark.share(3)
@pytest.mark.parametrize("cut, capacity", [*itertools.product(SPELLINGS, CAPACITIES)])
def test_such_experts_are_one_operator(cut, capacity):
    want, _ = trained(cut, capacity, captured=False)
    got, regions = trained(cut, capacity, captured=True)
    torch.testing.assert_close(got, want)
    assert regions and all(region.lowered for region in regions), [region.refusal for region in regions]


@pytest.mark.parametrize("capacity", ["a constant", "whole division"])
def test_what_is_cut_at_another_place_than_was_asked_for_stays_a_branch(capacity):
    want, _ = trained(cut_at_another_place, capacity, captured=False)
    got, _ = trained(cut_at_another_place, capacity, captured=True)
    torch.testing.assert_close(got, want)
