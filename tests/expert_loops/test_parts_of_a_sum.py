"""What the iterations have added so far, kept by name and read when all is done: a part of the sum, not the sum."""

from __future__ import annotations

import pytest
import torch
from beside_eager import by_gates_alone, compare, regions_of
from module_layers import Layer
from spellings import D, E
from torch.nn.functional import gelu

from moebius import capture
from moebius.api import captured_of, report_of


def by_index_add(x, moe, out, e, token, slot, weight):
    return out.index_add(0, token, moe.experts[e](x[token]) * weight[token, slot, None])


def by_index_put(x, moe, out, e, token, slot, weight):
    return out.index_put((token,), moe.mlps[e](x[token]) * weight[token, slot, None], accumulate=True)


def behind_a_branch(x, moe, out, e, token, slot, weight):
    if token.numel() > 0:
        out = out.index_add(0, token, moe.experts[e](x[token]) * weight[token, slot, None])
    return out


def in_place(x, moe, out, e, token, slot, weight):
    out[token] += moe.experts[e](x[token]) * weight[token, slot, None]
    return out


def dense(x, moe, out, e, token, slot, weight):
    gates = torch.zeros(len(x), E, dtype=x.dtype).index_put((token, torch.full_like(token, e)), weight[token, slot])
    return out + moe.experts[e](x) * gates[:, e, None]


def single(x, moe, out, e, token, slot, weight):
    return out.index_add(0, token, (gelu(x[token]) @ moe.w1[e] @ moe.w2[e])[:, :D] * weight[token, slot, None])


TURNS = [by_index_add, by_index_put, behind_a_branch, in_place, dense, single]
KEPT = [[0], [1, 2], [E - 1], list(range(E))]


def layer(iteration, kept, read):
    def run(x, moe):
        weight, index = moe.route(x)
        out, parts = torch.zeros_like(x), []
        for e, _ in enumerate(moe.experts):
            token, slot = torch.where(index == e)
            out = iteration(x, moe, out, e, token, slot, weight)
            if e in kept:
                parts.append(out)
        return read(out, parts)

    return run


def joined(out, parts):
    return torch.cat([out, *parts], dim=-1)


@pytest.mark.share(4)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("iteration", TURNS)
def test_parts_that_are_read_afterwards(iteration, kept):
    regions_of(layer(iteration, kept, joined))


VIEWS = {
    "rows": lambda out: out[:2],
    "one row": lambda out: out[0],
    "columns": lambda out: out[:, :3],
    "a chunk": lambda out: out.chunk(2, dim=-1)[0],
    "unbound": lambda out: out.unbind(-1)[1],
    "flat": lambda out: out.view(-1)[:5],
    "detached": lambda out: out.detach()[:2],
    "a view of a view": lambda out: out[1:][:, 0],
}


@pytest.mark.share(2)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("iteration", [by_index_add, by_index_put, single])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_parts(view, iteration, kept):
    def seen(x, moe, out, e, token, slot, weight):
        out = iteration(x, moe, out, e, token, slot, weight)
        if e in kept:
            views.append(VIEWS[view](out))
        return out

    views = []

    def run(x, moe):
        views.clear()
        out = layer(seen, [], lambda out, _: out)(x, moe)
        return out * sum(part.sum() * (i + 1) for i, part in enumerate(views))

    regions_of(run)


def before_it_adds(out, token, y):
    rows = out[token]
    out[token] = rows + y
    return rows


def after_it_has_added(out, token, y):
    out[token] = rows = out[token] + y
    return rows


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("looked_up", [before_it_adds, after_it_has_added])
def test_rows_of_parts(looked_up, detached):
    """The rows that an iteration itself reads of the sum, kept beside it."""

    def run(x, moe):
        weight, index = moe.route(x)
        out, parts = torch.zeros_like(x), []
        for e, expert in enumerate(moe.experts):
            token, slot = torch.where(index == e)
            rows = looked_up(out, token, expert(x[token]) * weight[token, slot, None])
            parts.append(rows.detach() if detached else rows)
        return out * sum(part.sum() * (i + 1) for i, part in enumerate(parts))

    regions_of(run)


def gated(x, moe):
    weight, index = moe.route(x)
    return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


@pytest.mark.parametrize("read", [joined, lambda out, parts: out + parts[0].detach(), lambda out, parts: parts[0]])
def test_parts_of_dense_experts(read, monkeypatch):
    def run(x, moe):
        gates, out, parts = gated(x, moe), torch.zeros_like(x), []
        for e, expert in enumerate(moe.experts):
            out = out + expert(x) * gates[:, e, None]
            parts.append(out)
        return read(out, parts)

    compare(run)
    by_gates_alone(monkeypatch)
    assert not compare(run)[1]


@pytest.mark.parametrize("form", ["added", "index_add"])
@pytest.mark.parametrize("hook", [lambda g: g * 2, None])
@pytest.mark.parametrize("alone", [False, True])
def test_parts_that_are_given_out(form, hook, alone, monkeypatch):
    """A part that a caller gets, or that a gradient hook was put on, with the backward outside."""

    def run(x, moe):
        weight, index = moe.route(x)
        gates, out, first = gated(x, moe), torch.zeros_like(x), None
        for e, expert in enumerate(moe.experts):
            token, slot = torch.where(index == e)
            if form == "added":
                out = out + expert(x) * gates[:, e, None]
            else:
                out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
            first = out if e == 1 else first
        if hook is not None:
            first.register_hook(hook)
        return out, first

    def gradients(function, layer):
        torch.manual_seed(3)
        layer.zero_grad()
        x = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
        out, first = function(x, layer)
        (of_first,) = torch.autograd.grad(out.square().sum(), [first], retain_graph=True)
        out.square().sum().backward()
        return [out, first, of_first, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    if alone:
        by_gates_alone(monkeypatch)
    torch.manual_seed(1)
    layers = [Layer().double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    captured = capture(run)
    found, plain = gradients(captured, layers[0]), gradients(run, layers[1])
    assert len(found) == len(plain)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    lowered = any(region.lowered for region in report_of(captured_of(captured)).expert_regions)
    assert form != "added" or lowered is not alone


@pytest.mark.parametrize("iteration", [by_index_add, by_index_put, in_place])
def test_the_whole_sum_may_be_read_twice(iteration):
    assert compare(layer(iteration, [E - 1], joined)) == (1, True)
