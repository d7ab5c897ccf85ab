# mypy: ignore-errors
# ruff: noqa: E741
"""Representations and generative models as public code bases train them."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, labelled, mlp, rows, script, vectors


def adam(*mods, lr=1e-3):
    return torch.optim.Adam([p for m in mods for p in m.parameters() if p.requires_grad], lr=lr)


def numbered(b):
    return [(*x, i) for i, x in enumerate(b)]


class MoCo(nn.Module):
    def __init__(s, dim=8, K=64, m=0.99, T=0.07):
        super().__init__()
        s.K, s.m, s.T = K, m, T
        s.encoder_q = mlp(8, 16, dim)
        s.encoder_k = mlp(8, 16, dim)
        for q, k in zip(s.encoder_q.parameters(), s.encoder_k.parameters(), strict=False):
            k.data.copy_(q.data)
            k.requires_grad = False
        s.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        s.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _mom(s):
        for q, k in zip(s.encoder_q.parameters(), s.encoder_k.parameters(), strict=False):
            k.data = k.data * s.m + q.data * (1.0 - s.m)

    @torch.no_grad()
    def _deq(s, keys):
        b = keys.shape[0]
        ptr = int(s.queue_ptr)
        s.queue[:, ptr : ptr + b] = keys.T[:, : max(0, s.K - ptr)]
        ptr = (ptr + b) % s.K
        s.queue_ptr[0] = ptr

    def forward(s, a, b):
        q = F.normalize(s.encoder_q(a), dim=1)
        with torch.no_grad():
            s._mom()
            idx = torch.randperm(b.shape[0])
            k = F.normalize(s.encoder_k(b[idx]), dim=1)
            k = k[torch.argsort(idx)]
        lp = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        ln = torch.einsum("nc,ck->nk", [q, s.queue.clone().detach()])
        lg = torch.cat([lp, ln], 1) / s.T
        lab = torch.zeros(lg.shape[0], dtype=torch.long)
        s._deq(k)
        return lg, lab


@script("vision")
def moco_queue():
    m = MoCo()
    o = torch.optim.SGD(m.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    def step(a, b):
        out, t = m(a, b)
        l = F.cross_entropy(out, t)
        _, pred = out.topk(5, 1, True, True)
        correct = pred.t().eq(t.view(1, -1).expand_as(pred.t()))
        acc = [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(t)) for k in (1, 5)]
        o.zero_grad()
        l.backward()
        o.step()
        return l.item(), acc[0][0].item()

    return Script(step, vectors(8, 8), [m])


@script("vision")
def byol_with_lazy_target():
    class Byol(nn.Module):
        def __init__(s):
            super().__init__()
            s.online = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
            s.pred = mlp(8, 16, 8)
            s.target = None

        def get_target(s):
            if s.target is None:
                s.target = copy.deepcopy(s.online)
                for p in s.target.parameters():
                    p.requires_grad = False
            return s.target

        def forward(s, a, b):
            def f(x, y):
                return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)

            oa, ob = s.pred(s.online(a)), s.pred(s.online(b))
            with torch.no_grad():
                t = s.get_target()
                ta, tb = t(a), t(b)
            return (f(oa, tb.detach()) + f(ob, ta.detach())).mean()

        def ema(s):
            for c, t in zip(s.online.parameters(), s.target.parameters(), strict=False):
                t.data = t.data * 0.99 + (1 - 0.99) * c.data

    m = Byol()
    o = torch.optim.Adam([*m.online.parameters(), *m.pred.parameters()], lr=1e-3)

    def step(a, b):
        l = m(a, b)
        o.zero_grad()
        l.backward()
        o.step()
        m.ema()
        return l.item()

    return Script(step, vectors(8, 8), [m])


@script("vision")
def dino_with_center():
    st = mlp(8, 16, 12)
    te = copy.deepcopy(st)
    center = torch.zeros(1, 12)
    o = torch.optim.AdamW(st.parameters(), lr=1e-3)
    sched = np.concatenate((np.linspace(0.04, 0.07, 10), np.ones(40) * 0.07))
    mom = [0.996 + 0.004 * (1 - math.cos(math.pi * i / 50)) / 2 for i in range(50)]
    for p in te.parameters():
        p.requires_grad = False
    c = {"c": center}

    def step(x, i):
        for _k, g in enumerate(o.param_groups):
            g["weight_decay"] = mom[i] * 0.04
        views = [x, x + 0.1 * torch.randn_like(x), x * 0.9]
        so = (st(torch.cat(views)) / 0.1).chunk(3)
        to = F.softmax((te(torch.cat(views[:2])) - c["c"]) / sched[i], -1).detach().chunk(2)
        tot, n = 0, 0
        for iq, q in enumerate(to):
            for v in range(len(so)):
                if v == iq:
                    continue
                tot += torch.sum(-q * F.log_softmax(so[v], -1), -1).mean()
                n += 1
        tot /= n
        c["c"] = c["c"] * 0.9 + torch.cat(to).mean(0, keepdim=True) * 0.1
        o.zero_grad()
        tot.backward()
        o.step()
        with torch.no_grad():
            m = mom[i]
            for a, b in zip(st.parameters(), te.parameters(), strict=False):
                b.data.mul_(m).add_((1 - m) * a.detach().data)
        return tot.item()

    return Script(step, numbered(vectors(8)), [st, te])


class VQ(nn.Module):
    def __init__(s, n=16, d=8, decay=0.99):
        super().__init__()
        s.n, s.d, s.decay, s.eps = n, d, decay, 1e-5
        s.embedding = nn.Embedding(n, d)
        s.register_buffer("_ema_cluster_size", torch.zeros(n))
        s._ema_w = nn.Parameter(torch.randn(n, d))
        s.embedding.weight.requires_grad_(False)
        s._ema_w.requires_grad_(False)

    def forward(s, x):
        sh = x.shape
        f = x.view(-1, s.d)
        dist = (
            torch.sum(f**2, 1, keepdim=True)
            + torch.sum(s.embedding.weight**2, 1)
            - 2 * torch.matmul(f, s.embedding.weight.t())
        )
        idx = torch.argmin(dist, 1).unsqueeze(1)
        enc = torch.zeros(idx.shape[0], s.n)
        enc.scatter_(1, idx, 1)
        q = torch.matmul(enc, s.embedding.weight).view(sh)
        if s.training:
            s._ema_cluster_size = s._ema_cluster_size * s.decay + (1 - s.decay) * torch.sum(enc, 0)
            n = torch.sum(s._ema_cluster_size.data)
            s._ema_cluster_size = (s._ema_cluster_size + s.eps) / (n + s.n * s.eps) * n
            dw = torch.matmul(enc.t(), f)
            s._ema_w = nn.Parameter(s._ema_w * s.decay + (1 - s.decay) * dw)
            s.embedding.weight = nn.Parameter(s._ema_w / s._ema_cluster_size.unsqueeze(1))
        l = 0.25 * F.mse_loss(q.detach(), x)
        q = x + (q - x).detach()
        p = enc.mean(0)
        return l, q, torch.exp(-torch.sum(p * torch.log(p + 1e-10)))


@script("generative")
def vq_vae_with_ema_codes():
    e, d, v = mlp(16, 16, 8), mlp(8, 16, 16), VQ()
    o = adam(e, d)
    err, perp = [], []

    def step(x):
        o.zero_grad()
        l, q, p = v(e(x))
        r = F.mse_loss(d(q), x) / 0.5
        (r + l).backward()
        o.step()
        err.append(r.item())
        perp.append(p.item())
        return err[-1], perp[-1]

    return Script(step, vectors(16), [e, d, v])


class Embedder:
    def __init__(s, **kw):
        s.kw = kw
        s.create()

    def create(s):
        fns, d, od = [], s.kw["d"], 0
        if s.kw["inc"]:
            fns.append(lambda x: x)
            od += d
        for fr in 2.0 ** torch.linspace(0, s.kw["m"], steps=s.kw["n"]):
            for p in [torch.sin, torch.cos]:
                fns.append(lambda x, p=p, fr=fr: p(x * fr))
                od += d
        s.fns, s.out = fns, od

    def embed(s, x):
        return torch.cat([f(x) for f in s.fns], -1)


def sample_pdf(bins, w, n):
    w = w + 1e-5
    pdf = w / w.sum(-1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand(list(cdf.shape[:-1]) + [n]).contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below = torch.max(torch.zeros_like(inds - 1), inds - 1)
    above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds)
    ig = torch.stack([below, above], -1)
    ms = [ig.shape[0], ig.shape[1], cdf.shape[-1]]
    cg = torch.gather(cdf.unsqueeze(1).expand(ms), 2, ig)
    bg = torch.gather(bins.unsqueeze(1).expand(ms), 2, ig)
    den = cg[..., 1] - cg[..., 0]
    den = torch.where(den < 1e-5, torch.ones_like(den), den)
    t = (u - cg[..., 0]) / den
    return bg[..., 0] + t * (bg[..., 1] - bg[..., 0])


@script("generative")
def nerf():
    e = Embedder(d=3, inc=True, m=3, n=4)
    coarse, fine = mlp(e.out, 32, 4), mlp(e.out, 32, 4)
    o = adam(coarse, fine, lr=5e-4)
    g = {"step": 0}

    def batchify(fn, chunk):
        return (
            (lambda inp: torch.cat([fn(inp[i : i + chunk]) for i in range(0, inp.shape[0], chunk)], 0)) if chunk else fn
        )

    def raw2(raw, z, rd):
        dists = z[..., 1:] - z[..., :-1]
        dists = torch.cat([dists, torch.Tensor([1e10]).expand(dists[..., :1].shape)], -1) * torch.norm(
            rd[..., None, :], dim=-1
        )
        rgb = torch.sigmoid(raw[..., :3])
        noise = torch.randn(raw[..., 3].shape) * 1.0
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3] + noise) * dists)
        w = alpha * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return torch.sum(w[..., None] * rgb, -2), w

    def run(net, pts):
        return batchify(net, 16)(e.embed(pts.reshape(-1, 3))).view(*pts.shape[:-1], 4)

    def step(ro, rd, tgt):
        t = torch.linspace(0.0, 1.0, steps=6)
        z = (2.0 * (1 - t) + 6.0 * t).expand([ro.shape[0], 6])
        mids = 0.5 * (z[..., 1:] + z[..., :-1])
        up = torch.cat([mids, z[..., -1:]], -1)
        lo = torch.cat([z[..., :1], mids], -1)
        z = lo + (up - lo) * torch.rand(z.shape)
        rgb0, w = raw2(run(coarse, ro[..., None, :] + rd[..., None, :] * z[..., :, None]), z, rd)
        zs = sample_pdf(0.5 * (z[..., 1:] + z[..., :-1]), w[..., 1:-1], 4).detach()
        z2, _ = torch.sort(torch.cat([z, zs], -1), -1)
        rgb, _ = raw2(run(fine, ro[..., None, :] + rd[..., None, :] * z2[..., :, None]), z2, rd)
        o.zero_grad()
        l = ((rgb - tgt) ** 2).mean()
        l2 = ((rgb0 - tgt) ** 2).mean()
        psnr = -10.0 * torch.log(l) / torch.log(torch.Tensor([10.0]))
        (l + l2).backward()
        o.step()
        new = 5e-4 * (0.1 ** (g["step"] / 250))
        for pg in o.param_groups:
            pg["lr"] = new
        g["step"] += 1
        return l.item(), psnr.item()

    return Script(step, vectors(3, 3, 3), [coarse, fine])


def extract(a, t, shape):
    b, *_ = t.shape
    return a.gather(-1, t).reshape(b, *((1,) * (len(shape) - 1)))


@script("generative")
def ddim():
    T = 20
    beta = torch.linspace(1e-4, 0.02, T)
    ac = torch.cumprod(1 - beta, 0)
    m = mlp(10, 32, 8)
    o = adam(m)
    ema = copy.deepcopy(m)

    def eps(net, x, t):
        return net(torch.cat([x, torch.stack([torch.sin(t / 10.0), torch.cos(t / 10.0)], 1)], 1))

    @torch.no_grad()
    def sample(n, steps=5, eta=0.5):
        times = list(reversed(torch.linspace(-1, T - 1, steps=steps + 1).int().tolist()))
        x = torch.randn(n, 8)
        for time, nxt in zip(times[:-1], times[1:], strict=False):
            tc = torch.full((n,), time, dtype=torch.long)
            e = eps(ema, x, tc)
            a = ac[time]
            x0 = ((x - (1 - a).sqrt() * e) / a.sqrt()).clamp(-1, 1)
            if nxt < 0:
                x = x0
                continue
            an = ac[nxt]
            sg = eta * ((1 - a / an) * (1 - an) / (1 - a)).sqrt()
            c = (1 - an - sg**2).sqrt()
            x = x0 * an.sqrt() + c * e + sg * torch.randn_like(x)
        return x

    def step(x, i):
        t = torch.randint(0, T, (x.shape[0],)).long()
        n = torch.randn_like(x)
        xt = extract(ac.sqrt(), t, x.shape) * x + extract((1 - ac).sqrt(), t, x.shape) * n
        l = F.smooth_l1_loss(eps(m, xt, t), n, reduction="none")
        l = (l.mean(1) * extract((ac / (1 - ac)).clamp(max=5), t, (len(x),))).mean()
        l.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        o.zero_grad()
        for a, b in zip(m.parameters(), ema.parameters(), strict=False):
            b.data = b.data * 0.9 + 0.1 * a.data
        s = sample(2).mean().item() if i % 10 == 0 else None
        return l.item(), s

    return Script(step, numbered(vectors(8)), [m, ema])


class GradRev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.alpha, None


@script("vision")
def dann():
    f, c, d = mlp(8, 16), mlp(16, 3), mlp(16, 2)
    o = adam(f, c, d)

    def step(xs, y, xt, i):
        p = float(i) / 50
        alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
        o.zero_grad()
        hs = f(xs)
        l1 = F.nll_loss(c(hs).log_softmax(1), y)
        l2 = F.cross_entropy(d(GradRev.apply(hs, alpha)), torch.zeros(len(xs)).long())
        ht = f(xt)
        l3 = F.cross_entropy(d(GradRev.apply(ht, alpha)), torch.ones(len(xt)).long())
        err = l1 + l2 + l3
        err.backward()
        o.step()
        return l1.data.cpu().numpy().item(), l2.item(), l3.item()

    return Script(step, [(x, y, torch.randn(len(x), 8), i) for i, (x, y) in enumerate(labelled(8, 3))], [f, c, d])


@script("generative")
def spectral_gan_with_r1():
    G = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 16)), nn.ReLU(), nn.Linear(16, 8))
    D = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 16)),
        nn.LeakyReLU(0.2),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 1)),
    )
    go, do = adam(G), adam(D)
    mean_path = [0.0]

    def step(real, i):
        for p in D.parameters():
            p.requires_grad_(True)
        z = torch.randn(len(real), 4)
        fake = G(z).detach()
        dl = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake)).mean()
        do.zero_grad()
        dl.backward()
        do.step()
        r1 = 0.0
        if i % 4 == 0:
            real = real.detach().requires_grad_(True)
            (gr,) = torch.autograd.grad(D(real).sum(), real, create_graph=True)
            r = gr.pow(2).reshape(gr.shape[0], -1).sum(1).mean()
            do.zero_grad()
            (5 * r * 4).backward()
            do.step()
            r1 = r.item()
        for p in D.parameters():
            p.requires_grad_(False)
        z = torch.randn(len(real), 4, requires_grad=True)
        f = G(z)
        gl = -D(f).mean()
        (gz,) = torch.autograd.grad((f * torch.randn_like(f) / math.sqrt(8)).sum(), z, create_graph=True)
        pl = gz.pow(2).sum(1).sqrt()
        m = mean_path[0] + 0.01 * (pl.mean().item() - mean_path[0])
        mean_path[0] = m
        go.zero_grad()
        (gl + 2 * (pl - m).pow(2).mean()).backward()
        go.step()
        return dl.item(), gl.item(), r1

    return Script(step, numbered(vectors(8)), [G, D])


@script("vision")
def mean_teacher_fixmatch():
    m = mlp(8, 32, 4)
    t = copy.deepcopy(m)
    o = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for p in t.parameters():
        p.detach_()

    def ramp(cur, length):
        if length == 0:
            return 1.0
        cur = np.clip(cur, 0.0, length)
        ph = 1.0 - cur / length
        return float(np.exp(-5.0 * ph * ph))

    def step(x, y, u, i):
        inputs = torch.cat((x, u + 0.1 * torch.randn_like(u), u + 0.5 * torch.randn_like(u)))
        lg = m(inputs)
        lx = lg[: len(x)]
        lw, ls = lg[len(x) :].chunk(2)
        l1 = F.cross_entropy(lx, y)
        pl = torch.softmax(lw.detach() / 1.0, -1)
        mp, tu = torch.max(pl, -1)
        mask = mp.ge(0.3).float()
        l2 = (F.cross_entropy(ls, tu, reduction="none") * mask).mean()
        l3 = F.mse_loss(lw.softmax(1), t(u).softmax(1).detach())
        loss = l1 + l2 + ramp(i, 20) * l3
        o.zero_grad()
        loss.backward()
        o.step()
        a = min(1 - 1 / (i + 1), 0.99)
        for ep, p in zip(t.parameters(), m.parameters(), strict=False):
            ep.data.mul_(a).add_(p.data, alpha=1 - a)
        return loss.item(), mask.mean().item()

    return Script(step, [(x, y, torch.randn(len(x), 8), i) for i, (x, y) in enumerate(labelled(8, 4))], [m, t])


@script("language models")
def word2vec_sparse():
    u, v = nn.Embedding(50, 8, sparse=True), nn.Embedding(50, 8, sparse=True)
    o = torch.optim.SparseAdam([*u.parameters(), *v.parameters()], lr=0.01)
    run = [0.0]

    def step(a, b, neg, i):
        eu, ev, en = u(a), v(b), v(neg)
        s = torch.clamp(torch.sum(eu * ev, 1), max=10, min=-10)
        s = -F.logsigmoid(s)
        ns = torch.bmm(en, eu.unsqueeze(2)).squeeze()
        ns = -torch.sum(F.logsigmoid(-ns.clamp(-10, 10)), 1)
        l = torch.mean(s + ns)
        o.zero_grad()
        l.backward()
        o.step()
        run[0] = run[0] * 0.9 + l.item() * 0.1
        if i > 0 and i % 5 == 0:
            print(" Loss: " + str(run[0]))
        return run[0]

    return Script(
        step,
        [
            (torch.randint(50, (r,)), torch.randint(50, (r,)), torch.randint(50, (r, 5)), i)
            for i, r in enumerate(map(rows, range(STEPS)))
        ],
        [u, v],
    )


@script("optimizers")
def ewc_and_uncertainty_weights():
    m = mlp(8, 16, 4)
    lv = nn.Parameter(torch.zeros(2))
    o = torch.optim.Adam([*m.parameters(), lv], lr=1e-2)
    S = {"fisher": {}, "opt": {}}

    def step(x, y, i):
        if i == 6:
            for n, p in m.named_parameters():
                S["fisher"][n] = p.grad.detach() ** 2 if p.grad is not None else torch.zeros_like(p)
                S["opt"][n] = p.detach().clone()
        out = m(x)
        ls = [F.cross_entropy(out, y), out.pow(2).mean()]
        l = sum(torch.exp(-lv[k]) * a + lv[k] for k, a in enumerate(ls))
        if S["fisher"]:
            l = l + 100 * sum((S["fisher"][n] * (p - S["opt"][n]) ** 2).sum() for n, p in m.named_parameters())
        o.zero_grad()
        l.backward()
        o.step()
        return l.item()

    return Script(step, numbered(labelled(8, 4)), [m])
