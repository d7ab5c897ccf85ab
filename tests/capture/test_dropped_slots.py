"""Slots that are dropped, by a capacity or a threshold: one operator where every expert drops the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import rewrite, rules_routing, writing

T, D, E, K = 9, 4, 5, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(D, E).double()
        self.up = nn.ParameterList(torch.randn(6, D).double() for _ in range(E))
        self.down = nn.ParameterList(torch.randn(D, 6).double() for _ in range(E))

    def route(self, x):
        return self.gate(x).softmax(-1).topk(K, dim=-1)

    def expert(self, rows, e):
        return torch.relu(rows @ self.up[e].T) @ self.down[e].T


def place(index):
    """[T, K]: the how manieth slot of its expert a slot is."""
    taken = one_hot(index.flatten(), E).cumsum(0)
    return taken.gather(1, index.flatten()[:, None]).view_as(index)


def adding(layer, x, chosen, e, out, weight):
    token, slot = torch.where(chosen)
    out.index_add_(0, token, layer.expert(x[token], e) * weight[token, slot, None])


def capacity(layer, x):
    weight, index = layer.route(x)
    keep, out = place(index) <= 2, torch.zeros_like(x)
    for e in range(E):
        adding(layer, x, keep & (index == e), e, out, weight)
    return out


def threshold_and_capacity(layer, x):
    weight, index = layer.route(x)
    places, out = place(index), torch.zeros_like(x)
    for e in range(E):
        adding(layer, x, (index == e) & (weight > 0.2) & (places <= 3), e, out, weight)
    return out


def product_of_masks(layer, x):
    weight, index = layer.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        adding(layer, x, torch.mul(index == e, weight > 0.3), e, out, weight)
    return out


def skipped_without_rows(layer, x):
    """An expert all of whose slots are dropped gets gradients of zeros: its iteration runs."""
    weight, index = layer.route(x)
    keep, out = weight > 0.45, torch.zeros_like(x)
    for e in range(E):
        mine = index == e
        if mine.any():
            adding(layer, x, mine & keep, e, out, weight)
    return out


def skipped_without_kept_rows(layer, x):
    """Where all slots are dropped no iteration runs, and not even x has a gradient."""
    weight, index = layer.route(x)
    keep, out = weight > 0.45, torch.zeros_like(x)
    for e in range(E):
        chosen = (index == e) & keep
        if chosen.any():
            adding(layer, x, chosen, e, out, weight)
    return out


def skipped_where_others_are_kept(layer, x):
    weight, index = layer.route(x)
    keep, out = weight > 0.45, torch.zeros_like(x)
    for e in range(E):
        mine = index == e
        if (mine & keep).any():
            adding(layer, x, mine, e, out, weight)
    return out


def other_slots_for_each_expert(layer, x):
    weight, index = layer.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        adding(layer, x, (index == e) & (weight > 0.1 * e), e, out, weight)
    return out


def a_token_at_once(layer, x):
    """The mask of tokens is stretched over the slots."""
    weight, index = layer.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        adding(layer, x, (index == e) & (x[:, :1] > 0), e, out, weight)
    return out


def the_other_way_round(layer, x):
    """Square, so that a mask whose axes are swapped would fit."""
    weight, index = layer.route(x[:K])
    out, keep = torch.zeros_like(x), (weight > 0.4).T
    for e in range(E):
        adding(layer, x, ((index == e).T & keep).T, e, out, weight)
    return out


LOWERED = (capacity, threshold_and_capacity, product_of_masks, skipped_without_rows)
# which slots are dropped is each iteration's own business: the experts become an operator, the iterations stay around
# it
EXPERTS_ONLY = (
    other_slots_for_each_expert, a_token_at_once, the_other_way_round,
    skipped_without_kept_rows, skipped_where_others_are_kept,
)  # fmt: skip


def run(function, seed):
    """(regions, faults): a captured and a plain layer, result and every gradient."""
    captured, faults = capture(function), []
    mine, plain = Layer(), Layer()
    for batch in range(3):
        torch.manual_seed(100 * seed + batch)
        x = torch.randn(T, D, dtype=torch.float64) * (0.2, 1.0, 3.0)[batch]
        pair = [x.clone().requires_grad_() for _ in range(2)]
        results = captured(mine, pair[0]), function(plain, pair[1])
        compared = [results]
        for layer, result in zip((mine, plain), results, strict=True):
            layer.zero_grad()
            if result.requires_grad:
                result.square().sum().backward()
        leaves = zip([pair[0], *mine.parameters()], [pair[1], *plain.parameters()], strict=True)
        for p, q in leaves:
            if (p.grad is None) != (q.grad is None):
                faults.append(f"a gradient of {tuple(p.shape)} is there in one of both (batch {batch})")
            elif p.grad is not None:
                compared.append((p.grad, q.grad))
        faults += [f"batch {batch}" for a, b in compared if not torch.allclose(a, b, rtol=1e-10, atol=1e-12)]
    return report_of(captured_of(captured)).expert_regions, faults  # while the layer is there


@pytest.mark.share(13)
@pytest.mark.parametrize("function", LOWERED + EXPERTS_ONLY)
@pytest.mark.parametrize("seed", range(2))
def test_same_as_plain(function, seed):
    regions, faults = run(function, seed)
    assert not faults
    assert regions and all(region.lowered for region in regions)
    assert (function in EXPERTS_ONLY) == any("rows of its own" in region.idiom for region in regions)


def test_forgotten(monkeypatch):
    """An operator that ran the dropped slots would be another one."""
    routing = writing.routing
    monkeypatch.setattr(writing, "routing", lambda claim, writer: (routing(claim, writer)[0],) * 2)
    assert run(capacity, 0)[1]


def test_switched_off(monkeypatch):
    from moebius.lowering.experts.reader import RULES

    monkeypatch.setattr(rewrite, "takes_blocks", lambda work: False)
    for name in ("and", "mul"):
        monkeypatch.setitem(RULES, name, [r for r in RULES[name] if r is not rules_routing.drop_slots])
    regions, faults = run(capacity, 0)
    assert not faults and regions and not any(region.lowered for region in regions)
