"""Masks [T, E] and other lists of tokens whose experts add in place behind a branch, right and subtly wrong:
``if token.numel() == 0: continue`` … ``out[token] += rows``."""

from __future__ import annotations

import pytest
import torch
from module_layers import Layer
from spellings import E
from table import SEEDS, tensors

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering.experts import hoisted_conditionals


def masks(x, moe):
    weight, index = moe.route(x)
    mask = torch.zeros(len(x), E, dtype=torch.bool).scatter_(1, index, True)
    return mask, torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


def by_squeeze(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero().squeeze(-1)
        if token.numel() == 0:
            continue
        out[token] += gates[token, e].unsqueeze(-1) * expert(x[token])
    return out


def by_where(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.biased):
        token = torch.where(mask[:, e])[0]
        if len(token) > 0:
            out.index_add_(0, token, expert(x[token]) * gates[token, e, None])
    return out


def by_the_gates(x, moe):
    _, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = torch.nonzero(gates[:, e]).flatten()
        if token.shape[0]:
            out.index_add_(0, token, gates[token, e, None] * expert(x[token]))
    return out


def up_to_a_capacity(x, moe):
    mask, gates = masks(x, moe)
    out = x * 1.0
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0][:3]
        if token.numel() == 0:
            continue
        out[token] = expert(x[token]) * gates[token, e, None]
    return out


def a_norm_besides(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() >= 1:
            out[token] += moe.norms[e](x[token] + expert(x[token])) * gates[token, e, None]
    return out


def gates_that_change(x, moe):
    """After each iteration, which does not look at those of the others."""
    mask, gates = masks(x, moe)
    gates = gates.detach()
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


def scaled_by_the_sum(x, moe):
    """The experts do not look at it: what scales their rows stays in its order."""
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token]) * (1.0 + out.sum())
    return out


def detached_in_each_iteration(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros(len(x) + 2, x.shape[1], dtype=x.dtype)[1:-1]
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        out.index_put_((token,), expert(x.detach()[token]) * weight[token, slot, None], accumulate=True)
    return out


RIGHT = [detached_in_each_iteration, by_squeeze, by_where, by_the_gates, a_norm_besides, gates_that_change,
         scaled_by_the_sum]  # fmt: skip


def another_condition(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, other = mask[:, e].nonzero(as_tuple=True)[0], mask[:, (e + 1) % E].nonzero(as_tuple=True)[0]
        if other.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


def more_than_one(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() <= 1:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


def the_other_way_round(x, moe):
    mask, gates = masks(x, moe)
    out = x * 1.0
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() > 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


def beyond_the_tokens(x, moe):
    """Where the expert was not chosen the list says something that may not be looked up."""
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        chosen = mask[:, e].any()
        token = torch.arange(len(x)) + 1000 * ~chosen
        if not chosen:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


def reads_the_sum(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token] + out[token])
    return out


def passes_rows_on(x, moe):
    mask, gates = masks(x, moe)
    x = x * 1.0
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        x[token] += gates[token, e, None] * expert(x[token])
    return x


def writes_the_rows(x, moe):
    mask, gates = masks(x, moe)
    rows, out = x.detach() * 1.0, torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(rows[token])
        rows[token] *= 0.5
    return out


def counts_besides(x, moe):
    mask, gates = masks(x, moe)
    out, load = torch.zeros_like(x), torch.zeros(E, dtype=x.dtype)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
        load[e] += 1.0
    return out * load.sum()


def mask_written_between(x, moe):
    mask, gates = masks(x, moe)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero(as_tuple=True)[0]
        mask[:2] = False
        if token.numel() == 0:
            continue
        out[token] += gates[token, e, None] * expert(x[token])
    return out


BEHIND = [another_condition, more_than_one, the_other_way_round, beyond_the_tokens]
KEPT = [reads_the_sum, passes_rows_on, writes_the_rows]  # fmt: skip


def check(function):
    """(graphs, whether all regions were lowered); result and every gradient, missing ones too, are eager's."""
    moebius.reset()
    torch.manual_seed(1)
    layers = [Layer().double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    captured = capture(function)
    for seed in SEEDS:
        results = []
        for run, layer in zip((captured, function), layers, strict=True):
            layer.zero_grad()
            x = tensors(seed)[0]
            out = run(x, layer)
            out.square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in layer.parameters())])
        for ours, plain in zip(*results, strict=True):
            assert (ours is None) == (plain is None), seed
            if ours is not None:
                torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
    regions = report_of(captured_of(captured)).expert_regions
    return stats(captured).graphs, bool(regions) and all(region.lowered for region in regions)


@pytest.mark.share(6)
@pytest.mark.parametrize("function", RIGHT + BEHIND)
def test_right(function):
    assert check(function) == (1, True)


@pytest.mark.parametrize("function", KEPT)
def test_kept(function):
    assert not check(function)[1]


@pytest.mark.parametrize("function", [counts_besides, mask_written_between, up_to_a_capacity])
def test_equal(function):
    check(function)


def test_who_vouches_for_the_list(monkeypatch):
    """A list that is only good behind the branch is looked up before it, if it is not cut."""
    monkeypatch.setattr(hoisted_conditionals.Opening, "cut", lambda self, key, lookup: self.placed(key))
    with pytest.raises((IndexError, AssertionError)):
        check(beyond_the_tokens)


@pytest.mark.share(4)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "amax"])
def test_reductions(reduce, include_self):
    """Of ``scatter_reduce`` only the sum that keeps what was there adds; of the others the experts are one operator."""

    def function(x, moe):
        weight, index = moe.route(x)
        out = torch.ones_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            rows = moe.experts[e](x[token]) * weight[token, slot, None]
            at = token[:, None].expand(-1, x.shape[1])
            out = out.scatter_reduce(0, at, rows, reduce, include_self=include_self)
        return out

    assert check(function)[1]
