"""Experts one after another, each on rows of its own (lowering/experts/blocks.py), right and subtly wrong.

Equal to eager in float64 with every gradient, and not lowered where an expert's rows are made of what another gave, or
an iteration changes what it reads. What becomes of the results may depend on earlier ones: that stays as written."""

from __future__ import annotations

import pytest
import torch
from module_layers import Layer
from spellings import E, K
from table import Runner, tensors

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import proof

RIGHT, WRONG = {}, {}


def right(function):
    RIGHT[function.__name__] = function
    return function


def wrong(function):
    WRONG[function.__name__] = function
    return function


def sorted_rows(x, moe):
    weight, index = moe.route(x)
    order = index.view(-1).argsort(stable=True)
    return weight.view(-1)[order], order, torch.bincount(index.view(-1), minlength=E).tolist()


def put_back(x, order, y, weight):
    return torch.zeros_like(x).index_add_(0, order // K, y * weight.unsqueeze(-1))


@right
def slices(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts, start = [], 0
    for expert, count in zip(moe.experts, counts, strict=True):
        parts.append(expert(x[order // K][start : start + count]))
        start += count
    return put_back(x, order, torch.cat(parts), weight)


@right
def written_into_rows(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    rows, start = x[order // K], 0
    y = torch.zeros_like(rows)
    for expert, count in zip(moe.experts, counts, strict=True):
        y[start : start + count] = expert(rows[start : start + count])
        start += count
    return put_back(x, order, y, weight)


@right
def normalized_by_each_iteration(x, moe):
    """What each iteration does with its own rows besides stays as it is, across rows too."""
    weight, order, counts = sorted_rows(x, moe)
    parts = []
    for expert, rows in zip(moe.biased, x[order // K].split(counts), strict=True):
        y = expert(rows)
        parts.append(y - y.sum(0) / 7)
    return put_back(x, order, torch.cat(parts), weight)


@right
def in_another_order(x, moe):
    """The experts run from the last to the first, on the rows of the others."""
    weight, order, counts = sorted_rows(x, moe)
    parts = x[order // K].split(counts)
    y = [expert(rows) for expert, rows in zip(list(moe.experts)[::-1], parts, strict=True)]
    return put_back(x, order, torch.cat(y), weight)


@right
def overlapping_rows(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.mlps):
        token = moe.gate(x)[:, i].topk(3).indices
        out.index_add_(0, token, expert(x[token]))
    return out


@right
def tokens_with_an_expert_twice(x, moe):
    """Such a token is a row of its expert once, and not once for each slot."""
    weight, index = moe.route(x)
    index, out = torch.cat([index, index], 1), torch.zeros_like(x)
    for e in range(E):
        chosen = (index == e).any(-1)
        out[chosen] += torch.relu(x[chosen] @ moe.w1[e]) @ moe.w2[e]
    return out


@right
def a_iteration_that_is_another(x, moe):
    """What an iteration does otherwise is decided by its number."""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = index == e
        if e % 2 == 1:
            chosen = chosen & (weight > 0.5)
        token, slot = torch.where(chosen)
        out.index_add_(0, token, torch.relu(x[token] @ moe.w1[e]) @ moe.w2[e] * weight[token, slot, None])
    return out


@right
def a_iteration_that_may_be_another(x, moe):
    """What an iteration does otherwise, before its expert, is decided by the values."""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = index == e
        if weight[e, 0] > 0.6:
            chosen = chosen & (weight > 0.5)
        token, slot = torch.where(chosen)
        out.index_add_(0, token, torch.relu(x[token] @ moe.w1[e]) @ moe.w2[e] * weight[token, slot, None])
    return out


@wrong
def rows_of_the_iteration_before(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts, start, before = [], 0, 0.0
    rows = x[order // K]
    for expert, count in zip(moe.experts, counts, strict=True):
        y = expert(rows[start : start + count] + before)
        before = y.sum() * 0.1
        parts.append(y)
        start += count
    return put_back(x, order, torch.cat(parts), weight)


@right
def scaled_by_the_iteration_before(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts, start, before = [], 0, 1.0
    rows = x[order // K]
    for expert, count in zip(moe.experts, counts, strict=True):
        y = expert(rows[start : start + count]) * before
        before = y.sum() * 0.1
        parts.append(y)
        start += count
    return put_back(x, order, torch.cat(parts), weight)


@right
def scaled_less_and_less(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts, scale = [], torch.ones((), dtype=x.dtype)
    for expert, rows in zip(moe.experts, x[order // K].split(counts), strict=True):
        parts.append(expert(rows) * scale)
        scale = scale * 0.5
    return put_back(x, order, torch.cat(parts), weight)


@wrong
def rows_that_were_written(x, moe):
    out = x.clone()
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        out[token] = expert(out[token])
    return out


@right
def a_sum_that_is_read(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        out.index_add_(0, token, expert(x[token]) + out[token])
    return out


@right
def a_sum_that_is_scaled(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        out.index_add_(0, token, expert(x[token]))
        out *= 0.5
    return out


@wrong
def a_sum_that_routes(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = (moe.gate(x)[:, i] + out.sum(-1)).topk(3).indices
        out.index_add_(0, token, expert(x[token]))
    return out


@wrong
def weights_that_change(x, moe):
    out = torch.zeros_like(x)
    w1 = moe.w1.detach().clone()
    for e in range(E):
        token = moe.gate(x)[:, e].topk(3).indices
        out.index_add_(0, token, torch.relu(x.detach()[token] @ w1[e]) @ moe.w2[e])
        w1[(e + 1) % E] *= 1.5
    return out


@wrong
def gradients_off_in_some_iterations(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        with torch.set_grad_enabled(i % 2 == 0):
            y = expert(x[token])
        out.index_add_(0, token, y)
    return out


@right
def results_changed_in_place(x, moe):
    parts = []
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        y = expert(x[token])
        y += i
        parts.append(y)
    return torch.stack(parts)


@right
def counted_in_place(x, moe):
    """Each iteration's rows are scaled by what the iterations before have counted."""
    weight, order, counts = sorted_rows(x, moe)
    parts, seen = [], torch.zeros(1, dtype=x.dtype)
    for expert, rows in zip(moe.experts, x[order // K].split(counts), strict=True):
        parts.append(expert(rows) * seen.clone())
        seen.add_(1)
    return put_back(x, order, torch.cat(parts), weight)


@wrong
def rows_scaled_more_and_more(x, moe):
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = moe.gate(x)[:, i].topk(3).indices
        out.index_add_(0, token, expert(x[token]))
        x = x * 1.1
    return out


@right
def added_to_a_tensor_from_outside(x, moe):
    """That it is not x under another name is a guard."""
    with torch.no_grad():
        for i, expert in enumerate(moe.experts):
            token = moe.gate(x)[:, i].topk(3).indices
            moe.seen[token] += expert(x[token])
    return x * moe.seen.sum()


@wrong
def mean_inside_the_expert(x, moe):
    out = torch.zeros_like(x)
    for e in range(E):
        token = moe.gate(x)[:, e].topk(3).indices
        h = torch.relu(x[token] @ moe.w1[e])
        out.index_add_(0, token, (h - h.mean(0)) @ moe.w2[e])
    return out


def lowered(function):
    """Compares with eager; whether there are expert regions and all of them were lowered."""
    moebius.reset()
    torch.manual_seed(1)
    layers = [Layer().double() for _ in range(2)]
    for layer in layers:
        layer.register_buffer("seen", torch.zeros(10, 8, dtype=torch.float64), persistent=False)
    layers[1].load_state_dict(layers[0].state_dict())
    captured = capture(function)
    for seed in range(2):
        results = []
        for run, layer in zip((captured, function), layers, strict=True):
            layer.zero_grad()
            x = tensors(seed)[0]
            out = run(x, layer)
            out.square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in layer.parameters())])
        for ours, plain in zip(*results, strict=True):
            assert (ours is None) == (plain is None)
            if ours is not None:
                torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
    regions = report_of(captured_of(captured)).expert_regions
    for region in regions:
        assert region.lowered or ".py:" in region.refusal
    return bool(regions) and all(region.lowered for region in regions)


def between(expert, rows, scale):
    return expert.w2(expert.act(expert.w1(rows)) * expert.w3(rows) * scale)


@right
def numbers_between_the_projections(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    pieces = zip(moe.experts, x[order // K].split(counts), weight[:, None].split(counts), strict=True)
    y = torch.cat([between(expert, rows, scale) for expert, rows, scale in pieces])
    return torch.zeros_like(x).index_add(0, order // K, y)


@right
def numbers_of_other_rows_between(x, moe):
    """Each expert's are its own, whatever they belong to."""
    weight, order, counts = sorted_rows(x, moe)
    parts, start, numbers = [], 0, weight.flip(0) * 2
    for expert, count in zip(moe.experts, counts, strict=True):
        scale = numbers[start : start + count].unsqueeze(-1)
        parts.append(between(expert, x[order // K][start : start + count], scale + scale))
        start += count
    return put_back(x, order, torch.cat(parts), weight)


@right
def numbers_of_the_rows_themselves_between(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts = [between(e, rows, rows[:, 1:2]) for e, rows in zip(moe.experts, x[order // K].split(counts), strict=True)]
    return put_back(x, order, torch.cat(parts), weight)


@wrong
def numbers_that_are_written_between(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    parts, start, numbers = [], 0, weight[:, None].clone()
    for expert, count in zip(moe.experts, counts, strict=True):
        parts.append(between(expert, x[order // K][start : start + count], numbers[start : start + count].clone()))
        start += count
        numbers = numbers * (1 + parts[-1].detach().sum())
    return put_back(x, order, torch.cat(parts), weight)


@wrong
def numbers_that_an_expert_has_not(x, moe):
    weight, order, counts = sorted_rows(x, moe)
    pieces = zip(moe.experts, x[order // K].split(counts), weight[:, None].split(counts), strict=True)
    parts = [e(rows) if e is moe.experts[1] else between(e, rows, scale) for e, rows, scale in pieces]
    return put_back(x, order, torch.cat(parts), weight)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    assert lowered(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert not lowered(WRONG[name])


def test_tokens_are_slots_only_where_they_are_distinct(monkeypatch):
    monkeypatch.setattr(proof, "distinct", lambda index: True)
    with pytest.raises(AssertionError):
        lowered(RIGHT["tokens_with_an_expert_twice"])


def test_an_expert_behind_a_branch_that_leaves_the_graph_gets_no_gradient():
    """Third batch: the graph was made for rows at the second expert, which has none: it is left at that branch, and
    what ran before may not have run that expert."""
    runner = Runner("moe_infer_as_list")
    for seed in (0, 1, 3):
        assert not runner.call(seed)
