"""More layers as functions (layers_as_functions.py), written by someone who had not read what recognises them."""

from __future__ import annotations

from itertools import accumulate

import torch
from layers_as_functions import held, route
from spellings import BROKEN, LOWERED, D, E, K
from torch import nn
from torch.nn import functional as F


@held(LOWERED)
def while_and_continue(x, m):
    """`while` that counts first, `continue` for an expert without rows"""
    w, index = route(x, m)
    out, e = torch.zeros_like(x), -1
    while e < E - 1:
        e += 1
        t, k = torch.where(index == e)
        if t.numel() == 0:
            continue
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def while_something_is_left(x, m):
    """a list of what is left to do, `if not chosen.any(): continue`"""
    w, index = route(x, m)
    out, left = torch.zeros_like(x), list(range(E))
    while left:
        e = left.pop()
        chosen = index == e
        if not chosen.any():
            continue
        t, k = chosen.nonzero(as_tuple=True)
        out[t] += w[t, k, None] * m.experts[e](x[t])
    return out


@held(LOWERED)
def early_return_before_enumerate(x, m):
    """nothing routed: `return x`; else all gates above a threshold"""
    p = m.gate(x).sigmoid()
    routed = p > 0.45
    if not routed.any():
        return x
    out = x.clone()
    for e, expert in enumerate(m.experts):
        rows = routed[:, e].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        out[rows] = out[rows] + p[rows, e, None] * expert(x[rows])
    return out


@held(LOWERED)
def router_z_loss_of_each_expert(x, m):
    """`logsumexp` of an expert's rows, averaged over those that ran"""
    logits = m.gate(x)
    w, index = logits.softmax(-1).topk(K)
    out, z, used = torch.zeros_like(x), 0.0, 0
    for e in range(E):
        t, k = torch.where(index == e)
        if t.numel() == 0:
            continue
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
        z = z + logits[t].logsumexp(-1).square().mean()
        used += 1
    return out + 0.01 * z / max(used, 1)


@held(BROKEN)
def hits_and_a_number(x, m):
    """a loss that is a number until the first expert that was hit"""
    w, index = m.gate(x).softmax(-1).topk(K)
    out, loss = torch.zeros_like(x), 0
    for e in F.one_hot(index, E).sum((0, 1)).nonzero().flatten().tolist():
        t, k = torch.where(index == e)
        y = m.experts[e](x[t])
        out.index_add_(0, t, y * w[t, k, None])
        loss += y.pow(2).mean()
    return out + loss / E


@held(LOWERED)
def one_hot_of_each_slot(x, m):
    """`one_hot(index) @ one_hot(torch.tensor(e))` says which slots are the expert's"""
    w, index = route(x, m)
    out = torch.zeros_like(x)
    for e in range(E):
        hits = F.one_hot(index, E).to(x.dtype) @ F.one_hot(torch.tensor(e), E).to(x.dtype)
        t, k = hits.nonzero(as_tuple=True)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def ends_by_accumulate(x, m):
    """`itertools.accumulate` of counts, results written into slices"""
    w, index = route(x, m)
    flat = index.reshape(-1)
    order = torch.argsort(flat)
    counts = torch.zeros(E, dtype=torch.long).scatter_add_(0, flat, torch.ones_like(flat)).tolist()
    ends = list(accumulate(counts))
    xs = x[order // K]
    ys = torch.zeros_like(xs)
    for e in range(E):
        lo, hi = ends[e] - counts[e], ends[e]
        ys[lo:hi] = m.experts[e](xs[lo:hi])
    return torch.zeros_like(x).index_add_(0, order // K, ys * w.reshape(-1)[order].unsqueeze(-1))


@held(LOWERED)
def a_sum_for_each_expert(x, m):
    """`torch.stack(list(map(one, range(E)))).sum(0)` of whole results"""
    w, index = route(x, m)

    def one(e):
        t, k = (index == e).nonzero().unbind(-1)
        return torch.zeros_like(x).index_add(0, t, m.experts[e](x[t]) * w[t, k][:, None])

    return torch.stack(list(map(one, range(E)))).sum(0)


@held(LOWERED)
def nothing_to_begin_with(x, m):
    """the last expert first, `y if out is None else out + y`"""
    w, index = route(x, m)
    out = None
    for e, expert in reversed(list(enumerate(m.experts))):
        t, k = (index == e).nonzero(as_tuple=True)
        y = torch.zeros_like(x).index_put((t,), expert(x[t]) * w[t, k, None], accumulate=True)
        out = y if out is None else out + y
    return out


@held(LOWERED)
def only_those_with_rows(x, m):
    """list comprehensions with `if len(t)`, joined"""
    w, index = route(x, m)
    rows = [torch.where(index == e) for e in range(E)]
    ys = [expert(x[t]) * w[t, k, None] for expert, (t, k) in zip(m.experts, rows, strict=True) if len(t)]
    ts = [t for t, _ in rows if len(t)]
    return torch.zeros_like(x).index_add_(0, torch.cat(ts), torch.cat(ys))


@held(LOWERED)
def padded_pieces(x, m):
    """`pad_sequence` of the sorted pieces, an expert on each padded one, cut again"""
    g, e = m.gate(x).softmax(-1).max(-1)
    order = e.argsort(stable=True)
    sizes = e.bincount(minlength=E).tolist()
    padded = nn.utils.rnn.pad_sequence(list(x[order].split(sizes)), batch_first=True)
    y = torch.cat([expert(p)[:n] for expert, p, n in zip(m.experts, padded, sizes, strict=True)])
    return y[order.argsort()] * g[:, None]


@held(LOWERED)
def straight_through(x, m):
    """a gate of 1 with the weight's gradient, rows by `masked_select` and `masked_scatter`"""
    v, e = m.gate(x).softmax(-1).max(-1)
    y = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = (e == k)[:, None]
        y = y.masked_scatter(mask, expert(x.masked_select(mask).view(-1, D)))
    return y * (1.0 + v - v.detach())[:, None]


@held(LOWERED)
def two_levels(x, m):
    """a group of experts for each token, and one expert of it"""
    group, chosen = m.gate(x).view(-1, 2, E // 2).softmax(-1).sum(-1).max(-1)
    out = torch.zeros_like(x)
    for g in range(2):
        rows = (chosen == g).nonzero().flatten()
        if rows.numel() == 0:
            continue
        own = x[rows]
        weight, index = m.noise(own)[:, g * E // 2 : (g + 1) * E // 2].softmax(-1).max(-1)
        part = torch.zeros_like(own)
        for e in range(E // 2):
            sub = (index == e).nonzero().flatten()
            if sub.numel():
                part[sub] = m.experts[g * E // 2 + e](own[sub]) * weight[sub, None]
        out[rows] = part * group[rows, None]
    return out
