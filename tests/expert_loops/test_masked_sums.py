"""Experts on all tokens whose rows a condition takes out of the sum, ``torch.where(mask, expert(x) * gate, 0)``: the
operator runs the tokens that are left, if the mask is of the gate's own experts or compares the gate itself."""

from __future__ import annotations

import pytest
import torch
from beside_eager import by_gates_alone, compare
from spellings import E, K

from moebius.lowering.experts import dense, masked


def parts(x, moe):
    """Of each expert: (which tokens chose it, what its rows are scaled by, its rows)."""
    weight, index = moe.route(x)
    for e, expert in enumerate(moe.experts):
        yield (index == e).any(-1, keepdim=True), (weight * (index == e)).sum(-1, keepdim=True), expert(x)


def gates_of(x, moe):
    """Of any sign."""
    weight, index = torch.topk(moe.gate(x), K, -1)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def added(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out = out + torch.where(mask, y * gate, 0)
    return out


def added_in_place(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out += torch.where(mask, y * gate, torch.zeros_like(y))
    return out


def a_sum_of_a_generator(x, moe):
    return sum(torch.where(~mask, torch.zeros((), dtype=x.dtype), gate * y) for mask, gate, y in parts(x, moe))


def filled(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out = out + (y * gate).masked_fill(~mask, 0)
    return out


def stacked(x, moe):
    return torch.stack([torch.where(mask, y * gate, 0.0) for mask, gate, y in parts(x, moe)], 1).sum(1)


def stacked_without_masks(x, moe):
    return torch.stack([y * gate for _, gate, y in parts(x, moe)]).sum(0)


def over_a_bound(x, moe):
    gates, out = gates_of(x, moe), 0
    for e, expert in enumerate(moe.experts):
        out = out + torch.where(gates[:, e, None] > 0.1, expert(x) * gates[:, e, None], 0.0)
    return out


def under_a_bound(x, moe):
    gates, out = gates_of(x, moe), 0
    for e, expert in enumerate(moe.experts):
        out = out + torch.where(gates[:, e, None] >= 0.1, 0.0, expert(x) * gates[:, e, None])
    return out


def each_slot(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        for e, expert in enumerate(moe.experts):
            out = out + torch.where((index[:, k] == e)[:, None], expert(x) * weight[:, k, None], 0)
    return out


def each_slot_in_place(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        for e, expert in enumerate(moe.experts):
            out += torch.where((index[:, k] != e)[:, None], 0, expert(x) * weight[:, k, None])
    return out


def the_best(x, moe):
    share, best = moe.gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out += torch.where((best == e)[:, None], expert(x), 0)
    return out * share[:, None]


def the_best_by_numbers(x, moe):
    best = moe.gate(x).argmax(-1, keepdim=True)
    return sum((best == e).to(x.dtype) * expert(x) for e, expert in enumerate(moe.biased))


def the_best_by_bools(x, moe):
    best = moe.gate(x).argmax(-1)
    return sum((best == e).unsqueeze(-1) * expert(x) for e, expert in enumerate(moe.mlps))


RIGHT = [added, added_in_place, a_sum_of_a_generator, filled, stacked, stacked_without_masks, over_a_bound,
         under_a_bound, each_slot, each_slot_in_place, the_best, the_best_by_numbers, the_best_by_bools]  # fmt: skip


def of_another_index(x, moe):
    weight, index = moe.route(x)
    other, out = index.flip(0), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        gate = (weight * (index == e)).sum(-1, keepdim=True)
        out = out + torch.where((other == e).any(-1, keepdim=True), expert(x) * gate, 0)
    return out


def of_another_gate(x, moe):
    gates, out = gates_of(x, moe), 0
    for e, expert in enumerate(moe.experts):
        out = out + torch.where(gates[:, E - 1, None] > 0.1, expert(x) * gates[:, e, None], 0.0)
    return out


def those_that_did_not_choose(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out = out + torch.where(mask, 0, y * gate)
    return out


def in_all_slots(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        gate = (weight * (index == e)).sum(-1, keepdim=True)
        out = out + torch.where((index == e).all(-1, keepdim=True), expert(x) * gate, 0)
    return out


def ones_elsewhere(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out = out + torch.where(mask, y * gate, 1.0)
    return out


def zeros_that_were_written(x, moe):
    out, zeros = torch.zeros_like(x), torch.zeros_like(x)
    zeros += 1.0
    for mask, gate, y in parts(x, moe):
        out = out + torch.where(mask, y * gate, zeros)
    return out


def one_over_the_other(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        out = torch.where(mask, y * gate, out)
    return out


def twice_the_same_expert(x, moe):
    """The bound is on the sum of both weights."""
    weight, index = moe.route(x)
    weight, index = weight - 0.45, index[:, :1].repeat(1, K)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        gate = (weight * (index == e)).sum(-1, keepdim=True)
        out = out + torch.where(gate > 0.05, expert(x) * gate, 0)
    return out


def the_index_changes(x, moe):
    weight, index = moe.route(x)
    index, out = index.clone(), torch.zeros_like(x)
    for k in range(K):
        for e, expert in enumerate(moe.experts):
            out = out + torch.where((index[:, k] == e)[:, None], expert(x) * weight[:, k, None], 0)
            index[:3] = 1
    return out


def the_masked_rows_change(x, moe):
    out = torch.zeros_like(x)
    for mask, gate, y in parts(x, moe):
        rows = y * gate
        rows += 0.5
        out = out + torch.where(mask, rows, 0)
    return out


def the_mean(x, moe):
    return torch.stack([y * gate for _, gate, y in parts(x, moe)]).mean(0)


WRONG = [of_another_index, of_another_gate, those_that_did_not_choose, in_all_slots, ones_elsewhere,
         zeros_that_were_written, one_over_the_other, twice_the_same_expert, the_index_changes,
         the_masked_rows_change, the_mean]  # fmt: skip
ON_ALL = [the_mean, one_over_the_other]  # every token has every expert


@pytest.mark.share(8)
@pytest.mark.parametrize("function", RIGHT)
def test_right(function):
    assert compare(function) == (1, True)


@pytest.mark.parametrize("function", WRONG)
def test_not_lowered(function, monkeypatch):
    if function in ON_ALL:
        assert compare(function) == (1, True)
        by_gates_alone(monkeypatch)
    assert compare(function) == (1, False)


@pytest.mark.parametrize(
    ("module", "name", "function"),
    [
        (dense, "holds_for_chosen", of_another_index),
        (dense, "holds_for_chosen", those_that_did_not_choose),
        (masked, "is_zero", ones_elsewhere),
        (masked, "is_zero", zeros_that_were_written),
        (masked, "same_reading", of_another_gate),
        (dense, "distinct", twice_the_same_expert),
    ],
)
def test_what_is_asked(monkeypatch, module, name, function):
    """Without the question another result comes out."""
    monkeypatch.setattr(module, name, lambda *_: True)
    with pytest.raises(AssertionError):
        compare(function)
