"""Experts in phases: all first projections joined, an activation of the whole, cut up again for the second ones
(JetMoE). One operator, if what is between keeps to rows and the cuts are those of the parts that were joined."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare, regions_of
from spellings import E, K, N
from torch import fx
from torch.nn.functional import gelu, linear, silu

from moebius.lowering.experts import split_phases


def routed(x, moe):
    """(the weight of each sorted row, its token, the sorted rows, how many each expert has)."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    return weight.flatten()[order, None], order // K, x[order // K], index.flatten().bincount(minlength=E).tolist()


def phase(rows, weights, sizes):
    return torch.cat([linear(part, w) for part, w in zip(rows.split(sizes, dim=0), weights, strict=True)], dim=0)


def experts(x, moe, act):
    weight, token, rows, sizes = routed(x, moe)
    y = phase(act(phase(rows, moe.up, sizes)), moe.down, sizes)
    return torch.zeros_like(x).index_add(0, token, y * weight)


def chunks(x, moe):
    return experts(x, moe, lambda h: silu(h.chunk(2, -1)[0]) * h.chunk(2, dim=-1)[1])


def slices(x, moe):
    return experts(x, moe, lambda h: h[:, :N].relu() * h[..., N:].clamp(max=2.0))


def two_joins(x, moe):
    weight, token, rows, sizes = routed(x, moe)
    gate = torch.cat([part @ moe.w1[e] for e, part in enumerate(rows.split(sizes))])
    up = torch.cat([part @ moe.w3[e] for e, part in enumerate(rows.split(sizes))])
    y = torch.cat([part @ moe.w2[e] for e, part in enumerate((silu(gate) * up).split(sizes))])
    return torch.zeros_like(x).index_add(0, token, y * weight)


def without_gate(x, moe):
    weight, token, rows, sizes = routed(x, moe)
    h = torch.cat([part @ moe.w1[e] for e, part in enumerate(rows.split(sizes))])
    y = torch.cat([part @ moe.w2[e] for e, part in enumerate(gelu(2.0 * h).split(sizes))])
    return torch.zeros_like(x).index_add(0, token, y * weight)


def cut_elsewhere(x, moe):
    weight, token, rows, sizes = routed(x, moe)
    h = phase(rows, moe.up, sizes)
    y = phase(silu(h[:, :N]) * h[:, N:], moe.down, sizes[::-1])
    return torch.zeros_like(x).index_add(0, token, y * weight)


def flipped(x, moe):
    return experts(x, moe, lambda h: (silu(h[:, :N]) * h[:, N:]).flip(0))


def mean_of_the_rows(x, moe):
    return experts(x, moe, lambda h: silu(h[:, :N]) * h[:, N:] - h[:, :N].mean(0))


def shares_of_the_rows(x, moe):
    return experts(x, moe, lambda h: h[:, :N].softmax(0) * h[:, N:])


def numbers_of_the_rows(x, moe):
    return experts(x, moe, lambda h: silu(h[:, :N]) * h[:, N:] * torch.arange(len(h))[:, None])


def the_first_row(x, moe):
    return experts(x, moe, lambda h: silu(h[:, :N]) * h[:, N:] * h[:1, :N])


def halved_in_place(x, moe):
    def act(h):
        h[:3].mul_(0.5)
        return silu(h[:, :N]) * h[:, N:]

    return experts(x, moe, act)


def without_gradients(x, moe):
    def act(h):
        with torch.no_grad():
            return silu(h[:, :N]) * h[:, N:]

    return experts(x, moe, act)


def read_besides(x, moe):
    found = []

    def act(h):
        found.append(h)
        return silu(h[:, :N]) * h[:, N:]

    return experts(x, moe, act) + found[0].sum()


WRONG = [cut_elsewhere, flipped, mean_of_the_rows, shares_of_the_rows, numbers_of_the_rows, the_first_row,
         halved_in_place, without_gradients, read_besides]  # fmt: skip


@pytest.mark.parametrize("function", [chunks, slices, two_joins, without_gate])
def test_right(function):
    assert compare(function) == (1, True)


@pytest.mark.parametrize("function", WRONG)
def test_not_the_operator(function):
    """Each projection is lowered for itself: what is between them is of all rows."""
    graphs, regions = regions_of(function)
    assert graphs == 1 and [region.kernel for region in regions] == ["projection by projection"]


def test_what_is_asked(monkeypatch):
    """Without the question another result comes out, or none."""
    monkeypatch.setattr(split_phases, "is_quiet", lambda *_: True)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(without_gradients)


def test_pieces_are_the_parts():
    """A part of one row would go with a piece of many."""
    parts = [fx.Graph().placeholder("part") for _ in range(2)]
    for part, rows in zip(parts, (1, 3), strict=True):
        part.meta["val"] = torch.empty(rows, N)
    assert split_phases.are_cut(parts, [1, 3]) and not split_phases.are_cut(parts, [3, 1])
