"""Experts of one projection or many, with low-rank additions, norms, residuals, routing weights or dropout between, and
the loops that run them, for tests of projections of sorted rows."""

from __future__ import annotations

import torch
from beside_eager import regions_of
from spellings import D, E, K, N
from torch import nn
from torch.nn import functional
from torch.nn.functional import dropout, gelu, layer_norm, linear, relu, silu

from moebius.lowering.experts.rows_written import KERNEL

R = 2  # rank of low-rank additions


class Experts(nn.Module):
    """Parameters of all experts in one tensor each, and the same for each expert apart."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.base, self.norm = nn.Linear(D, N), nn.LayerNorm(D)
        sizes = {
            "up": (N, D), "more": (N, N), "gated": (2 * N, D), "down": (D, N), "square": (D, D), "low": (R, D),
            "high": (N, R), "low_n": (R, N), "high_d": (D, R), "b_up": (N,), "b_down": (D,), "scale": (D,),
        }  # fmt: skip
        self.whole = nn.ParameterDict({name: torch.randn(E, *size) / 2 for name, size in sizes.items()})
        self.apart = nn.ModuleList(
            nn.ParameterDict({name: torch.randn(size) / 2 for name, size in sizes.items()}) for _ in range(E)
        )

    def route(self, x):
        return torch.topk(self.gate(x).softmax(-1), K)

    def of(self, e, whole):
        return Row(self.whole, e) if whole else self.apart[e]


class Row:
    """Expert e's row of each parameter, taken where it is used."""

    def __init__(self, whole, e):
        self.whole, self.e = whole, e

    def __getitem__(self, name):
        return self.whole[name][self.e]


# ----------------------------------------------------------------------------------------------------------------------
# What an expert does with its rows h, its own parameters p and its rows' weights w [S, 1]
# ----------------------------------------------------------------------------------------------------------------------


def single(h, p, w, moe):
    return linear(h, p["square"], p["b_down"]) * w


def transposed(h, p, w, moe):
    return (h @ p["square"]) * w


def deep(h, p, w, moe):
    h = relu(linear(h, p["up"], p["b_up"]))
    return linear(relu(linear(h, p["more"])), p["down"]) * w


def normed_before(h, p, w, moe):
    return (h + linear(gelu(linear(layer_norm(h, (D,)), p["up"])), p["down"])) * w


def own_norm_between(h, p, w, moe):
    h = torch.addmm(p["b_up"], h, p["up"].T)
    h = layer_norm(silu(h), (N,), p["b_up"])
    return linear(h, p["down"]) * w


def shared_norm(h, p, w, moe):
    return linear(relu(linear(moe.norm(h), p["up"])), p["down"]) * w


def low_rank(h, p, w, moe):
    a = gelu(linear(h, p["up"]) + 2.0 * linear(linear(h, p["low"]), p["high"]))
    return (linear(a, p["down"]) + linear(linear(a, p["low_n"]), p["high_d"]) * 0.5) * w


def low_rank_of_a_shared_base(h, p, w, moe):
    a = relu(moe.base(h) + linear(linear(h, p["low"]), p["high"]))
    return linear(a, p["down"]) * w


def weighted_between(h, p, w, moe):
    return linear(silu(linear(h, p["up"])) * w, p["down"], p["b_down"])


def weighted_before(h, p, w, moe):
    return linear(silu(linear(h * w, p["up"], p["b_up"])), p["down"], p["b_down"])


def gate_of_another_input(h, p, w, moe):
    gate, up = linear(torch.tanh(h), p["gated"]).chunk(2, -1)
    return linear(layer_norm(silu(gate), (N,)) * up, p["down"]) * w


def columns(h, p, w, moe):
    both = linear(h, p["gated"]).softmax(-1)
    return linear(both[:, :N] - both[..., N:] + both.narrow(1, 1, N), p["down"]) * w


def own_scales(h, p, w, moe):
    return linear(relu(linear(h * (1 + p["scale"]), p["up"])), p["down"]) * p["scale"] * w


def dropping(h, p, w, moe):
    return linear(dropout(relu(linear(h, p["up"])), 0.4), p["down"]) * w


def dropping_three_times(h, p, w, moe):
    h = dropout(h, 0.2)
    h = dropout(gelu(linear(h, p["up"])), 0.5)
    return dropout(linear(h, p["down"], p["b_down"]), 0.3) * w


def dropping_all(h, p, w, moe):
    return linear(dropout(linear(h, p["up"]), 1.0), p["down"]) * w


RIGHT = [single, transposed, deep, normed_before, own_norm_between, shared_norm, low_rank, low_rank_of_a_shared_base,
         weighted_between, weighted_before, gate_of_another_input, columns, own_scales, dropping,
         dropping_three_times, dropping_all]  # fmt: skip
DROPPING = [dropping, dropping_three_times, dropping_all]


# ----------------------------------------------------------------------------------------------------------------------
# Ways to run the experts: each makes a layer of an expert
# ----------------------------------------------------------------------------------------------------------------------


def in_one_tensor(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token], moe.of(e, True), weight[token, slot, None], moe))
        return out

    return layer


def over_hits(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        mask = functional.one_hot(index, E).permute(2, 1, 0)
        for row in mask.sum((1, 2)).nonzero():
            slot, token = torch.where(mask[row[0]])
            out.index_add_(0, token, expert(x[token], moe.of(row[0], True), weight[token, slot, None], moe))
        return out

    return layer


def apart(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            out[token] += expert(x[token], moe.of(e, False), weight[token, slot, None], moe)
        return out

    return layer


def over_hits_in_place(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in index.unique():
            token, slot = torch.where(index == e)
            out[token] += expert(x[token], moe.of(e, True), weight[token, slot, None], moe)
        return out

    return layer


def apart_where_hit(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() > 0:
                out.index_add_(0, token, expert(x[token], moe.of(e, False), weight[token, slot, None], moe))
        return out

    return layer


def sorted_and_cut(expert):
    def layer(x, moe):
        weight, index = moe.route(x)
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=E).tolist()
        rows, scale = x[order // K].split(counts), weight.flatten()[order, None]
        ones = [torch.ones(n, 1, dtype=x.dtype) for n in counts]
        y = torch.cat([expert(rows[e], moe.of(e, False), ones[e], moe) for e in range(E)])
        return torch.zeros_like(x).index_add(0, order // K, y * scale)

    return layer


LOOPS = [in_one_tensor, over_hits, apart, apart_where_hit, over_hits_in_place]


def lowered(layer, kernel=KERNEL):
    _, regions = regions_of(drawing_after(layer), layer=Experts)
    assert regions and len({region.lowered for region in regions}) == 1, regions
    assert not regions[0].lowered or {region.kernel for region in regions} == {kernel}
    return regions[0].lowered


def drawing_after(layer):
    """The layer, and numbers that are drawn behind it: others where it has drawn too many, or too few."""

    def function(x, moe):
        return layer(x, moe) * (1.0 + torch.rand(len(x), 1, dtype=x.dtype))

    return function


def cut_where_counted(x, moe, expert):
    """Slices of sorted rows, experts without rows left out by a branch on data."""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    rows, found, start = x[order // K], [], 0
    for e, count in enumerate(torch.bincount(index.flatten(), minlength=E).tolist()):
        end = start + count
        if count == 0:
            continue
        found.append(expert(rows[start:end], moe.apart[e], 1.0, moe))
        start = end
    return torch.zeros_like(x).index_add(0, order // K, torch.cat(found) * weight.flatten()[order, None])


def masked_where_any(x, moe, expert):
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e in range(E):
        mask = (index == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask], moe.apart[e], 1.0, moe) * gates[mask, e, None]
    return out
