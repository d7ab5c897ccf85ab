"""Layers of experts as functions of x [T, D] and the modules of a ``Held``, as models and people write them: in
other words than those of structures.py. The outcomes are those of spellings.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from module_layers import MLP, SwiGLU
from spellings import CAPTURED, LOWERED, PROJECTED, D, E, K, N
from torch import nn
from torch.nn import functional as F

HELD: dict[str, tuple[Callable, str]] = {}


def held(outcome: str):
    def add(function):
        HELD[function.__name__] = function, outcome
        return function

    return add


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D)

    def forward(self, x):
        return self.b(self.a(x))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, N), nn.Linear(N, D)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.down(F.relu(self.up(self.norm(x))).square()))


class OneMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 2 * N), nn.Linear(N, D)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.noise = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(E))
        self.mlps = nn.ModuleList(MLP() for _ in range(E))
        self.ones = nn.ModuleList(OneMatrix() for _ in range(E))
        self.normed = nn.ModuleList(Normed() for _ in range(E))
        self.low = nn.ModuleList(LowRank() for _ in range(E))
        self.named = nn.ModuleDict({f"e{i}": SwiGLU() for i in range(E)})
        self.w1 = nn.Parameter(torch.randn(E, D, N))
        self.w3 = nn.Parameter(torch.randn(E, D, N))
        self.w2 = nn.Parameter(torch.randn(E, N, D))
        self.b1 = nn.Parameter(torch.randn(E, N))
        self.b2 = nn.Parameter(torch.randn(E, D))
        self.shared, self.shared_gate = SwiGLU(), nn.Linear(D, 1)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("seen", torch.zeros(E))


def route(x, m, norm=True):
    w, i = m.gate(x).softmax(-1).topk(K, -1)
    return (w / w.sum(-1, keepdim=True) if norm else w), i


@held(LOWERED)
def pieces_of_hits(x, m):
    """loop over hits, pieces and positions appended, cat at the end"""
    w, idx = route(x, m)
    mask = F.one_hot(idx, E).permute(2, 1, 0)
    hits = mask.sum((1, 2)).nonzero().flatten().tolist()
    ys, ts = [], []
    for e in hits:
        k, t = torch.where(mask[e])
        ys.append(m.experts[e](x[t]) * w[t, k].unsqueeze(-1))
        ts.append(t)
    return torch.zeros_like(x).index_add(0, torch.cat(ts), torch.cat(ys))


@held(LOWERED)
def pieces_of_unique(x, m):
    """unique experts, three lists, cat, then scatter_add_ with expand"""
    w, idx = route(x, m)
    flat, fw = idx.view(-1), w.view(-1)
    toks = torch.arange(x.shape[0]).repeat_interleave(K)
    rows, pos, ws = [], [], []
    for e in flat.unique():
        at = (flat == e).nonzero(as_tuple=True)[0]
        rows.append(m.experts[int(e)](x[toks[at]]))
        pos.append(toks[at])
        ws.append(fw[at])
    y = torch.cat(rows) * torch.cat(ws)[:, None]
    return torch.zeros_like(x).scatter_add_(0, torch.cat(pos)[:, None].expand_as(y), y)


@held(LOWERED)
def loss_after_continue(x, m):
    """a loss of each expert with rows, after `continue`"""
    w, idx = route(x, m)
    out, aux = torch.zeros_like(x), 0.0
    for e in range(E):
        t, k = torch.where(idx == e)
        if t.numel() == 0:
            continue
        g = w[t, k]
        out.index_add_(0, t, m.experts[e](x[t]) * g[:, None])
        aux = aux + g.mean() * len(t) / x.shape[0]
    return out + aux * 0.01


@held(LOWERED)
def loss_tensor_after_continue(x, m):
    """the same with a tensor and `+=`, kept before the expert"""
    w, idx = route(x, m)
    out, aux = torch.zeros_like(x), x.new_zeros(())
    for e, expert in enumerate(m.experts):
        rows, slot = (idx == e).nonzero(as_tuple=True)
        if not rows.numel():
            continue
        aux += w[rows, slot].sum() ** 2
        out[rows] += expert(x[rows]) * w[rows, slot, None]
    return out * (1 + aux)


@held(LOWERED)
def counter_after_continue(x, m):
    """a Python counter of experts used"""
    w, idx = route(x, m)
    out, used = torch.zeros_like(x), 0
    for e in range(E):
        t, k = torch.where(idx == e)
        if t.shape[0] == 0:
            continue
        used += 1
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out / used


@held(LOWERED)
def buffer_after_continue(x, m):
    """a buffer of counts written after `continue`"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        if len(t) == 0:
            continue
        m.seen[e] += t.size(0)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def one_hot_of_number(x, m):
    """`F.one_hot(torch.as_tensor(e), E)` picks a column of gates"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, idx, w)
    out = torch.zeros_like(x)
    for e in range(E):
        pick = F.one_hot(torch.as_tensor(e), E).to(x.dtype)
        out = out + m.experts[e](x) * (gates @ pick).unsqueeze(-1)
    return out


@held(LOWERED)
def one_hot_of_number_rows(x, m):
    """the same with rows by nonzero"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter_(1, idx, w)
    out = torch.zeros_like(x)
    for e in range(E):
        g = (gates * F.one_hot(torch.as_tensor(e), E)).sum(-1)
        t = g.nonzero().squeeze(-1)
        out.index_add_(0, t, m.mlps[e](x[t]) * g[t, None])
    return out


@held(LOWERED)
def int32_beside_long(x, m):
    """int32 experts, long tokens"""
    w, idx = route(x, m)
    idx32 = idx.to(torch.int32).flatten()
    order = torch.argsort(idx32, stable=True)
    tok = torch.div(order, K, rounding_mode="floor").to(torch.int32)
    counts = torch.bincount(idx32, minlength=E)
    out, start = torch.zeros_like(x), 0
    for e, n in enumerate(counts.tolist()):
        t = tok[start : start + n]
        y = m.experts[e](x[t]) * w.flatten()[order[start : start + n]][:, None]
        out.index_add_(0, t.long(), y)
        start += n
    return out


@held(LOWERED)
def int32_where(x, m):
    """`torch.where(index32 == e)` with an int32 index_add"""
    w, idx = route(x, m)
    idx = idx.int()
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        t32 = t.int()
        out.index_add_(0, t32, m.experts[e](x.index_select(0, t32)) * w[t, k, None])
    return out


@held(LOWERED)
def batched_bt(x, m):
    """[B, T, D] kept, a mask [B, T] per expert"""
    h = x.view(2, -1, D)
    w, idx = route(h, m)
    out = torch.zeros_like(h)
    for e in range(E):
        mask = (idx == e).any(-1)
        if mask.any():
            g = (w * (idx == e)).sum(-1)
            out[mask] += m.experts[e](h[mask]) * g[mask].unsqueeze(-1)
    return out.view_as(x)


@held(LOWERED)
def batched_where3(x, m):
    """[B, T, D] kept, three index vectors"""
    h = x.view(2, -1, D)
    w, idx = route(h, m)
    out = torch.zeros_like(h)
    for e, expert in enumerate(m.experts):
        b, t, k = torch.where(idx == e)
        out[b, t] += expert(h[b, t]) * w[b, t, k, None]
    return out.flatten(0, 1)


@held(LOWERED)
def batched_put(x, m):
    """[B, T, D], `index_put_(…, accumulate=True)`"""
    h = x.view(2, -1, D)
    w, idx = route(h, m)
    out = torch.zeros_like(h)
    for e in range(E):
        b, t, k = (idx == e).nonzero(as_tuple=True)
        if b.numel() == 0:
            continue
        out.index_put_((b, t), m.mlps[e](h[b, t]) * w[b, t, k].unsqueeze(-1), accumulate=True)
    return out.reshape(-1, D)


@held(LOWERED)
def tensor_split_ends(x, m):
    """argsort, bincount, cumsum, tensor_split with list of ends, inverse order"""
    w, idx = route(x, m)
    flat = idx.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=E).cumsum(0)[:-1].tolist()
    parts = x[order // K].tensor_split(ends)
    y = torch.cat([expert(p) for expert, p in zip(m.experts, parts, strict=True)])
    back = torch.empty_like(y)
    back[order] = y
    return (back.view(-1, K, D) * w[..., None]).sum(1)


@held(LOWERED)
def searchsorted_bounds(x, m):
    """sorted values, searchsorted left and right"""
    w, idx = route(x, m)
    vals, order = idx.flatten().sort(stable=True)
    e_ids = torch.arange(E)
    lo = torch.searchsorted(vals, e_ids, right=False)
    hi = torch.searchsorted(vals, e_ids, right=True)
    out = torch.zeros_like(x)
    for e in range(E):
        sel = order[lo[e] : hi[e]]
        t = sel.div(K, rounding_mode="trunc")
        out.index_add_(0, t, m.ones[e](x[t]) * w.view(-1)[sel, None])
    return out


@held(LOWERED)
def counts_tolist_zip(x, m):
    """`for expert, n, rows in zip(experts, counts.tolist(), x.split(counts.tolist()))`"""
    w, idx = route(x, m)
    flat = idx.flatten()
    order = flat.argsort()
    counts = flat.bincount(minlength=E).tolist()
    ys = []
    for expert, rows, g in zip(m.experts, x[order // K].split(counts), w.flatten()[order].split(counts), strict=True):
        ys.append(expert(rows) * g.unsqueeze(1))
    return torch.zeros_like(x).index_add_(0, order // K, torch.cat(ys, 0))


@held(LOWERED)
def counts_offset_skip(x, m):
    """counts.tolist(), `if n == 0: continue`, offset kept, pieces appended"""
    w, idx = route(x, m)
    flat = idx.flatten()
    order = flat.argsort()
    counts = flat.bincount(minlength=E)
    xs, off, ys = x[order // K], 0, []
    for e, n in enumerate(counts.tolist()):
        if n == 0:
            continue
        ys.append(m.experts[e](xs[off : off + n]))
        off += n
    y = torch.cat(ys) * w.flatten()[order, None]
    out = torch.zeros_like(x)
    return out.index_add(0, order // K, y)


@held(LOWERED)
def counts_dict(x, m):
    """a dict of counts, iterated by items, hits only"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    counts = {e: n for e, n in enumerate(torch.bincount(idx.flatten(), minlength=E).tolist()) if n > 0}
    for e in counts:
        t, k = torch.where(idx == e)
        out.index_add_(0, t, m.named[f"e{e}"](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def gshard(x, m):
    """GShard: top-2, cumsum positions, capacity, dispatch and combine [T, E, C] by einsum"""
    probs = m.gate(x).softmax(-1)
    w, idx = probs.topk(2, -1)
    cap = 2 * math.ceil(x.shape[0] / E)
    onehot = F.one_hot(idx, E)
    pos = (onehot.transpose(0, 1).reshape(-1, E).cumsum(0) - 1).view(2, -1, E).transpose(0, 1)
    keep = onehot * (pos < cap)
    w = w / w.sum(-1, keepdim=True).clamp(min=1e-9)
    slot = (pos * keep).sum(-1)
    combine = torch.einsum("tk,tke,tkc->tec", w, keep.to(x.dtype), F.one_hot(slot, cap).to(x.dtype))
    dispatch = (combine > 0).to(x.dtype)
    xe = torch.einsum("tec,td->ecd", dispatch, x)
    h = F.silu(torch.einsum("ecd,edn->ecn", xe, m.w1)) * torch.einsum("ecd,edn->ecn", xe, m.w3)
    ye = torch.einsum("ecn,end->ecd", h, m.w2)
    return torch.einsum("tec,ecd->td", combine, ye)


@held(LOWERED)
def switch_capacity(x, m):
    """Switch: top-1, capacity, a loop over dispatched buffers, dropped tokens pass"""
    probs = m.gate(x).softmax(-1)
    p, idx = probs.max(-1)
    cap = int(1.25 * x.shape[0] / E) + 1
    onehot = F.one_hot(idx, E)
    pos = (onehot.cumsum(0) * onehot).sum(-1) - 1
    kept = pos < cap
    buf = x.new_zeros(E * cap, D)
    dest = (idx * cap + pos)[kept]
    buf = buf.index_copy(0, dest, x[kept])
    ys = torch.stack([m.experts[e](b) for e, b in enumerate(buf.view(E, cap, D))]).view(-1, D)
    out = x.clone()
    out[kept] = ys[dest] * p[kept].unsqueeze(-1)
    return out


@held(LOWERED)
def capacity_in_loop(x, m):
    """each expert takes its first `cap` tokens"""
    w, idx = route(x, m)
    cap = 6
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        t, k = t[:cap], k[:cap]
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def drop_lowest(x, m):
    """each expert keeps the `cap` tokens of largest weight"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, idx, w)
    out = torch.zeros_like(x)
    for e in range(E):
        g, t = gates[:, e].topk(min(4, x.shape[0]))
        out = out.index_add(0, t, m.experts[e](x[t]) * g[:, None])
    return out


@held(LOWERED)
def index_copy_combine(x, m):
    """index_copy_ into [T*K, D]"""
    w, idx = route(x, m)
    flat = idx.flatten()
    rep = x.repeat_interleave(K, 0)
    buf = torch.zeros(flat.numel(), D, dtype=x.dtype)
    for e in range(E):
        at = (flat == e).nonzero().flatten()
        buf.index_copy_(0, at, m.experts[e](rep[at]))
    return torch.bmm(w.unsqueeze(1), buf.view(-1, K, D)).squeeze(1)


@held(LOWERED)
def masked_scatter_combine(x, m):
    """masked_scatter into [T, K, D] per expert"""
    w, idx = route(x, m)
    xk = x.unsqueeze(1).expand(-1, K, -1)
    out = torch.zeros_like(xk)
    for e in range(E):
        mask = (idx == e).unsqueeze(-1)
        y = m.experts[e](xk[idx == e])
        out = out.masked_scatter(mask.expand_as(out), y)
    return (out * w.unsqueeze(-1)).sum(1)


@held(LOWERED)
def where_combine(x, m):
    """torch.where over slots: every expert on all tokens"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for k in range(K):
        y = torch.zeros_like(x)
        for e in range(E):
            y = torch.where((idx[:, k] == e).unsqueeze(-1), m.experts[e](x), y)
        out = out + w[:, k : k + 1] * y
    return out


@held(LOWERED)
def scatter_slots(x, m):
    """`scatter` of rows into [T*K, D] by an index of the same shape"""
    w, idx = route(x, m)
    flat = idx.view(-1)
    order = torch.argsort(flat)
    ys, at = [], 0
    for e, n in enumerate(torch.bincount(flat, minlength=E).tolist()):
        ys.append(m.mlps[e](x[order[at : at + n] // K]))
        at += n
    y = torch.cat(ys)
    y = torch.zeros_like(y).scatter(0, order[:, None].repeat(1, D), y)
    return y.view(-1, K, D).mul(w[..., None]).sum(dim=1)


@held(LOWERED)
def gather_back(x, m):
    """sorted rows taken back by gather of the inverse order"""
    w, idx = route(x, m)
    flat = idx.view(-1)
    order = torch.argsort(flat)
    inv = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    sizes = torch.bincount(flat, minlength=E).tolist()
    y = torch.cat([e(c) for e, c in zip(m.experts, torch.split(x[order // K], sizes), strict=True)])
    y = y.gather(0, inv[:, None].expand(-1, D))
    return (y.unflatten(0, (-1, K)) * w[..., None]).sum(1)


@held(LOWERED)
def bmm_all(x, m):
    """bmm with stacked weights for all tokens, gates by scatter"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(-1, idx, w)
    h = torch.baddbmm(m.b1.unsqueeze(1), x.expand(E, -1, -1), m.w1)
    y = torch.baddbmm(m.b2.unsqueeze(1), F.gelu(h), m.w2)
    return (y * gates.t().unsqueeze(-1)).sum(0)


@held(LOWERED)
def einsum_all(x, m):
    """einsum `td,edn->ten`, combined by `te,ted->td`"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(-1, idx, w)
    h = F.silu(torch.einsum("td,edn->ten", x, m.w1)) * torch.einsum("td,edn->ten", x, m.w3)
    return torch.einsum("te,ted->td", gates, torch.einsum("ten,end->ted", h, m.w2))


@held(LOWERED)
def einsum_gathered(x, m):
    """weights of the chosen gathered: einsum `td,tkdn->tkn`"""
    w, idx = route(x, m)
    h = F.silu(torch.einsum("td,tkdn->tkn", x, m.w1[idx])) * torch.einsum("td,tkdn->tkn", x, m.w3[idx])
    return torch.einsum("tkn,tknd,tk->td", h, m.w2[idx], w)


@held(LOWERED)
def functional_call_loop(x, m):
    """`functional_call(base, stacked params[e])` in a loop"""
    w, idx = route(x, m)
    params, _ = torch.func.stack_module_state(list(m.mlps))
    base = m.mlps[0]
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        y = torch.func.functional_call(base, {n: p[e] for n, p in params.items()}, (x[t],))
        out.index_add_(0, t, y * w[t, k, None])
    return out


@held(LOWERED)
def vmap_stacked(x, m):
    """vmap over experts of stacked weights"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(-1, idx, w)

    def one(w1, b1, w2, g):
        return (F.relu(x @ w1 + b1) @ w2) * g[:, None]

    return torch.vmap(one)(m.w1, m.b1, m.w2, gates.T).sum(0)


@held(LOWERED)
def module_dict_items(x, m):
    """`for i, (name, expert) in enumerate(moe.named.items())`"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for i, (_, expert) in enumerate(m.named.items()):
        sel = idx == i
        t = sel.any(1).nonzero().view(-1)
        if t.size(0):
            out[t] = out[t] + expert(x[t]) * (w * sel)[t].sum(1, keepdim=True)
    return out


@held(PROJECTED)
def normed_experts(x, m):
    """LayerNorm and dropout inside the expert (evaluation), squared relu"""
    w, idx = route(x, m)
    m.eval()
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.normed):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, expert(x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def dropout_in_training(x, m):
    """dropout drawn in each expert"""
    w, idx = route(x, m)
    m.train()
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.normed):
        t, k = torch.where(idx == e)
        if t.numel() == 0:
            continue
        out.index_add_(0, t, expert(x[t]) * w[t, k, None])
    return out


@held(CAPTURED)
def mixed_kinds(x, m):
    """experts of two kinds in one list"""
    w, idx = route(x, m)
    experts = [m.experts[0], m.mlps[1], m.experts[2], m.mlps[3]]
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, expert(x[t]) * w[t, k, None])
    return out


@held(CAPTURED)
def other_activations(x, m):
    """each expert has an activation of its own"""
    w, idx = route(x, m)
    acts = [F.relu, F.silu, torch.tanh, F.gelu]
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        h = acts[e](x[t] @ m.w1[e] + m.b1[e])
        out.index_add_(0, t, (h @ m.w2[e] + m.b2[e]) * w[t, k, None])
    return out


@held(LOWERED)
def shared_and_gated(x, m):
    """one shared expert with a sigmoid gate, one shared by all, and routed ones"""
    w, idx = route(x, m)
    out = m.shared(x) * m.shared_gate(x).sigmoid() + m.low[0](x)
    y = torch.zeros_like(x)
    for e in idx.unique().tolist():
        t, k = (idx == e).nonzero().unbind(-1)
        y[t] += m.experts[e](x[t]) * w[t, k].unsqueeze(-1)
    return out + y
