# mypy: ignore-errors
# ruff: noqa: E741
"""Experts of other families: who chooses, what is sorted, how results come back."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, mlp, rows, script, texts, vectors


class Ffn(nn.Module):
    def __init__(s, d=16, h=24):
        super().__init__()
        s.w1 = nn.Linear(d, h)
        s.w2 = nn.Linear(h, d)

    def forward(s, x):
        return s.w2(F.gelu(s.w1(x)))


def seqs(d=16, t=6, classes=4):
    return [(torch.randn(rows(i), t, d), torch.randint(classes, (rows(i),))) for i in range(STEPS)]


def trainer(layer, d=16, classes=4, aux=None, opt=None, data=None):
    head = nn.Linear(d, classes)
    ln = nn.LayerNorm(d)
    mods = [layer, head, ln]
    o = (opt or (lambda p: torch.optim.Adam(p, lr=1e-3)))([p for m in mods for p in m.parameters() if p.requires_grad])

    def step(x, y):
        o.zero_grad()
        out = layer(x)
        extra = 0.0
        if isinstance(out, tuple):
            out, extra = out
        logits = head(ln(x + out).mean(1))
        loss = F.cross_entropy(logits, y) + 0.01 * extra
        loss.backward()
        nn.utils.clip_grad_norm_([p for m in mods for p in m.parameters()], 1.0)
        o.step()
        return loss.item()

    return Script(step, data or seqs(d), mods, 1)


class ExpertChoice(nn.Module):
    def __init__(s, d=16, e=4, cap=2.0):
        super().__init__()
        s.gate = nn.Linear(d, e, bias=False)
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))
        s.e = e
        s.cap = cap

    def forward(s, x):
        b, t, d = x.shape
        xf = x.reshape(-1, d)
        n = xf.size(0)
        k = max(1, int(n * s.cap / s.e))
        S = s.gate(xf).softmax(-1)
        G, I = torch.topk(S.t(), k, dim=-1)
        out = torch.zeros_like(xf)
        for i, ex in enumerate(s.experts):
            out.index_add_(0, I[i], G[i].unsqueeze(-1) * ex(xf[I[i]]))
        return out.view(b, t, d)


@script("language models")
def expert_choice():
    return trainer(ExpertChoice())


class HashLayer(nn.Module):
    def __init__(s, d=16, e=4, vocab=40):
        super().__init__()
        s.emb = nn.Embedding(vocab, d)
        s.register_buffer("table", torch.randint(e, (vocab,)))
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))

    def forward(s, ids):
        x = s.emb(ids)
        route = s.table[ids]
        out = torch.empty_like(x)
        for i, ex in enumerate(s.experts):
            m = route == i
            out[m] = ex(x[m])
        return x + out


@script("language models")
def hash_layers():
    m = HashLayer()
    h = nn.Linear(16, 40)
    o = torch.optim.SGD([*m.parameters(), *h.parameters()], lr=0.1, momentum=0.9, nesterov=True)

    def step(x, y):
        l = F.cross_entropy(h(m(x)).flatten(0, 1), y.flatten())
        o.zero_grad()
        l.backward()
        o.step()
        return l.item()

    return Script(step, texts(), [m, h], 1)


class LoraMoe(nn.Module):
    def __init__(s, d=16, r=4, e=4, k=2):
        super().__init__()
        s.base = nn.Linear(d, d)
        s.base.requires_grad_(False)
        s.gate = nn.Linear(d, e, bias=False)
        s.k = k
        s.scaling = 16 / r
        s.lora_A = nn.ParameterList(nn.Parameter(torch.randn(r, d) * 0.1) for _ in range(e))
        s.lora_B = nn.ParameterList(nn.Parameter(torch.zeros(d, r)) for _ in range(e))
        s.drop = nn.Dropout(0.1)

    def forward(s, x):
        res = s.base(x)
        w = s.gate(x).softmax(-1)
        tw, ti = w.topk(s.k, -1)
        tw = tw / tw.sum(-1, keepdim=True)
        flat = x.view(-1, x.size(-1))
        tw = tw.view(-1, s.k)
        ti = ti.view(-1, s.k)
        out = torch.zeros_like(flat)
        for e in range(len(s.lora_A)):
            idx, nth = torch.where(ti == e)
            if idx.numel() == 0:
                continue
            h = F.linear(F.linear(s.drop(flat[idx]), s.lora_A[e]), s.lora_B[e]) * s.scaling
            out[idx] += tw[idx, nth, None] * h
        return res + out.view_as(res)


@script("language models")
def mixture_of_loras():
    return trainer(LoraMoe(), opt=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1))


class SparseDispatcher:
    def __init__(s, num_experts, gates):
        s._gates = gates
        s._num_experts = num_experts
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, s._expert_index = sorted_experts.split(1, dim=1)
        s._batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        s._part_sizes = (gates > 0).sum(0).tolist()
        gates_exp = gates[s._batch_index.flatten()]
        s._nonzero_gates = torch.gather(gates_exp, 1, s._expert_index)

    def dispatch(s, inp):
        return torch.split(inp[s._batch_index].squeeze(1), s._part_sizes, dim=0)

    def combine(s, expert_out, multiply_by_gates=True):
        stitched = torch.cat(expert_out, 0)
        if multiply_by_gates:
            stitched = stitched.mul(s._nonzero_gates)
        zeros = torch.zeros(s._gates.size(0), expert_out[-1].size(1), requires_grad=True, device=stitched.device)
        return zeros.index_add(0, s._batch_index, stitched.float())


class Shazeer(nn.Module):
    def __init__(s, d=16, e=4, k=2, noisy=True):
        super().__init__()
        s.e, s.k, s.noisy = e, k, noisy
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))
        s.w_gate = nn.Parameter(torch.randn(d, e) * 0.1)
        s.w_noise = nn.Parameter(torch.zeros(d, e))
        s.softplus = nn.Softplus()
        s.softmax = nn.Softmax(1)
        s.register_buffer("mean", torch.tensor([0.0]))
        s.register_buffer("std", torch.tensor([1.0]))

    def cv_squared(s, x):
        eps = 1e-10
        if x.shape[0] == 1:
            return torch.tensor([0], dtype=x.dtype)
        return x.float().var() / (x.float().mean() ** 2 + eps)

    def prob(s, clean, noisy, std, top):
        batch = clean.size(0)
        m = top.size(1)
        flat = top.flatten()
        pos = torch.arange(batch) * m + s.k
        thr = torch.unsqueeze(torch.gather(flat, 0, pos), 1)
        is_in = torch.gt(noisy, thr)
        thr_out = torch.unsqueeze(torch.gather(flat, 0, pos - 1), 1)
        n = torch.distributions.normal.Normal(s.mean, s.std)
        return torch.where(is_in, n.cdf((clean - thr) / std), n.cdf((clean - thr_out) / std))

    def forward(s, x3):
        x = x3.reshape(-1, x3.size(-1))
        clean = x @ s.w_gate
        if s.noisy and s.training:
            std = s.softplus(x @ s.w_noise) + 1e-2
            logits = clean + torch.randn_like(clean) * std
        else:
            logits = clean
        logits = s.softmax(logits)
        tl, ti = logits.topk(min(s.k + 1, s.e), dim=1)
        tk = tl[:, : s.k]
        ik = ti[:, : s.k]
        tg = tk / (tk.sum(1, keepdim=True) + 1e-6)
        gates = torch.zeros_like(logits, requires_grad=True).scatter(1, ik, tg)
        if s.noisy and s.k < s.e and s.training:
            load = s.prob(clean, logits, std, tl).sum(0)
        else:
            load = (gates > 0).sum(0)
        imp = gates.sum(0)
        loss = s.cv_squared(imp) + s.cv_squared(load)
        d = SparseDispatcher(s.e, gates)
        ins = d.dispatch(x)
        gates = d
        outs = [s.experts[i](ins[i]) for i in range(s.e)]
        return d.combine(outs).view_as(x3), loss


@script("language models")
def noisy_top_k_dispatcher():
    return trainer(Shazeer())


class SoftMoe(nn.Module):
    def __init__(s, d=16, e=4, slots=2):
        super().__init__()
        s.phi = nn.Parameter(torch.randn(e, slots, d) * 0.1)
        s.norm = nn.LayerNorm(d)
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))
        s.scale = nn.Parameter(torch.ones(()))

    def forward(s, x):
        xn = F.normalize(s.norm(x), dim=-1)
        p = F.normalize(s.phi, dim=-1) * s.scale
        logits = torch.einsum("bnd,esd->bnes", xn, p)
        dispatch = logits.softmax(1)
        b, n, e, sl = logits.shape
        combine = logits.reshape(b, n, e * sl).softmax(-1)
        slots = torch.einsum("bnd,bnes->ebsd", x, dispatch)
        out = torch.stack([ex(z) for z, ex in zip(slots.unbind(0), s.experts, strict=False)])
        out = out.permute(1, 0, 2, 3).reshape(b, e * sl, -1)
        return torch.einsum("bsd,bns->bnd", out, combine)


@script("vision")
def soft_moe():
    return trainer(SoftMoe())


def gumbel(shape, device, maps={}):  # noqa: B006
    g = maps.get(device)
    if g is None:
        one = torch.tensor(1.0, device=device)
        zero = torch.tensor(0.0, device=device)
        g = torch.distributions.gumbel.Gumbel(zero, one).rsample
        maps[device] = g
    return g(shape)


class GShard(nn.Module):
    def __init__(s, d=16, e=4, cf=1.5):
        super().__init__()
        s.wg = nn.Linear(d, e, bias=False).float()
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))
        s.e, s.cf = e, cf

    def forward(s, x):
        shp = x.shape
        x = x.reshape(-1, shp[-1])
        logits = s.wg(x)
        gates = F.softmax(logits, 1)
        S, E = gates.shape
        cap = max(int(math.ceil(S / E * s.cf * 2)), 4)
        i1 = gates.argmax(1)
        m1 = F.one_hot(i1, num_classes=E)
        ln = logits + gumbel(logits.shape, logits.device)
        l2 = ln.masked_fill(m1.bool(), float("-inf"))
        i2 = l2.argmax(1)
        m2 = F.one_hot(i2, num_classes=E)
        loc1 = torch.cumsum(m1, 0) - 1
        loc2 = torch.cumsum(m2, 0) - 1
        loc2 = loc2 + m1.sum(0, keepdim=True)
        me = gates.mean(0)
        ce = m1.float().mean(0)
        aux = torch.mean(me * ce) * E * E
        m1 = m1 * torch.lt(loc1, cap)
        m2 = m2 * torch.lt(loc2, cap)
        l1 = (loc1 * m1).sum(1)
        l2 = (loc2 * m2).sum(1)
        f1 = m1.float()
        f2 = m2.float()
        g1 = torch.einsum("se,se->s", gates, f1)
        g2 = torch.einsum("se,se->s", gates, f2)
        den = torch.clamp(g1 + g2, min=torch.finfo(g1.dtype).eps)
        g1 = g1 / den
        g2 = g2 / den
        a = torch.einsum("s,se->se", g1, f1)
        b = torch.einsum("s,se->se", g2, f2)
        c1 = F.one_hot(l1, num_classes=cap).float()
        c2 = F.one_hot(l2, num_classes=cap).float()
        comb = torch.einsum("se,sc->sec", a, c1) + torch.einsum("se,sc->sec", b, c2)
        disp = comb.bool()
        din = torch.einsum("sec,sm->ecm", disp.type_as(x), x)
        chunks = din.chunk(E, dim=0)
        outs = []
        for ch, ex in zip(chunks, s.experts, strict=False):
            outs += [ex(ch)]
        out = torch.cat(outs, 0)
        return torch.einsum("sec,ecm->sm", comb, out).view(shp), aux


@script("language models")
def gshard_with_gumbel():
    return trainer(GShard())


class Base(nn.Module):
    def __init__(s, d=16, e=4):
        super().__init__()
        s.experts = nn.ModuleList(Ffn(d) for _ in range(e))
        s.register_parameter("centroids", nn.Parameter(torch.randn(e, d) * 0.1))
        s.e = e

    def forward(s, x):
        f = x.reshape(-1, x.size(-1))
        with torch.no_grad():
            a = f @ s.centroids.t()
        if s.training:
            torch.argsort(a.max(1).values, descending=True)
            route = a.argmax(1)
        else:
            torch.arange(len(f))
            route = a.argmax(1)
        sort = torch.sort(route, stable=True)[1]
        counts = torch.bincount(route, minlength=s.e).tolist()
        r = f[sort]
        outs = []
        for ex, ch in zip(s.experts, r.split(counts), strict=False):
            outs.append(ex(ch))
        y = torch.cat(outs)
        al = torch.sigmoid(r.mv(s.centroids[0])).unsqueeze(1)
        y = al * y + (1 - al) * r
        res = torch.empty_like(y)
        res[sort] = y
        return res.view_as(x)


@script("language models")
def base_layers():
    return trainer(Base())


@script("language models")
def stochastic_experts():
    ex = nn.ModuleList(Ffn() for _ in range(4))
    head = nn.Linear(16, 4)
    mods = [ex, head]
    o = torch.optim.Adam([*ex.parameters(), *head.parameters()])

    def fwd(x):
        return head(ex[random.randrange(len(ex))](x).mean(1))

    def step(x, y):
        a, b = fwd(x), fwd(x)
        l = 0.5 * (F.cross_entropy(a, y) + F.cross_entropy(b, y))
        kl = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean") + F.kl_div(
            b.log_softmax(-1), a.softmax(-1), reduction="batchmean"
        )
        (l + kl / 4).backward()
        o.step()
        o.zero_grad(set_to_none=True)
        return float(l)

    return Script(step, seqs(), mods)


def sinkhorn(cost, tol=1e-4):
    cost = torch.exp(cost)
    d0 = torch.ones(cost.size(0))
    d1 = torch.ones(cost.size(1))
    eps = 1e-8
    err = 1e9
    d1o = d1
    while err > tol:
        d0 = (1 / d0.size(0)) * 1 / (torch.sum(d1 * cost, 1) + eps)
        d1 = (1 / d1.size(0)) * 1 / (torch.sum(d0.unsqueeze(1) * cost, 0) + eps)
        err = torch.mean(torch.abs(d1o - d1))
        d1o = d1
    return d1 * cost * d0.unsqueeze(1)


class SinkhornMoe(nn.Module):
    def __init__(s, d=16, e=4):
        super().__init__()
        s.router = nn.Linear(d, e)
        s.local_experts = nn.ModuleList(Ffn(d) for _ in range(e))

    def forward(s, h):
        x = h.view(-1, h.size(-1))
        route = s.router(x)
        if s.training:
            with torch.no_grad():
                n = sinkhorn(route.detach().float())
                _, mi = torch.max(n, 1)
            route = torch.sigmoid(route)
            mp = route[torch.arange(route.size(0)), mi]
        else:
            mp, mi = torch.max(torch.sigmoid(route), 1)
        out = torch.empty_like(x)
        mp = mp.unsqueeze(1)
        for n, ex in enumerate(s.local_experts):
            li = (mi == n).nonzero()
            hid = x[li, :]
            o = ex(hid)
            out[li, :] = o
        return (out * mp).view_as(h)


@script("language models")
def sinkhorn_router():
    return trainer(SinkhornMoe())


class Upcycled(nn.Module):
    def __init__(s, dense, e=4):
        super().__init__()
        import copy

        s.experts = nn.ModuleList(copy.deepcopy(dense) for _ in range(e))
        s.gate = nn.Linear(16, e, bias=False)
        s.e = e
        s.history = []

    def forward(s, x):
        f = x.flatten(0, 1)
        lg = s.gate(f)
        if s.training:
            lg = lg + torch.rand_like(lg) * 1e-2
        p = lg.softmax(-1, dtype=torch.float32)
        w, idx = torch.topk(p, 1)
        z = torch.logsumexp(lg, -1).pow(2).mean()
        res = f.clone()
        for e in range(s.e):
            sel = (idx.squeeze(-1) == e).nonzero(as_tuple=False).squeeze(-1)
            if sel.numel() > 0:
                res[sel] = s.experts[e](f[sel]) * w[sel]
        s.history.append(z.detach())
        return res.view_as(x), z


@script("language models")
def sparse_upcycling():
    return trainer(Upcycled(Ffn()))


class CGC(nn.Module):
    def __init__(s, d, tasks, own=2, shared=2, h=16, last=False):
        super().__init__()
        s.tasks = tasks
        s.last = last
        s.own = nn.ModuleDict(
            {t: nn.ModuleList(nn.Sequential(nn.Linear(d, h), nn.ReLU()) for _ in range(own)) for t in tasks}
        )
        s.shared = nn.ModuleList(nn.Sequential(nn.Linear(d, h), nn.ReLU()) for _ in range(shared))
        s.gates = nn.ModuleDict({t: nn.Linear(d, own + shared) for t in tasks})
        s.gshared = nn.Linear(d, own * len(tasks) + shared)

    def forward(s, xs):
        out = {}
        sh = [e(xs["shared"]) for e in s.shared]
        every = list(sh)
        for t in s.tasks:
            o = [e(xs[t]) for e in s.own[t]]
            every += o
            st = torch.stack(o + sh, dim=1)
            g = s.gates[t](xs[t]).softmax(-1).unsqueeze(-1)
            out[t] = (st * g).sum(1)
        if not s.last:
            out["shared"] = (torch.stack(every, 1) * s.gshared(xs["shared"]).softmax(-1).unsqueeze(-1)).sum(1)
        return out


class PCGrad:
    def __init__(s, opt):
        s._optim = opt

    def pc_backward(s, objs):
        grads, shapes, has = [], [], []
        for ob in objs:
            s._optim.zero_grad(set_to_none=True)
            ob.backward(retain_graph=True)
            g, sh, h = [], [], []
            for group in s._optim.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        sh.append(p.shape)
                        g.append(torch.zeros_like(p))
                        h.append(torch.zeros_like(p))
                        continue
                    sh.append(p.grad.shape)
                    g.append(p.grad.clone())
                    h.append(torch.ones_like(p))
            grads.append(torch.cat([a.flatten() for a in g]))
            has.append(torch.cat([a.flatten() for a in h]))
            shapes.append(sh)
        import copy

        shared = torch.stack(has).prod(0).bool()
        pc = copy.deepcopy(grads)
        for gi in pc:
            random.shuffle(grads)
            for gj in grads:
                d = torch.dot(gi, gj)
                if d < 0:
                    gi -= d * gj / (gj.norm() ** 2)
        merged = torch.zeros_like(grads[0])
        merged[shared] = torch.stack([g[shared] for g in pc]).mean(0)
        merged[~shared] = torch.stack([g[~shared] for g in pc]).sum(0)
        i = 0
        for group in s._optim.param_groups:
            for p in group["params"]:
                n = p.numel()
                p.grad = merged[i : i + n].view(p.shape)
                i += n


@script("recommenders")
def cgc_with_pcgrad():
    tasks = ["ctr", "cvr"]
    l1, l2 = CGC(8, tasks), CGC(16, tasks, last=True)
    tow = nn.ModuleDict({t: mlp(16, 8, 1) for t in tasks})
    mods = [l1, l2, tow]
    o = PCGrad(torch.optim.Adam([p for m in mods for p in m.parameters()], lr=1e-3))

    def step(x, y):
        h = l2(l1({"ctr": x, "cvr": x, "shared": x}))
        losses = {
            t: F.binary_cross_entropy_with_logits(tow[t](h[t]).squeeze(1), (y[:, i] > 0).float())
            for i, t in enumerate(tasks)
        }
        o.pc_backward(list(losses.values()))
        o._optim.step()
        return {k: v.item() for k, v in losses.items()}

    return Script(step, vectors(8, 2), mods, 2)


class DcnMix(nn.Module):
    def __init__(s, d=8, L=2, low=4, e=3):
        super().__init__()
        s.L, s.e = L, e
        s.U = nn.ParameterList([nn.Parameter(torch.randn(e, d, low) * 0.2) for _ in range(L)])
        s.V = nn.ParameterList([nn.Parameter(torch.randn(e, d, low) * 0.2) for _ in range(L)])
        s.C = nn.ParameterList([nn.Parameter(torch.randn(e, low, low) * 0.2) for _ in range(L)])
        s.gate = nn.ModuleList([nn.Linear(d, 1, bias=False) for _ in range(e)])
        s.b = nn.ParameterList([nn.Parameter(torch.zeros(d, 1)) for _ in range(L)])

    def forward(s, x):
        x0 = x.unsqueeze(2)
        xl = x0
        for i in range(s.L):
            outs, gs = [], []
            for e in range(s.e):
                gs.append(s.gate[e](xl.squeeze(2)))
                v = torch.tanh(torch.matmul(s.V[i][e].t(), xl))
                v = torch.tanh(torch.matmul(s.C[i][e], v))
                u = torch.matmul(s.U[i][e], v)
                outs.append((x0 * (u + s.b[i])).squeeze(2))
            outs = torch.stack(outs, 2)
            gs = torch.stack(gs, 1)
            xl = torch.matmul(outs, gs.softmax(1)) + xl
        return xl.squeeze(2)


@script("recommenders")
def dcn_mix():
    m = DcnMix()
    h = nn.Linear(8, 1)
    o = torch.optim.Adagrad([*m.parameters(), *h.parameters()], lr=0.05)

    def step(x, y):
        p = torch.sigmoid(h(m(x)).squeeze())
        l = F.binary_cross_entropy(p, (y[:, 0] > 0).float(), reduction="sum")
        reg = torch.zeros((1,))
        for _n, w in filter(lambda z: "weight" in z[0] and "bn" not in z[0], h.named_parameters()):
            reg += torch.sum(1e-5 * torch.square(w))
        o.zero_grad()
        tot = l + reg
        tot.backward()
        o.step()
        return tot.item()

    return Script(step, vectors(8, 1), [m, h], 2)
