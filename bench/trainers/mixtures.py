# mypy: ignore-errors
# ruff: noqa: B023, E741
"""Mixtures as smaller repositories write them: guided gates, experts chosen by tasks, layers that train alone."""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, defaultdict, deque, namedtuple
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, labelled, mlp, rows, script, texts

MIXTURES = "mixtures"


class Guided(nn.Module):
    def __init__(s, d=8, h=16, classes=6, experts=3):
        super().__init__()
        s.assigned = {e: [e, e + 3] for e in range(experts)}
        s.experts = nn.ModuleList(mlp(d, h, classes) for _ in range(experts))
        s.gate = mlp(d, h, experts)
        s.temperature, s.parts, s.n = 1.0, {}, experts

    def forward(s, x, labels=None):
        w = F.softmax(s.gate(x) / s.temperature, dim=1)
        if s.training and labels is not None:
            mask = torch.zeros_like(w)
            for _, label in enumerate(labels.unique()):
                for e, owned in s.assigned.items():
                    if label.item() in owned:
                        mask[labels == label, e] = 1.0
            w = w * (mask + 0.1)
            w = w / (w.sum(1, keepdim=True) + 1e-6)
        outs, norms = [], []
        for expert in s.experts:
            outs.append(expert(x))
            norms.append(0.01 * sum(torch.norm(p, 2) for p in expert.parameters()))
        return torch.sum(torch.stack(outs).permute(1, 0, 2) * w.unsqueeze(-1), 1), w, norms

    def compute_loss(s, out, y, w, norms):
        ce = F.cross_entropy(out, y)
        table = torch.zeros(max(max(s.assigned.values())) + 1, s.n)
        for e, owned in s.assigned.items():
            table[torch.tensor(owned), e] = 1
        l2 = sum(n * m for n, m in zip(norms, table[y].mean(0), strict=True))
        usage = w.mean(0)
        balance = (usage * torch.log(usage * s.n + 1e-6)).sum()
        losses = [ce, l2, balance]
        scaled = [l / (l.detach().abs() + 1e-8) for l in losses]
        s.parts = {k: v.item() for k, v in zip(("ce", "l2", "balance"), losses, strict=True)}
        return sum(a * b for a, b in zip((0.6, 0.2, 0.2), scaled, strict=True)) + ce


@script(MIXTURES)
def guided_by_labels():
    m = Guided()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    tot = {"loss": 0.0, "correct": 0, "n": 0}
    kept, activations = [], defaultdict(list)

    def step(x, y, i):
        m.train()
        o.zero_grad()
        out, w, norms = m(x, y)
        bad = [k for k, t in (("out", out), ("w", w)) if torch.isnan(t).any()]
        if bad:
            raise ValueError(f"NaNs detected in tensors: {bad}")
        loss = m.compute_loss(out, y, w, norms)
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), max_norm=1.0)
        o.step()
        tot["loss"] += loss.item()
        _, predicted = out.max(1)
        tot["n"] += y.size(0)
        tot["correct"] += predicted.eq(y).sum().item()
        kept.append(w.detach())
        if i % 10 == 0:
            a = w.detach().cpu().numpy()
            for e in range(a.shape[1]):
                activations[e].append(float(a[:, e].mean()))
        return loss.item(), 100.0 * tot["correct"] / tot["n"], dict(m.parts)

    return Script(step, [(*b, i) for i, b in enumerate(labelled(8, 6))], [m], 0)


class LogDispatcher:
    def __init__(s, n, gates):
        s.gates, s.n = gates, n
        order, index = torch.nonzero(gates).sort(0)
        _, s.expert = order.split(1, dim=1)
        s.batch = torch.nonzero(gates)[index[:, 1], 0]
        s.sizes = (gates > 0).sum(0).tolist()
        s.weights = torch.gather(gates[s.batch.flatten()], 1, s.expert)

    def dispatch(s, x):
        return torch.split(x[s.batch].squeeze(1), s.sizes, dim=0)

    def combine(s, outs):
        stitched = torch.cat(outs, 0).exp().mul(s.weights)
        zeros = torch.zeros(s.gates.size(0), outs[-1].size(1), requires_grad=True)
        found = zeros.index_add(0, s.batch, stitched.float())
        found[found == 0] = np.finfo(float).eps
        return found.log()


class Collaborative(nn.Module):
    def __init__(s, d=8, out=5, n=6, k=2, h=4, tasks=3):
        super().__init__()
        s.n, s.k, s.h = n, k, h
        s.experts = nn.ModuleList(nn.Sequential(mlp(d, 12, out), nn.Tanh()) for _ in range(n))
        s.w_gate = nn.Parameter(torch.randn(d, n) * 0.1)
        s.task_gate = nn.Parameter(torch.randn(tasks, n) * 0.1)

    def forward(s, x, task):
        mine, logits = task @ s.task_gate, x @ s.w_gate
        _, top = mine.topk(min(s.h + 1, s.n), dim=1)
        mine = mine.scatter(1, top[:, s.h :], mine.detach().min().item())
        logits = logits.scatter(1, top[:, s.h :], logits.detach().min().item()) + mine
        values, index = logits.topk(min(s.k + 1, s.n), dim=1)
        gates = torch.zeros_like(logits, requires_grad=True).scatter(1, index[:, : s.k], values[:, : s.k].softmax(1))
        importance, load = gates.sum(0), (gates > 0).sum(0).float()
        d = LogDispatcher(s.n, gates)
        parts = d.dispatch(x)
        y = d.combine([s.experts[i](parts[i]) for i in range(s.n)])
        cv = lambda v: v.float().var() / (v.float().mean() ** 2 + 1e-10)  # noqa: E731
        return y, (cv(importance) + cv(load)) * 1e-2


@script(MIXTURES)
def experts_of_tasks():
    m = Collaborative()
    o = torch.optim.AdamW(m.parameters(), lr=2e-3)

    def step(x, y, task):
        y_hat, extra = m(x, task)
        loss = F.cross_entropy(y_hat, y) + extra
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.item()

    data = [(*b, F.one_hot(torch.randint(3, (len(b[0]),)), 3).float()) for b in labelled(8, 5)]
    return Script(step, data, [m], 1)


def cumsum_exclusive(t, dim=-1):
    after = -dim - 1
    padded = F.pad(t, (*((0, 0) * after), 1, 0)).cumsum(dim=dim)
    return padded[(..., slice(None, -1), *((slice(None),) * after))]


class DynamicK(nn.Module):
    def __init__(s, d=16, e=4, threshold=0.6):
        super().__init__()
        s.e, s.t = e, threshold
        s.gate = nn.Parameter(torch.randn(d, e))
        s.w1, s.w2 = nn.Parameter(torch.randn(e, d, 24) * 0.1), nn.Parameter(torch.randn(e, 24, d) * 0.1)

    def forward(s, x):
        B, T, _ = x.shape
        E = s.e
        probs = torch.einsum("...bnd,de->...bne", x, s.gate).softmax(dim=-1)
        p, order = torch.sort(probs, -1, descending=True)
        keep = torch.cumsum(p, dim=-1) < s.t
        keep[..., 0] = True
        k = keep.sum(dim=-1).clamp(max=E)
        slots = torch.arange(E).view(1, 1, -1) < k.unsqueeze(-1)
        order = torch.where(slots, order, torch.full_like(order, -1))
        p = torch.where(slots, p, 0.0)
        p = p / p.sum(dim=-1, keepdim=True).clamp_(min=1e-9)
        masks, weights = torch.zeros(B, T, E), torch.zeros(B, T, E)
        masks.scatter_add_(dim=-1, index=order.clamp(min=0), src=(order != -1).to(probs.dtype))
        weights = weights.scatter_add(-1, order.clamp(min=0), p) * (masks > 0)
        C = max(min(T, math.ceil((T * 1.25) / E)), 4)
        pos = cumsum_exclusive(masks.transpose(1, 2), dim=-1).transpose(1, 2)
        fits = (pos < float(C)) & (masks > 0)
        pos = pos.clamp(max=C - 1).long()
        dispatch = torch.zeros(B, T, E, C)
        combine = torch.zeros_like(dispatch)
        t = torch.arange(T).view(1, T, 1).expand(B, T, E)
        b = torch.arange(B).view(B, 1, 1).expand(B, T, E)
        e = torch.arange(E).view(1, 1, E).expand(B, T, E)
        at = b[fits], t[fits], e[fits], pos[fits]
        dispatch[at] = 1.0
        combine[at] = weights[fits]
        aux = (masks.mean(1) * probs.mean(1)).mean() * (E**2)
        inputs = torch.einsum("bnd,bnec->ebcd", x, dispatch)
        shape = inputs.shape
        h = F.gelu(torch.einsum("...nd,...dh->...nh", inputs.reshape(E, -1, x.size(-1)), s.w1))
        out = torch.einsum("...nh,...hd->...nd", h, s.w2).reshape(*shape)
        return torch.einsum("ebcd,bnec->bnd", out, combine), aux


@script(MIXTURES)
def as_many_experts_as_needed():
    emb, head = nn.Embedding(40, 16), nn.Linear(16, 40)
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(16), "moe": DynamicK()}) for _ in range(2))
    mods = nn.ModuleList([emb, head, layers])
    o = torch.optim.Adam(mods.parameters(), lr=1e-3)
    tot = {"loss": 0, "tokens": 0, "aux": 0}

    def step(x, y, i):
        h, total = emb(x), 0
        for layer in layers:
            out, aux = layer["moe"](h)
            h = layer["norm"](h + out)
            total += aux
        lm = F.cross_entropy(head(h).reshape(-1, 40), y.reshape(-1), ignore_index=0)
        loss = lm + 0.01 * total
        o.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mods.parameters(), 1.0)
        o.step()
        n = (y != 0).sum()
        tot["loss"] += lm.item() * n.item()
        tot["aux"] += total.item() * n.item()
        tot["tokens"] += n.item()
        if i % 10 == 0 and tot["tokens"] > 0:
            print(f"ppl {math.exp(min(tot['loss'] / tot['tokens'], 20)):.2f}")
        return tot["loss"] / max(tot["tokens"], 1)

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [mods], 0)


@dataclass
class Trace:
    probs: list = field(default_factory=list)
    choices: list = field(default_factory=list)
    logits: list = field(default_factory=list)


class Blocs(nn.Module):
    def __init__(s, d=16, n=3, words=20, loops=2, blocs=2):
        super().__init__()
        s.loops, s.n = loops, n
        s.embed, s.pos = nn.Embedding(words, d), nn.Parameter(torch.randn(1, 12, d) * 0.02)
        s.experts = nn.ModuleList(mlp(d, 24, d) for _ in range(n))
        s.q, s.k, s.norm, s.head = nn.Linear(d, d), nn.Linear(d, d), nn.LayerNorm(d), nn.Linear(d, words)
        s.attn = nn.ModuleList(nn.MultiheadAttention(d, 2, batch_first=True) for _ in range(blocs))

    def _select(s, probs):
        i = probs.argmax(-1)
        w = F.one_hot(i, s.n).float() + probs - probs.detach()

        def expert(x):
            return torch.einsum("bn,bnsd->bsd", w, torch.stack([e(x) for e in s.experts], dim=1))

        return expert, i

    def forward(s, x, forced=None):
        B, S = x.shape
        mask = torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)
        h = s.embed(x) + s.pos[:, :S]
        t = Trace()
        for i in range(s.loops):
            mine = None if forced is None else int(forced[i])
            for attn in s.attn:
                pooled = s.norm(h).mean(1)
                k = s.k(torch.stack([e(pooled) for e in s.experts], dim=1))
                probs = F.softmax(torch.einsum("bd,bnd->bn", s.q(h.mean(1)), k) * 0.25, -1)
                if mine is None:
                    expert, choice = s._select(probs)
                else:
                    expert = (lambda e: (lambda x: s.experts[e](x)))(mine)
                    choice = torch.full((B,), mine, dtype=torch.long)
                a, _ = attn(h, h, h, attn_mask=mask, need_weights=False)
                h = h + a
                h = h + expert(s.norm(h))
                t.probs.append(probs)
                t.choices.append(choice)
            logit = s.head(s.norm(h))
            t.logits.append(logit)
            h = F.softmax(logit, -1) @ s.embed.weight + s.pos[:, :S]
        return t


@script(MIXTURES)
def loops_over_blocs():
    """The path through the experts is chosen by the generator of numpy's in each step."""
    m = Blocs()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    tasks = [(0, 1), (1, 2), (2, 0), (1, 1)]

    def step(x, y):
        path = tasks[np.random.randint(len(tasks))]
        t = m(x, forced=path)
        ce = sum(F.cross_entropy(t.logits[i].reshape(-1, 20), y.reshape(-1)) for i in range(m.loops)) / m.loops
        route = t.probs[0].new_zeros(())
        for i in range(m.loops):
            want = torch.full((x.size(0),), path[i], dtype=torch.long)
            for b in range(2):
                route = route + F.nll_loss(t.probs[i * 2 + b].clamp_min(1e-9).log(), want)
        loss = ce + 0.5 * route / 4
        o.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        return loss.item()

    return Script(step, texts(8, 20), [m], 0)


@script(MIXTURES)
def streamflow_with_lstm_experts():
    experts = nn.ModuleList(nn.LSTM(5, 8) for _ in range(3))
    gate, proj, head = nn.LSTM(5, 6), nn.Linear(6, 3), nn.Linear(8, 1)
    scale = nn.Parameter(torch.tensor(0.3))
    mods = nn.ModuleList([experts, gate, proj, head])
    o = torch.optim.Adam([*mods.parameters(), scale], lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=3, min_lr=1e-5)
    state = {"ema": None, "nan": 0}

    def step(data):
        x = data["x"].transpose(0, 1)
        g, _ = gate(x)
        s = 1.0 + 7.0 * torch.sigmoid(scale)
        w = F.softmax(s * proj(g.permute(1, 0, 2).mean(1)), -1)
        outs = torch.stack([e(x)[0] for e in experts], dim=2).permute(1, 0, 2, 3).contiguous()
        pred = {"mix": torch.sum(w.unsqueeze(1).unsqueeze(-1) * outs, 2)}
        pred.update({"y_hat": head(pred["mix"])})
        mask = ~torch.isnan(data["y"])
        weight = 1 / (data["std"].expand_as(data["y"])[mask] + 0.1) ** 2
        loss = (weight * (pred["y_hat"][mask] - data["y"][mask]) ** 2).mean()
        all_losses = {"loss": loss, "usage": w.mean(0).var()}
        if torch.isnan(loss):
            state["nan"] += 1
            if state["nan"] > 3:
                raise RuntimeError("Loss was NaN for 4 times in a row.")
        else:
            state["nan"] = 0
            o.zero_grad()
            (all_losses["loss"] + 0.1 * all_losses["usage"]).backward()
            nn.utils.clip_grad_norm_(mods.parameters(), 1.0)
            o.step()
        value = loss.item()
        state["ema"] = value if state["ema"] is None else 0.9 * state["ema"] + 0.1 * value
        plateau.step(state["ema"])
        return {k: v.item() for k, v in all_losses.items()}

    bs = []
    for i in range(STEPS):
        y = torch.randn(rows(i), 6, 1)
        y[torch.rand(rows(i), 6, 1) < 0.1] = float("nan")
        bs.append(({"x": torch.randn(rows(i), 6, 5), "y": y, "std": torch.rand(rows(i), 1, 1)},))
    return Script(step, bs, [mods, scale], 0)


Gates = namedtuple("Gates", ["dispatch", "combine", "balance", "z"])
Output = namedtuple("Output", ["outputs", "total", "balance", "z"])


class TopN(nn.Module):
    def __init__(s, d=16, e=4, n=2, threshold=0.2):
        super().__init__()
        s.e, s.n, s.noise = e, n, 1e-2
        s.to_gates = nn.Linear(d, e, bias=False)
        s.register_buffer("threshold", torch.tensor([1e-9, *([threshold] * (n - 1))]).view(n, 1, 1), persistent=False)
        s.register_buffer("zero", torch.zeros((1,)), persistent=False)

    def forward(s, x):
        *_, b, g, d = x.shape
        logits = s.to_gates(x)
        noisy = logits + torch.randn_like(logits) * s.noise if s.training else logits
        raw = noisy.softmax(-1)
        values, index = raw.topk(k=s.n, dim=-1)
        values, index = values.permute(2, 0, 1), index.permute(2, 0, 1)
        hot = F.one_hot(index, s.e)
        mask, first = hot.float(), hot[0].float()
        values = values / values.sum(0, keepdim=True).clamp(min=1e-9)
        probs = torch.zeros_like(values).uniform_(0.0, 1.0) if s.training else torch.ones_like(values) * 0.5
        route = probs < (values / s.threshold.clamp(min=1e-9))
        route[0, ...] = True
        mask = mask * route.unsqueeze(-1)
        capacity = max(min(g, int((g * 1.25) / s.e)), 4)
        before, combined = 0.0, []
        previous = torch.zeros(b, 1, s.e)
        for n in range(s.n):
            place = (cumsum_exclusive(mask[n], dim=-2) + previous) * mask[n]
            fits = mask[n] * (place < float(capacity)).float()
            previous = previous + fits.sum(-2, keepdim=True)
            slot = place.sum(-1)
            weight = values[n] * fits.sum(-1)
            hot = F.one_hot(slot.long().clamp(max=capacity - 1), capacity)
            combined.append(weight[..., None, None] * fits[..., None] * hot[:, :, None, :])
        combine = sum(combined) + before
        dispatch = combine.bool().type(x.dtype)
        dispatch = dispatch + combine - combine.detach()
        if s.training:
            balance = (raw.mean(-2) * first.mean(-2)).mean() * float(s.e**2)
        else:
            balance = s.zero
        return Gates(dispatch, combine, balance, torch.logsumexp(logits, dim=-1).square().mean())


class StMoe(nn.Module):
    def __init__(s, d=16, e=4):
        super().__init__()
        s.gate = TopN(d, e)
        s.experts = nn.ModuleList(mlp(d, 24, d) for _ in range(e))

    def forward(s, x):
        dispatch, combine, balance, z = s.gate(x)
        inputs = torch.einsum("b n d, b n e c -> b e c d", x, dispatch)
        inputs = inputs.permute(1, 0, 2, 3)
        outs = []
        for expert, mine in zip(s.experts, inputs.unbind(0), strict=True):
            outs.append(expert(mine))
        outs = torch.stack(outs).permute(1, 0, 2, 3)
        out = torch.einsum("b e c d, b n e c -> b n d", outs, combine)
        return Output(out, balance * 1e-2 + z * 1e-3, balance, z)


@script(MIXTURES)
def stable_and_transferable():
    emb, moe, head = nn.Embedding(40, 16), StMoe(), nn.Linear(16, 40)
    mods = nn.ModuleList([emb, moe, head])
    o = torch.optim.Adam(mods.parameters(), lr=1e-3)

    def step(x, y, i):
        mods.train()
        for part in range(2):
            h = emb(x[part::2])
            out, total, _, _ = moe(h)
            loss = F.cross_entropy(head(h + out).transpose(1, 2), y[part::2]) + total
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(mods.parameters(), 0.5)
        o.step()
        o.zero_grad()
        if i % 20 == 0:
            mods.eval()
            with torch.no_grad():
                found = moe(emb(x))
            return loss.item(), found.total.item()
        return loss.item(), None

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [mods], 1)


class Manager:
    def __init__(s):
        s.aux, s.z = [], []

    def reset(s):
        s.aux, s.z = [], []

    def aggregate(s):
        return sum(s.aux), sum(s.z)


MANAGER = Manager()


class NanoRouter(nn.Module):
    def __init__(s, d=16, e=4, k=2):
        super().__init__()
        s.e, s.k = e, k
        s.w_g, s.w_noise = nn.Linear(d, e, bias=False), nn.Linear(d, e, bias=False)

    def forward(s, x):
        B, C, d = x.size()
        n = B * C
        logits = s.w_g(x)
        if s.training:
            MANAGER.z.append(torch.mean(torch.logsumexp(logits, dim=-1) ** 2.0))
            logits = logits + F.softplus(s.w_noise(x)) * torch.randn_like(logits)
        top, index = logits.topk(s.k, dim=-1)
        probs = torch.full_like(logits, float("-inf")).scatter_(-1, index, top).softmax(-1)
        if s.training:
            with torch.no_grad():
                hot = F.one_hot(index, num_classes=s.e).sum(dim=2).float().mean(dim=(0, 1))
            MANAGER.aux.append(s.e * torch.sum(probs.mean(dim=(0, 1)) * hot))
        capacity = math.floor(s.k * 1.25 * n / s.e)
        capacity += capacity % 2
        capacity = max(capacity, 4)
        mask = F.one_hot(index.view(n, s.k), s.e).permute(1, 0, 2)
        rank = torch.cumsum(mask.reshape(s.k * n, s.e), dim=0) - 1
        mask = mask * torch.lt(rank.reshape(s.k, n, s.e), capacity)
        used = torch.sum(mask, dim=(0, 1))
        rank = torch.sum(mask * rank.reshape(s.k, n, s.e), dim=-1)
        weights = mask * probs.view(n, s.e)[None, :]
        cb = torch.sum(weights.unsqueeze(3) * F.one_hot(rank, capacity).unsqueeze(2), dim=0)
        return used, cb, cb.bool()


class NanoMoe(nn.Module):
    def __init__(s, d=16, e=4):
        super().__init__()
        s.router = NanoRouter(d, e)
        s.fc, s.proj = nn.Parameter(torch.randn(e, d, 24) * 0.1), nn.Parameter(torch.randn(e, 24, d) * 0.1)

    def forward(s, x):
        B, T, d = x.shape
        _, weight, mask = s.router(x)
        flat = x.view(B * T, d)
        batches = mask.permute(1, 2, 0).type_as(flat) @ flat
        out = torch.bmm(F.gelu(torch.bmm(batches, s.fc)), s.proj)
        return (weight.view(B * T, -1) @ out.view(-1, d)).view(B, T, d)


@script(MIXTURES)
def losses_at_a_manager():
    emb, head = nn.Embedding(40, 16), nn.Linear(16, 40)
    blocks = nn.ModuleList(NanoMoe() for _ in range(2))
    mods = nn.ModuleList([emb, head, blocks])
    o = torch.optim.AdamW(mods.parameters(), lr=1e-3, betas=(0.9, 0.95))
    best, log = [1e9], []

    def get_lr(it):
        if it < 5:
            return 1e-3 * it / 5
        return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * (it - 5) / 45)) * 9e-4

    def step(x, y, it):
        lr = get_lr(it)
        for g in o.param_groups:
            g["lr"] = lr
        for _ in range(2):
            h = emb(x)
            for block in blocks:
                h = h + block(h)
            loss = F.cross_entropy(head(h).view(-1, 40), y.reshape(-1))
            aux, z = MANAGER.aggregate()
            loss = loss + 0.01 * aux + 0.001 * z
            MANAGER.reset()
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(mods.parameters(), 1.0)
        o.step()
        o.zero_grad(set_to_none=True)
        lossf = loss.item()
        best[0] = lossf if lossf < best[0] else best[0]
        log.append(lossf)
        return lossf, best[0]

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [mods], 0)


class AddAux(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype, ctx.needed = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(1, dtype=ctx.dtype).squeeze() if ctx.needed else None


class DitMoe(nn.Module):
    def __init__(s, d=16, e=4, k=2):
        super().__init__()
        s.e, s.k = e, k
        s.weight = nn.Parameter(torch.empty(e, d))
        nn.init.kaiming_uniform_(s.weight, a=math.sqrt(5))
        s.experts, s.shared = nn.ModuleList(mlp(d, 24, d) for _ in range(e)), mlp(d, 24, d)

    def forward(s, x):
        b, t, d = x.shape
        scores = F.linear(x.view(-1, d), s.weight, None).softmax(-1)
        w, index = torch.topk(scores, k=s.k, dim=-1, sorted=False)
        if s.training:
            per = index.view(b, -1)
            ce = torch.zeros(b, s.e)
            ce.scatter_add_(1, per, torch.ones(b, t * s.k)).div_(t * s.k / s.e)
            aux = (ce * scores.view(b, t, -1).mean(1)).sum(1).mean() * 0.01
        flat = index.view(-1)
        rows_ = x.view(-1, d)
        if s.training:
            rep = rows_.repeat_interleave(s.k, dim=0)
            y = torch.empty_like(rep, dtype=rep.dtype)
            for i, expert in enumerate(s.experts):
                y[flat == i] = expert(rep[flat == i]).float()
            y = (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(dim=1).view(b, t, d)
            y = AddAux.apply(y, aux)
        else:
            y = s.infer(rows_, flat, w.view(-1, 1)).view(b, t, d)
        return y + s.shared(x)

    @torch.no_grad()
    def infer(s, x, flat, w):
        cache = torch.zeros_like(x)
        idxs = flat.argsort()
        ends = flat.bincount().cpu().numpy().cumsum(0)
        tokens = idxs // s.k
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            at = tokens[start:end]
            out = s.experts[i](x[at])
            out.mul_(w[idxs[start:end]])
            cache.scatter_reduce_(0, at.view(-1, 1).repeat(1, x.shape[-1]), out, reduce="sum")
        return cache


class Dit(nn.Module):
    def __init__(s, d=16, classes=5):
        super().__init__()
        s.x, s.t, s.y = nn.Linear(4, d), mlp(8, d, d), nn.Embedding(classes + 1, d)
        s.norm, s.ada = nn.LayerNorm(d, elementwise_affine=False), nn.Sequential(nn.SiLU(), nn.Linear(d, 3 * d))
        s.moe, s.out, s.classes = DitMoe(d), nn.Linear(d, 4), classes

    def forward(s, x, t, y):
        freqs = torch.exp(-math.log(10000) * torch.arange(4, dtype=torch.float32) / 4)
        a = t[:, None].float() * freqs[None]
        if s.training:
            y = torch.where(torch.rand(y.shape[0]) < 0.1, s.classes, y)
        c = s.t(torch.cat([torch.cos(a), torch.sin(a)], -1)) + s.y(y)
        h = s.x(x)
        shift, scale, gate = s.ada(c).chunk(3, dim=1)
        h = h + gate.unsqueeze(1) * s.moe(s.norm(h) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))
        return s.out(h)


@torch.no_grad()
def update_ema(ema, model, decay=0.99):
    mine, theirs = OrderedDict(ema.named_parameters()), OrderedDict(model.named_parameters())
    for name, p in theirs.items():
        mine[name].mul_(decay).add_(p.data, alpha=1 - decay)


@script(MIXTURES)
def diffusion_transformer_with_experts():
    m = Dit()
    ema = deepcopy(m)
    for p in ema.parameters():
        p.requires_grad = False
    ema.eval()
    o = torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
    run = {"loss": 0, "steps": 0, "train": 0, "start": time.time()}

    def step(x, y):
        m.train()
        t = torch.randint(0, 50, (x.shape[0],))
        noise = torch.randn_like(x)
        a = alphas[t].view(-1, 1, 1)
        loss = ((m(a.sqrt() * x + (1 - a).sqrt() * noise, t, y) - noise) ** 2).mean(dim=list(range(1, 3))).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        update_ema(ema, m)
        run["loss"] += loss.item()
        run["steps"] += 1
        run["train"] += 1
        if run["train"] % 10 == 0:
            speed = run["steps"] / (time.time() - run["start"])
            avg = torch.tensor(run["loss"] / run["steps"])
            assert speed > 0
            print(f"(step={run['train']:07d}) Train Loss: {avg.item():.4f}")
            run["loss"], run["steps"], run["start"] = 0, 0, time.time()
            with torch.no_grad():
                return ema(x, t, y).mean().item()
        return loss.item()

    bs = [(torch.randn(rows(i), 6, 4), torch.randint(5, (rows(i),))) for i in range(STEPS)]
    return Script(step, bs, [m, ema], 1)


class Squad(nn.Module):
    def __init__(s, d=12, e=4, k=2, tasks=("depth", "seg", "normal")):
        super().__init__()
        s.k, s.tasks, s.e = k, list(tasks), e
        s.gates = nn.ModuleList(nn.Linear(d, e, bias=False) for _ in tasks)
        s.experts = nn.ModuleList(mlp(d, 16, d) for _ in range(e))
        s.register_buffer("seen", torch.ones(len(tasks), e) / e)

    def forward(s, x, task):
        probs = s.gates[task](x).softmax(-1)
        s.seen[task] = 0.9 * s.seen[task] + 0.1 * probs.mean(0).detach()
        joint = torch.stack([probs.mean(0) if i == task else s.seen[i] for i in range(len(s.tasks))])
        joint = joint / joint.sum()
        info = -(joint.sum(0) * torch.log(joint.sum(0) + 1e-4)).sum() + (joint * torch.log(joint + 1e-4)).sum()
        w, index = torch.topk(probs, s.k)
        w = w / (w.sum(1, keepdim=True) + 1e-6)
        y = torch.zeros_like(x)
        for i in range(s.e):
            row, slot = torch.where(index == i)
            y[row] += w[row, slot, None] * s.experts[i](x[row])
        return y, -info


@script(MIXTURES)
def a_squad_of_experts():
    m = Squad()
    heads = nn.ModuleDict({t: nn.Linear(12, n) for t, n in zip(m.tasks, (1, 4, 3), strict=True)})
    o = torch.optim.Adam([*m.parameters(), *heads.parameters()], lr=1e-3)
    losses = {"depth": F.l1_loss, "seg": F.cross_entropy, "normal": lambda a, b: 1 - F.cosine_similarity(a, b).mean()}
    meters = defaultdict(lambda: deque(maxlen=10))

    def step(x, targets):
        o.zero_grad()
        total = 0
        for i, (task, y) in enumerate(targets.items()):
            h, info = m(x, i)
            loss = losses[task](heads[task](x + h), y) + 0.01 * info
            loss.backward()
            meters[task].append(loss.item())
            total += loss.item()
        o.step()
        return total, {k: sum(v) / len(v) for k, v in meters.items()}

    bs = []
    for i in range(STEPS):
        r = rows(i)
        y = {"depth": torch.randn(r, 1), "seg": torch.randint(4, (r,)), "normal": torch.randn(r, 3)}
        bs.append((torch.randn(r, 12), y))
    return Script(step, bs, [m, heads], 1)


class Layer(nn.Linear):
    def __init__(s, a, b):
        super().__init__(a, b)
        s.opt, s.threshold = torch.optim.Adam(s.parameters(), lr=0.03), 2.0

    def forward(s, x):
        return F.relu(torch.mm(x / (x.norm(2, 1, keepdim=True) + 1e-4), s.weight.T) + s.bias.unsqueeze(0))

    def train(s, pos=None, neg=None):
        if not torch.is_tensor(pos):
            return super().train(True if pos is None else pos)
        for _ in range(2):
            g_pos, g_neg = s.forward(pos).pow(2).mean(1), s.forward(neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + s.threshold, g_neg - s.threshold]))).mean()
            s.opt.zero_grad()
            loss.backward()
            s.opt.step()
        return s.forward(pos).detach(), s.forward(neg).detach()


@script("vision")
def forward_forward():
    layers = [Layer(12, 16), Layer(16, 16)]

    def overlay(x, y):
        x_ = x.clone()
        x_[:, :4] *= 0.0
        x_[range(x.shape[0]), y] = x.max()
        return x_

    def step(x, y):
        pos, neg = overlay(x, y), overlay(x, y[torch.randperm(x.size(0))])
        for i, layer in enumerate(layers):
            print("training layer", i, "...")
            pos, neg = layer.train(pos, neg)
        good = []
        for label in range(4):
            h, found = overlay(x, label), []
            for layer in layers:
                h = layer(h)
                found += [h.pow(2).mean(1)]
            good += [sum(found).unsqueeze(1)]
        return torch.cat(good, 1).argmax(1).eq(y).float().mean().item()

    return Script(step, labelled(12, 4), [nn.ModuleList(layers)], 0)


Saved = namedtuple("Saved", ["log_prob", "value"])


@script("reinforcement learning")
def actor_critic_with_saved_actions():
    """pytorch/examples' actor and critic: an episode a step, in an environment of numpy's."""
    body, act, val = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)
    mods = nn.ModuleList([body, act, val])
    o = torch.optim.Adam(mods.parameters(), lr=3e-2)
    eps = np.finfo(np.float32).eps.item()
    saved, rewards = [], []
    running = [10.0]

    def select(state):
        h = F.relu(body(torch.from_numpy(state).float()))
        probs, value = F.softmax(act(h), dim=-1), val(h)
        m = torch.distributions.Categorical(probs)
        action = m.sample()
        saved.append(Saved(m.log_prob(action), value))
        return action.item()

    def step(start):
        state, total = start.copy(), 0
        for _ in range(4):
            action = select(state)
            state = state * 0.9 + (0.1 if action else -0.1)
            reward = float(1.0 - abs(state).mean())
            rewards.append(reward)
            total += reward
        running[0] = 0.05 * total + (1 - 0.05) * running[0]
        R, returns, policy, value = 0, [], [], []
        for r in rewards[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        for (log_prob, v), R in zip(saved, returns, strict=True):
            policy.append(-log_prob * (R - v.item()))
            value.append(F.smooth_l1_loss(v, torch.tensor([R])))
        o.zero_grad()
        loss = torch.stack(policy).sum() + torch.stack(value).sum()
        loss.backward()
        o.step()
        del rewards[:]
        del saved[:]
        return loss.item(), running[0]

    return Script(step, [(np.random.randn(4),) for _ in range(STEPS)], [mods], 0)


@script("vision")
def masked_images_with_numpys_permutations():
    enc, dec, token = nn.Linear(12, 16), nn.Linear(16, 12), nn.Parameter(torch.zeros(1, 1, 16))
    mods = nn.ModuleList([enc, dec])
    o = torch.optim.AdamW([*mods.parameters(), token], lr=1e-3)
    negatives = list(range(40))

    def mask_of():
        chosen = np.random.permutation(16)[:8]
        mask = np.zeros(16, dtype=int)
        mask[chosen] = 1
        return mask.reshape((4, 4)).repeat(2, axis=0).repeat(2, axis=1)

    def step(x, y):
        mask = torch.from_numpy(np.stack([mask_of() for _ in range(x.shape[0])])).flatten(1)[:, :16].float()
        picked = random.sample(negatives, 3)
        h = enc(x)
        w = mask.unsqueeze(-1).type_as(token)
        h = h * (1.0 - w) + token.expand(x.shape[0], 16, -1) * w
        loss = F.l1_loss(x, dec(h), reduction="none").mean(-1)
        loss = (loss * mask).sum() / (mask.sum() + 1e-5) + 0.001 * h[:, 0, : 3].sum() * len(picked)
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.item(), picked

    return Script(step, [(torch.randn(rows(i), 16, 12), i) for i in range(STEPS)], [mods, token], 0)


@script("preferences")
def group_relative_with_text_rewards():
    emb, rnn, head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)
    mods = nn.ModuleList([emb, rnn, head])
    ref = deepcopy(mods).requires_grad_(False)
    o = torch.optim.AdamW(mods.parameters(), lr=1e-3)
    metrics = defaultdict(list)

    def logits_of(net, tokens):
        return net[2](net[1](net[0](tokens))[0])

    def logps(net, tokens, keep):
        lg = logits_of(net, tokens)[:, :-1][:, -keep:]
        return torch.gather(lg.log_softmax(-1), 2, tokens[:, 1:][:, -keep:].unsqueeze(-1)).squeeze(-1)

    def length_reward(texts_, **_):
        return [float(len(set(t.split()))) for t in texts_]

    def eos_reward(texts_, **_):
        return [1.0 if t.endswith(" 3") else 0.0 for t in texts_]

    def step(prompts, i):
        tokens = prompts.repeat_interleave(2, 0)
        with torch.no_grad():
            for _ in range(4):
                p = logits_of(mods, tokens)[:, -1].softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(p, 1)], 1)
        done = tokens[:, prompts.size(1) :]
        is_eos = done == 3
        eos = torch.full((done.size(0),), done.size(1), dtype=torch.long)
        eos[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
        mask = (torch.arange(done.size(1)).expand(done.size(0), -1) <= eos.unsqueeze(1)).int()
        written = [" ".join(map(str, row)) for row in done.tolist()]
        per = torch.zeros(len(written), 2)
        for j, f in enumerate((length_reward, eos_reward)):
            per[:, j] = torch.tensor(f(written, prompts=None), dtype=torch.float32)
        rewards = per.sum(1)
        mean = rewards.view(-1, 2).mean(1).repeat_interleave(2, 0)
        std = rewards.view(-1, 2).std(1).repeat_interleave(2, 0)
        adv = (rewards - mean) / (std + 1e-4)
        mine = logps(mods, tokens, done.size(1))
        with torch.inference_mode():
            old = logps(ref, tokens, done.size(1))
        old = old.clone()
        kl = torch.exp(old - mine) - (old - mine) - 1
        loss = -(torch.exp(mine - mine.detach()) * adv.unsqueeze(1) - 0.04 * kl)
        loss = ((loss * mask).sum(1) / mask.sum(1)).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        metrics["kl"].append(((kl * mask).sum(1) / mask.sum(1)).mean().item())
        metrics["reward"].append(rewards.mean().item())
        if i % 10 == 9:
            means = {k: sum(v) / len(v) for k, v in metrics.items()}
            metrics.clear()
            return loss.item(), means
        return loss.item(), None

    return Script(step, [(torch.randint(20, (rows(i), 5)), i) for i in range(STEPS)], [mods], 0)
