"""Experts on all tokens, their rows in one stack or added up, weighted by gates that are certainly zero for the others,
however stack, lookup, sum and gates are written; and what only looks like it."""

from __future__ import annotations

import operator

import pytest
import torch
from beside_eager import by_gates_alone
from spellings import LOWERED, D, E, K, Spelling
from table import MODULES, SEEDS, Runner
from torch.nn.functional import log_softmax, one_hot, softmax

import moebius
from moebius.lowering.experts import combined, dense, zeros


def stacked(x, moe, dim):
    return torch.stack([expert(x) for expert in moe.experts], dim)


def scattered(x, moe):
    weight, index = moe.route(x)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


STACKS = {
    "sum of a product": lambda x, moe, gates: (stacked(x, moe, 1) * gates[:, :, None]).sum(1),
    "experts first": lambda x, moe, gates: (stacked(x, moe, 0) * gates.T.unsqueeze(-1)).sum(0),
    "experts last": lambda x, moe, gates: (gates.unsqueeze(1) * stacked(x, moe, -1)).sum(dim=-1),
    "einsum": lambda x, moe, gates: torch.einsum("te,ted->td", gates, stacked(x, moe, 1)),
    "einsum, experts first": lambda x, moe, gates: torch.einsum("end,ne->nd", stacked(x, moe, 0), gates),
    "bmm": lambda x, moe, gates: torch.bmm(gates.unsqueeze(1), stacked(x, moe, 1)).squeeze(1),
    "matmul from the right": lambda x, moe, gates: (stacked(x, moe, 2) @ gates[:, :, None])[:, :, 0],
    "cat": lambda x, moe, gates: (torch.cat([e(x).unsqueeze(1) for e in moe.experts], 1) * gates[..., None]).sum(1),
    "transposed": lambda x, moe, gates: (stacked(x, moe, 0).transpose(0, 1) * gates.view(len(x), E, 1)).sum(-2),
    "added up": lambda x, moe, gates: sum(gates[:, e : e + 1] * own(x) for e, own in enumerate(moe.experts)),
    "added up, unsqueezed": lambda x, moe, gates: sum(
        own(x) * gates[:, e].unsqueeze(-1) for e, own in enumerate(moe.experts)
    ),
}


def picked_by_gather(x, moe, weight, index):
    y = stacked(x, moe, 1).gather(1, index[..., None].expand(-1, -1, D))
    return (y * weight[..., None]).sum(1)


def picked_by_numbers(x, moe, weight, index):
    y = stacked(x, moe, 1)[torch.arange(x.shape[0])[:, None], index]
    return torch.einsum("tkd,tk->td", y, weight)


def picked_experts_first(x, moe, weight, index):
    y = stacked(x, moe, 0)[index, torch.arange(x.shape[0]).unsqueeze(1)]
    return torch.bmm(weight[:, None], y)[:, 0]


def picked_along(x, moe, weight, index):
    y = torch.take_along_dim(stacked(x, moe, 1), index.unsqueeze(-1), dim=1)
    return (y * weight.unsqueeze(2)).sum(dim=1)


PICKED = [picked_by_gather, picked_by_numbers, picked_experts_first, picked_along]


def chosen(x, moe):
    probs = softmax(moe.gate(x), -1)
    return probs, probs.topk(K, -1).indices


def masked(x, moe):
    probs, index = chosen(x, moe)
    gates = probs * torch.zeros_like(probs).scatter(-1, index, 1.0)
    return gates / gates.sum(-1, keepdim=True)


def filled(x, moe):
    probs, index = chosen(x, moe)
    return probs.masked_fill(~torch.zeros_like(probs, dtype=torch.bool).scatter(-1, index, True), 0.0)


def where(x, moe):
    probs, index = chosen(x, moe)
    return torch.where(torch.zeros_like(probs).scatter_(-1, index, 1) > 0, probs, 0.0)


def noisy_top_k(x, moe):
    logits = moe.gate(x)
    values, index = logits.topk(K, -1)
    return softmax(torch.full_like(logits, float("-inf")).scatter(-1, index, values), -1)


def logits_filled(x, moe):
    logits = moe.gate(x)
    mask = torch.zeros_like(logits).scatter(1, logits.topk(K).indices, 1.0)
    return torch.softmax(logits.masked_fill(mask == 0, float("-inf")), 1)


def sigmoids(x, moe):
    logits = moe.gate(x)
    values, index = logits.topk(K, -1)
    return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter(-1, index, values))


def one_hots(x, moe):
    weight, index = moe.route(x)
    return (one_hot(index, E).to(x.dtype) * weight.unsqueeze(-1)).sum(1)


def top_1(x, moe):
    probs = softmax(moe.gate(x), -1)
    return probs * one_hot(probs.argmax(-1), E)


GATES = [scattered, masked, filled, where, noisy_top_k, logits_filled, sigmoids, one_hots, top_1]


def lowered(function):
    """Whether all regions became operators; result and gradients equal eager's."""
    moebius.reset()
    MODULES["under_test"] = Spelling(function, "")
    try:
        runner = Runner("under_test")
        for seed in SEEDS:
            assert not runner.call(seed)
        return runner.report()[0] == LOWERED
    finally:
        del MODULES["under_test"]


@pytest.mark.parametrize("name", STACKS)
def test_sums_of_the_stack(name):
    assert lowered(lambda x, moe: STACKS[name](x, moe, scattered(x, moe)))


@pytest.mark.parametrize("pick", PICKED)
def test_picked_of_the_stack(pick):
    assert lowered(lambda x, moe: pick(x, moe, *moe.route(x)))


@pytest.mark.share(9)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("name", ["einsum", "added up"])
def test_gates(gates, name):
    assert lowered(lambda x, moe: STACKS[name](x, moe, gates(x, moe)))


# ----------------------------------------------------------------------------------------------------------------------
# Near-variants
# ----------------------------------------------------------------------------------------------------------------------


def all_of_them(x, moe):
    return softmax(moe.gate(x), -1)


def a_little_of_each(x, moe):
    return masked(x, moe) + 0.01


def logarithms(x, moe):
    logits = moe.gate(x)
    values, index = logits.topk(K, -1)
    return log_softmax(torch.full_like(logits, -50.0).scatter(-1, index, values), -1)


def inverse(x, moe):
    return 1.0 / (scattered(x, moe) + 1.0)


def written_later(x, moe):
    gates = masked(x, moe) * 1.0
    gates[:, 1] = 0.3
    return gates


def mask_written_between(x, moe):
    probs, index = chosen(x, moe)
    mask = torch.zeros_like(probs).scatter(-1, index, 1.0)
    mask[:, 0] = 1.0
    return probs * mask


def named_twice(x, moe):
    weight, index = moe.route(x)
    index = torch.cat([index[:, :1], index[:, :1]], 1)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def of_the_other_experts(x, moe):
    probs, index = chosen(x, moe)
    return probs.masked_fill(torch.zeros_like(probs, dtype=torch.bool).scatter(-1, index, True), 0.0)


def added_to_ones(x, moe):
    weight, index = moe.route(x)
    return torch.ones(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def not_low_enough(x, moe):
    logits = moe.gate(x)
    values, index = logits.topk(K, -1)
    return softmax(torch.full_like(logits, -2.0).scatter(-1, index, values), -1)


@pytest.mark.share(10)
@pytest.mark.parametrize("name", ["einsum", "added up"])
@pytest.mark.parametrize(
    "gates",
    [all_of_them, a_little_of_each, logarithms, inverse, written_later, mask_written_between, named_twice,
     of_the_other_experts, added_to_ones, not_low_enough],
)  # fmt: skip
def test_gates_that_are_not_zero(gates, name, monkeypatch):
    """Every token has every expert there."""
    assert lowered(lambda x, moe: STACKS[name](x, moe, gates(x, moe)))
    by_gates_alone(monkeypatch)
    assert not lowered(lambda x, moe: STACKS[name](x, moe, gates(x, moe)))


def test_gates_taken_for_zero(monkeypatch):
    """Where a sum counts as zero wherever one of its terms is, the comparison sees it."""
    original = zeros.Zeros.index_of

    def careless(self, node):
        return original(self, node.args[0] if node.target in (torch.add, operator.add) else node)

    monkeypatch.setattr(zeros.Zeros, "index_of", careless)
    with pytest.raises(AssertionError):
        lowered(lambda x, moe: STACKS["einsum"](x, moe, a_little_of_each(x, moe)))


def stack_written(x, moe, weight, index):
    y = stacked(x, moe, 1)
    y.mul_(2.0)
    return torch.einsum("tkd,tk->td", y[torch.arange(len(x))[:, None], index], weight)


def rows_written(x, moe, weight, index):
    rows = [expert(x) for expert in moe.experts]
    y = torch.stack(rows, 1)
    rows[1].mul_(2.0)
    return torch.einsum("te,ted->td", scattered(x, moe), y) + rows[1]


def product_written(x, moe, weight, index):
    product = stacked(x, moe, 1) * scattered(x, moe)[:, :, None]
    product[:, 0] = 0.5
    return product.sum(1)


def gates_written_after_a_view(x, moe, weight, index):
    gates = scattered(x, moe)
    view = gates[:, :, None]
    gates[:, 1] = 0.5
    return (stacked(x, moe, 1) * view).sum(1)


def numbers_from_the_end(x, moe, weight, index):
    return picked_by_numbers(x, moe, weight, index - 1)


def rows_of_another_token(x, moe, weight, index):
    y = stacked(x, moe, 1)[torch.arange(len(x)).flip(0)[:, None], index]
    return (y * weight[..., None]).sum(1)


def weights_of_another_token(x, moe, weight, index):
    return picked_by_gather(x, moe, weight.flip(0), index) + picked_by_gather(x, moe, weight, index.flip(0))


def a_part_of_the_features(x, moe, weight, index):
    y = stacked(x, moe, 1).gather(1, index[..., None].expand(-1, -1, D - 2))
    return torch.nn.functional.pad((y * weight[..., None]).sum(1), (0, 2))


def slots_and_features_swapped(x, moe, weight, index):
    return torch.einsum("tkd,tk->td", stacked(x, moe, 1)[:, :K], weight)


@pytest.mark.parametrize(
    "function",
    [stack_written, rows_written, product_written, gates_written_after_a_view, numbers_from_the_end,
     rows_of_another_token, weights_of_another_token, a_part_of_the_features, slots_and_features_swapped],
)  # fmt: skip
def test_near_variants(function):
    lowered(lambda x, moe: function(x, moe, *moe.route(x)))


def test_a_write_that_is_not_looked_for(monkeypatch):
    monkeypatch.setattr(combined.Combined, "writer", lambda *_: None)
    with pytest.raises(AssertionError):
        lowered(lambda x, moe: stack_written(x, moe, *moe.route(x)))


def test_numbers_that_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(dense, "is_among", lambda *_: True)
    with pytest.raises(AssertionError):
        lowered(lambda x, moe: numbers_from_the_end(x, moe, *moe.route(x)))
