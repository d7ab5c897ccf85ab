"""Layers of experts that are experts themselves (lowering/experts/nested.py): each runs in a branch on its own tokens.

Equal to eager in float64 with every gradient, a missing one included. Not lowered where the branch is given one memory
by two names, or where what the operator would keep is written before backward.
"""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import E, K

from moebius.lowering.experts import nested


def skipped(experts, x, weight, index):
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


def every_one(experts, x, weight, index):
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(index == e)
        out[token] += expert(x[token]) * weight[token, slot, None]
    return out


def in_order(experts, x, weight, index):
    order = index.flatten().argsort(stable=True)
    pieces = x[order // K].split(index.flatten().bincount(minlength=E).tolist())
    y = torch.cat([experts[e](rows) for e, rows in enumerate(pieces)])
    return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])


def on_all_tokens(experts, x, weight, index):
    gates = x.new_zeros(len(x), E).scatter(1, index, weight)
    return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(experts))


INNER = skipped, every_one, in_order, on_all_tokens
PUT = {
    "set": operator.setitem,
    "added": lambda out, token, y: out.index_add_(0, token, y),
    "in_a_view": lambda out, token, y: out.view(1, *out.shape)[0].index_add_(0, token, y),
}
ASKED = {
    "none": lambda token: token.numel() == 0,
    "few": lambda token: len(token) < 2,
}


def layers_of(moe):
    return moe.experts, moe.biased, moe.mlps


def grouped(inner, put, asked, route_inside=True, changed=False):
    def layer(x, moe):
        out, chosen = torch.zeros_like(x), (x.detach()[:, 0] * 10).long().abs() % 3
        weights, indices = moe.route(x)
        for group, experts in enumerate(layers_of(moe)):
            token = torch.where(chosen == group)[0]
            rows = x[token]
            if asked(token):
                continue
            weight, index = moe.route(rows) if route_inside else (weights[token], indices[token])
            put(out, token, inner(experts, rows, weight, index))
            if changed:
                x = x * 1.1
        return out + x * 0.5

    return layer


EVERY = [
    one for one in itertools.product(INNER, PUT, ASKED, (False, True), (False, True))
    if one[0] is not in_order or one[3]  # (else how many bins there are is not known there)
]  # fmt: skip


@pytest.mark.share(8)
@pytest.mark.parametrize("inner, put, asked, inside, changed", EVERY)
def test_nested(inner, put, asked, inside, changed):
    graphs, regions = regions_of(grouped(inner, PUT[put], ASKED[asked], inside, changed))
    assert graphs == 1 and sum(region.lowered for region in regions) == 3, regions
    assert len(regions) == 3 or inner is on_all_tokens, regions  # (sums of its layers are looked at as one layer, too)


def test_without_it_they_are_not_lowered(monkeypatch):
    layer = grouped(skipped, PUT["added"], ASKED["none"])
    monkeypatch.setattr(nested, "may_have_experts", lambda body: False)
    assert compare(layer) == (1, False)


def one_memory_by_two_names(x, moe):
    """What an inner expert adds is what the next one reads."""
    _, index = moe.route(x)
    y = x * 1.0
    same = y.view(1, *y.shape)[0]
    for group, experts in enumerate(layers_of(moe)):
        if (index[:, 0] == group).any():
            for e, expert in enumerate(experts):
                token = torch.where(index == e)[0]
                if token.numel() > 0:
                    same.index_add_(0, token, expert(y[token]))
    return y * x


def test_one_memory_by_two_names(monkeypatch):
    assert not compare(one_memory_by_two_names)[1]
    copied = nested.copied

    def apart(branch, storage):
        made = copied(branch, storage)
        for node in made.graph.find_nodes(op="placeholder"):
            node.meta["memory"] = node.name
        return made

    monkeypatch.setattr(nested, "copied", apart)
    with pytest.raises(AssertionError):
        compare(one_memory_by_two_names)


def rows_written_before_backward(x, moe):
    """Plain autograd keeps each expert's copy of its rows, and the operator would keep them all as they are."""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for group, experts in enumerate(layers_of(moe)):
        token = torch.where(index[:, 0] == group)[0]
        rows = x[token]
        if token.numel() > 0:
            out[token] = skipped(experts, rows, weight[token], index[token])
        with torch.no_grad():
            rows.mul_(0)
    return out * x


def test_rows_written_before_backward(monkeypatch):
    assert compare(rows_written_before_backward)[0] == 1
    monkeypatch.setattr(nested, "writer_before_backward", lambda *_: None)
    with pytest.raises(RuntimeError):
        compare(rows_written_before_backward)
