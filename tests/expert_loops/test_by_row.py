"""Experts that the operator has not got (row_experts.py), right and subtly wrong. Equal to plain PyTorch in output,
gradients and random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from beside_eager import regions_of
from row_experts import (
    LOOPS,
    RIGHT,
    Experts,
    apart,
    apart_where_hit,
    deep,
    drawing_after,
    dropping_three_times,
    in_one_tensor,
    low_rank,
    low_rank_of_a_shared_base,
    lowered,
    normed_before,
    own_norm_between,
    own_scales,
    shared_norm,
    single,
    sorted_and_cut,
    weighted_before,
)
from spellings import D, E, K
from torch.nn.functional import dropout, linear

from moebius.lowering.experts import by_row, rewrite, rules_computed


def across_rows(h, p, w, moe):
    return linear(h - h.mean(0, keepdim=True), p["square"]) * w


def by_the_number_of_rows(h, p, w, moe):
    return linear(h, p["square"]) * w / (1 + h.shape[0])


def of_all_rows(h, p, w, moe):
    return linear(h, p["square"]) * w * torch.sigmoid(linear(h, p["square"]).sum())


def first_row(h, p, w, moe):
    return linear(h, p["square"]) * w[:1]


def other_order(h, p, w, moe):
    return linear(h, p["square"]).flip(0) * w


def row_weight_along_features(h, p, w, moe):
    rows = linear(h, p["square"])
    return rows * w[:, 0].sum() if len(h) != D else rows * w[:, 0]


def cumulative(h, p, w, moe):
    return linear(h.cumsum(0), p["square"]) * w


def cut_off(h, p, w, moe):
    with torch.no_grad():
        low = linear(h, p["low"])
    return linear(linear(low, p["high"]), p["down"]) * w


def softmax_over_rows(h, p, w, moe):
    return linear(linear(h, p["up"]).softmax(0), p["down"]) * w


def noise_as_well(h, p, w, moe):
    return linear(h + torch.rand_like(h), p["square"]) * w


def dropping_in_another_layout(h, p, w, moe):
    return linear(dropout((p["up"] @ h.T).T, 0.4), p["down"]) * w


WRONG = [across_rows, by_the_number_of_rows, of_all_rows, first_row, other_order, row_weight_along_features, cumulative,
         cut_off, softmax_over_rows, noise_as_well, dropping_in_another_layout]  # fmt: skip


@pytest.mark.share(8)
@pytest.mark.parametrize(("expert", "loop"), [*zip(RIGHT + RIGHT[2:], itertools.cycle(LOOPS), strict=False)])
def test_right(expert, loop):
    found_first = expert in (weighted_before, normed_before) and loop is apart_where_hit  # (the operator's own form)
    assert lowered(loop(expert), *(["cpu"] if found_first else []))


@pytest.mark.parametrize("expert", [single, deep, shared_norm, low_rank, dropping_three_times])
def test_right_in_slices(expert):
    assert lowered(sorted_and_cut(expert))


@pytest.mark.parametrize(("expert", "loop"), [*zip(WRONG, itertools.cycle(LOOPS), strict=False)])
def test_wrong(expert, loop):
    assert not lowered(loop(expert))


def test_experts_that_all_read_the_same_rows():
    """Nothing is sorted, and nothing copied."""

    def layer(x, moe):
        rows = moe.norm(x)
        gates = torch.stack([moe.gate(x), moe.gate(x) * 2.0]).softmax(-1)
        each = torch.stack([deep(rows, moe.apart[e], 1.0, moe) for e in range(E)])
        return torch.einsum("kte,etd->td", gates, each)

    _, regions = regions_of(layer, layer=Experts)
    assert not any(region.lowered for region in regions)


# ----------------------------------------------------------------------------------------------------------------------
# What it rests on
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [across_rows, softmax_over_rows])
def test_operators_that_mix_rows(monkeypatch, expert):
    monkeypatch.setattr(rules_computed, "aligned", lambda *_: True)
    monkeypatch.setattr(rules_computed, "along_rows", lambda *_: True)
    with pytest.raises(AssertionError):
        lowered(in_one_tensor(expert))


@pytest.mark.parametrize("switch", ["takes_rows", "replace_meeting"])
def test_off(monkeypatch, switch):
    layer = sorted_and_cut(deep) if switch == "replace_meeting" else in_one_tensor(deep)
    monkeypatch.setattr(rewrite, switch, lambda *_: None)
    assert not lowered(layer)


def test_rows_behind_an_expert_are_all_found(monkeypatch):
    """An expert that reads other rows beside its own is none of these."""

    def layer(x, moe):
        weight, index = moe.route(x)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=E).tolist()
        rows, others = x[order // K].split(counts), x.flip(0)[order // K].split(counts)
        y = torch.cat([deep(rows[e] + others[e], moe.of(e, False), 1.0, moe) for e in range(E)])
        return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])

    regions_of(layer, layer=Experts)


def test_a_shared_parameter_where_no_iteration_may_run():
    """Without an iteration it has no gradient; the index may say that none runs."""

    def layer(x, moe):
        weight, index = moe.route(x)
        index = torch.where(weight > 2.0, index, E)  # none
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() > 0:
                rows = low_rank_of_a_shared_base(x[token], moe.of(e, True), weight[token, slot, None], moe)
                out.index_add_(0, token, rows)
        return out + x

    regions_of(layer, layer=Experts)


# ----------------------------------------------------------------------------------------------------------------------
# What its own steps rest on
# ----------------------------------------------------------------------------------------------------------------------


def vectors_written_afterwards(x, moe):
    """A loop keeps the vectors themselves, which are others in backward."""
    out = in_one_tensor(own_scales)(x, moe)
    moe.whole["scale"].data.mul_(0.5)
    return out


def vectors_of_each_written_afterwards(x, moe):
    out = apart(own_norm_between)(x, moe)
    moe.apart[1]["b_up"].data.mul_(-1.0)
    return out


def all_skipped(x, moe):
    """No iteration runs: what the iterations share has no gradient."""
    weight, index = moe.route(x)
    index = torch.where(weight > 2.0, index, E)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        if token.numel() > 0:
            out.index_add_(0, token, shared_norm(x[token], moe.of(e, True), weight[token, slot, None], moe))
    return out + x


def numbers_in_the_order_of_a_set(x, moe):
    """{8, 1} is gone through as 8, 1."""
    logits = x @ torch.linspace(-1, 1, D * 10, dtype=x.dtype).sin().view(D, 10)
    weight, index = torch.topk((logits - 100.0 * (torch.arange(10) == 0)).softmax(-1), K)
    weights, out = torch.cat([moe.whole["square"]] * 3), torch.zeros_like(x)
    for e in set(index.flatten().tolist()):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, linear(dropout(x[token], 0.4), weights[e]) * weight[token, slot, None])
    return out


STEPS = [
    ("vectors unchanged", vectors_written_afterwards),
    ("vectors unchanged", vectors_of_each_written_afterwards),
    ("drawn in order", numbers_in_the_order_of_a_set),
]


@pytest.mark.parametrize(("name", "layer"), STEPS)
def test_each_step_is_needed(monkeypatch, name, layer):
    _, regions = regions_of(drawing_after(layer), layer=Experts)
    assert regions and not any(region.lowered for region in regions)
    assert any(name in region.refusal for region in regions), regions
    monkeypatch.setattr(by_row, "STEPS", tuple(step for step in by_row.STEPS if step.name != name))
    with pytest.raises(AssertionError):
        regions_of(drawing_after(layer), layer=Experts)


def test_where_no_iteration_runs_what_they_share_has_no_gradient():
    _, regions = regions_of(all_skipped, layer=Experts)
    assert all(region.lowered for region in regions)


def test_tokens_and_weights_may_change_afterwards():
    """Of these, a loop keeps copies, and so do projections of sorted rows."""

    def layer(x, moe):
        y = x * 1.0
        out = in_one_tensor(deep)(y, moe)
        y.data.mul_(0.5)
        return out + y.sum()

    _, regions = regions_of(layer, layer=Experts)
    assert regions and all(region.lowered for region in regions)
