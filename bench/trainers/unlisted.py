# mypy: ignore-errors
# ruff: noqa: B905, E741, F401
"""Training scripts of kinds that nobody had listed: speech, diffusion, replay, depths, numbers that a loss decides."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import Script, images, labelled, mlp, rows, script, texts, vectors


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.lab = nn.Embedding(11, 16)
        self.drop = 0.1
        self.x = nn.Conv2d(2, 16, 2, 2)
        self.t = mlp(16, 16)
        self.ad = nn.Linear(16, 6 * 16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.moe_gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList([mlp(16, 32, 16) for _ in range(4)])
        self.n = nn.LayerNorm(16, elementwise_affine=False)
        self.out = nn.Linear(16, 4 * 4)

    def temb(self, t, dim=16, max_period=10000):
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half).to(
            device=t.device
        )
        args = t[:, None].float() * freqs[None]
        emb = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        if dim % 2:
            emb = torch.cat([emb, torch.zeros_like(emb[:, :1])], dim=-1)
        return emb

    def forward(self, x, t, y, force=None):
        if self.training and self.drop > 0 or force is not None:
            ids = torch.rand(y.shape[0]) < self.drop if force is None else force == 1
            y = torch.where(ids, 10, y)
        h = self.x(x).flatten(2).transpose(1, 2)
        c = self.t(self.temb(t)) + self.lab(y)
        s1, c1, g1, s2, c2, g2 = self.ad(F.silu(c)).chunk(6, dim=1)
        z = self.n(h) * (1 + c1.unsqueeze(1)) + s1.unsqueeze(1)
        h = h + g1.unsqueeze(1) * self.attn(z, z, z, need_weights=False)[0]
        z = self.n(h) * (1 + c2.unsqueeze(1)) + s2.unsqueeze(1)
        f = z.reshape(-1, 16)
        w, idx = self.moe_gate(f).softmax(-1).topk(2, dim=-1)
        o = torch.zeros_like(f)
        for i, e in enumerate(self.experts):
            r, k = torch.where(idx == i)
            if r.numel() == 0:
                continue
            o[r] += w[r, k, None] * e(f[r])
        h = h + g2.unsqueeze(1) * o.view_as(h)
        h = self.out(h)
        c, p = (4, 2)
        hh = ww = int(h.shape[1] ** 0.5)
        h = h.reshape(h.shape[0], hh, ww, p, p, c)
        return torch.einsum("nhwpqc->nchpwq", h).reshape(h.shape[0], c, hh * p, ww * p)


def mean_flat(t):
    return t.mean(dim=list(range(1, len(t.shape))))


def _extract(arr, t, shape):
    res = torch.from_numpy(arr)[t].float()
    while len(res.shape) < len(shape):
        res = res[..., None]
    return res + torch.zeros(shape)


class Diffusion:
    def __init__(self, T=50):
        betas = np.linspace(0.0001, 0.02, T, dtype=np.float64)
        self.num_timesteps = int(betas.shape[0])
        ac = np.cumprod(1.0 - betas, axis=0)
        self.sa, self.sb = (np.sqrt(ac), np.sqrt(1.0 - ac))
        self.w = np.append(0.1, 1 / betas[1:] / 100)

    def q_sample(self, x0, t, noise):
        return _extract(self.sa, t, x0.shape) * x0 + _extract(self.sb, t, x0.shape) * noise

    def training_losses(self, model, x0, t, kw=None, noise=None):
        if kw is None:
            kw = {}
        if noise is None:
            noise = torch.randn_like(x0)
        xt = self.q_sample(x0, t, noise)
        out = model(xt, t, **kw)
        B, C = xt.shape[:2]
        assert out.shape == (B, C * 2, *xt.shape[2:])
        out, var = torch.split(out, C, dim=1)
        frozen = torch.cat([out.detach(), var], dim=1)
        terms = {"vb": mean_flat((frozen[:, C:] - 0.1) ** 2) * _extract(self.w, t, (B,)) / 1000.0}
        terms["mse"] = mean_flat((noise - out) ** 2)
        if "vb" in terms:
            terms["loss"] = terms["mse"] + terms["vb"]
        else:
            terms["loss"] = terms["mse"]
        return terms


@torch.no_grad()
def update_ema(ema_model, model, decay=0.9999):
    ep, mp = (OrderedDict(ema_model.named_parameters()), OrderedDict(model.named_parameters()))
    for name, p in mp.items():
        ep[name].mul_(decay).add_(p.data, alpha=1 - decay)


@script("generative")
def dit_with_experts():
    m = DiT()
    ema = copy.deepcopy(m)
    for p in ema.parameters():
        p.requires_grad = False
    d = Diffusion()
    o = torch.optim.AdamW(m.parameters(), lr=0.0001, weight_decay=0)
    update_ema(ema, m, decay=0)
    m.train()
    ema.eval()
    s = {"train_steps": 0, "log_steps": 0, "running_loss": 0}
    logs = []
    start = [time.time()]

    def step(x, y):
        with torch.no_grad():
            x = (x + 0.01 * torch.randn_like(x)).mul_(0.18215)
        t = torch.randint(0, d.num_timesteps, (x.shape[0],))
        ld = d.training_losses(m, x, t, dict(y=y))
        loss = ld["loss"].mean()
        o.zero_grad()
        loss.backward()
        o.step()
        update_ema(ema, m)
        s["running_loss"] += loss.item()
        s["log_steps"] += 1
        s["train_steps"] += 1
        if s["train_steps"] % 10 == 0:
            end = time.time()
            sps = s["log_steps"] / (end - start[0])
            avg = torch.tensor(s["running_loss"] / s["log_steps"])
            avg = avg.item() / 1
            logs.append(f"(step={s['train_steps']:07d}) Train Loss: {avg:.4f}, Train Steps/Sec: {sps:.2f}")
            s["running_loss"] = 0
            s["log_steps"] = 0
            start[0] = time.time()
        return loss.item()

    return Script(step, images(2, 8, 10), [m, ema], 1)


def adam(*mods, lr=0.001):
    return torch.optim.Adam([p for m in mods for p in m.parameters()], lr=lr)


@script("habits")
def several_teachers():
    teachers = [mlp(8, 32, 4).eval() for _ in range(3)]
    st = mlp(8, 16, 4)
    o = adam(st)
    hist = {i: deque(maxlen=5) for i in range(3)}

    def step(x, y):
        with torch.no_grad():
            outs = [t(x) for t in teachers]
        tl = [F.cross_entropy(t, y).item() for t in outs]
        for i, l in enumerate(tl):
            hist[i].append(l)
        avg = {i: sum(h) / len(h) for i, h in hist.items()}
        w = [math.exp(-avg[i]) for i in range(3)]
        z = sum(w)
        w = [a / z for a in w]
        best = min(avg, key=avg.get)
        out = st(x)
        T = 4.0
        kd = sum(
            (
                wi * F.kl_div(F.log_softmax(out / T, 1), F.softmax(t / T, 1), reduction="batchmean") * T * T
                for wi, t in zip(w, outs)
            )
        )
        loss = 0.5 * F.cross_entropy(out, y) + 0.5 * kd
        o.zero_grad()
        loss.backward()
        o.step()
        return (loss.item(), best)

    return Script(step, labelled(8, 4), [st])


class EarlyStopping:
    def __init__(self, patience=5, delta=0.0):
        self.patience, self.delta, self.counter, self.best_score, self.early_stop, self.val_loss_min = (
            patience,
            delta,
            0,
            None,
            False,
            float("inf"),
        )

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None:
            self.best_score = score
            self.save(val_loss, model)
        elif score < self.best_score + self.delta:
            self.counter += 1
            if self.counter >= self.patience:
                self.early_stop = True
        else:
            self.best_score = score
            self.save(val_loss, model)
            self.counter = 0

    def save(self, val_loss, model):
        self.state = {k: v.clone() for k, v in model.state_dict().items()}
        self.val_loss_min = val_loss


@script("habits")
def curriculum_by_loss():
    m = mlp(8, 32, 4)
    o = torch.optim.SGD(m.parameters(), 0.05)
    sch = torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.5)
    es = EarlyStopping(patience=60)
    s = {"keep": 0.5, "ema": None, "level": 0, "good": 0}

    def step(x, y):
        l = F.cross_entropy(m(x), y, reduction="none")
        k = max(1, int(s["keep"] * len(l)))
        loss = l.topk(k, largest=False)[0].mean()
        o.zero_grad()
        loss.backward()
        o.step()
        v = loss.item()
        s["ema"] = v if s["ema"] is None else 0.9 * s["ema"] + 0.1 * v
        if v < s["ema"]:
            s["good"] += 1
            if s["good"] >= 3:
                s["level"] += 1
                s["good"] = 0
                s["keep"] = min(1.0, s["keep"] * 1.1)
        else:
            s["good"] = 0
        sch.step(v)
        es(v, m)
        return (v, s["level"], es.counter)

    return Script(step, labelled(8, 4), [m])


@script("habits")
def gradient_noise_scale():
    m = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)], nn.Linear(16, 4))
    groups = []
    for i, l in enumerate(reversed(list(m.children()))):
        for n, p in l.named_parameters():
            groups.append(
                {
                    "params": [p],
                    "lr": 0.001 * 0.8**i,
                    "weight_decay": 0.0 if n.endswith("bias") else 0.01,
                    "lr_scale": 0.8**i,
                }
            )
    o = torch.optim.AdamW(groups)
    st = {"S": 0.0, "G": 0.0, "n": 0}
    logs = defaultdict(list)

    def lr_at(it):
        return (
            0.001 * min(1.0, it / 10) if it < 10 else 0.0001 + 0.5 * 0.0009 * (1 + math.cos(math.pi * (it - 10) / 40))
        )

    def step(x, y):
        lr = lr_at(st["n"])
        for gp in o.param_groups:
            gp["lr"] = lr * gp["lr_scale"] if "lr_scale" in gp else lr
        o.zero_grad()
        B = x.shape[0]
        b = max(1, B // 2)
        small = []
        for xs, ys in zip(x.split(b), y.split(b)):
            (F.cross_entropy(m(xs), ys) * len(xs) / B).backward()
            small.append(sum(p.grad.pow(2).sum() for p in m.parameters()).item())
        big = sum(p.grad.pow(2).sum() for p in m.parameters()).item()
        G = (B * big - b * small[0]) / (B - b)
        S = (small[0] - big) / (1 / b - 1 / B)
        st["G"] = 0.9 * st["G"] + 0.1 * G
        st["S"] = 0.9 * st["S"] + 0.1 * S
        st["n"] += 1
        noise = st["S"] / st["G"] if st["G"] != 0 else float("nan")
        logs["noise"].append(noise)
        if st["n"] % 10 == 0:
            for n, p in m.named_parameters():
                logs[f"grad/{n}"].append(p.grad.norm().item())
                logs[f"ratio/{n}"].append((p.grad.std() / p.std()).log10().item())
        o.step()
        return noise

    return Script(step, labelled(16, 4), [m])


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a = nn.MultiheadAttention(d, 2, batch_first=True)
        self.m = mlp(d, 32, d)
        self.n1, self.n2 = (nn.LayerNorm(d), nn.LayerNorm(d))

    def forward(self, x):
        T = x.shape[1]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        z = self.n1(x)
        x = x + self.a(z, z, z, attn_mask=mask, need_weights=False)[0]
        return x + self.m(self.n2(x))


class MoD(nn.Module):
    def __init__(self, d=16, cap=0.5):
        super().__init__()
        self.b = Block(d)
        self.router = nn.Linear(d, 1, bias=False)
        self.aux = mlp(d, 8, 1)
        self.cap = cap
        self.aux_loss = None

    def forward(self, x):
        B, T, D = x.shape
        k = min(T, int(self.cap * T))
        w = self.router(x).squeeze(-1)
        if self.training:
            topw, topi = torch.topk(w, k, dim=1)
            sel, order = topi.sort(dim=1)
            rw = topw.gather(1, order)
            al = self.aux(x.detach()).squeeze(-1)
            tgt = torch.zeros_like(al).scatter_(1, topi, 1.0)
            self.aux_loss = F.binary_cross_entropy_with_logits(al, tgt)
            idx = sel.unsqueeze(-1).expand(-1, -1, D)
            xs = torch.gather(x, 1, idx)
            out = self.b(xs) - xs
            return x.scatter_add(1, idx, out * torch.sigmoid(rw).unsqueeze(-1))
        return x


@script("language models")
def mixture_of_depths():
    e = nn.Embedding(40, 16)
    bl = nn.ModuleList([Block() if i % 2 == 0 else MoD() for i in range(4)])
    h = nn.Linear(16, 40)
    m = nn.ModuleList([e, bl, h])
    o = adam(m)
    it = {"n": 0}

    def step(x, y):
        m.train()
        z = e(x)
        for b in bl:
            z = b(z)
        ce = F.cross_entropy(h(z).flatten(0, 1), y.flatten())
        aux = sum(b.aux_loss for b in bl if isinstance(b, MoD))
        coef = 0.01 * min(1, it["n"] / 20)
        loss = ce + coef * aux
        o.zero_grad()
        loss.backward()
        o.step()
        it["n"] += 1
        usage = [len(b.aux(z).squeeze(-1).sigmoid().gt(0.5).nonzero()) for b in bl if isinstance(b, MoD)]
        return (ce.item(), usage)

    return Script(step, texts(), [m])


class VMoE(nn.Module):
    def __init__(self, d=16, E=4, cf=1.25):
        super().__init__()
        self.g = nn.Linear(d, E)
        self.ex = nn.ModuleList([mlp(d, 32, d) for _ in range(E)])
        self.E, self.cf = (E, cf)
        self.stats = {}

    def forward(self, x):
        B, T, D = x.shape
        f = x.reshape(-1, D)
        p = F.softmax(self.g(f), -1)
        g1, i1 = p.max(-1)
        p2 = p.masked_fill(F.one_hot(i1, self.E).bool(), 0)
        g2, i2 = p2.max(-1)
        den = g1 + g2 + 1e-09
        g1, g2 = (g1 / den, g2 / den)
        keep = torch.rand_like(g2) < 2 * g2
        cap = max(int(self.cf * f.shape[0] / self.E), 4)
        m1 = F.one_hot(i1, self.E)
        pos1 = (m1.cumsum(0) - 1) * m1
        m1 = m1 * (pos1 < cap)
        m2 = F.one_hot(i2, self.E) * keep.unsqueeze(-1)
        pos2 = (m2.cumsum(0) - 1 + m1.sum(0, keepdim=True)) * m2
        m2 = m2 * (pos2 < cap)
        self.aux = (p.mean(0) * F.one_hot(i1, self.E).float().mean(0)).sum() * self.E
        comb = g1[:, None] * m1 + g2[:, None] * m2
        out = torch.zeros_like(f)
        for i in range(self.E):
            sel = comb[:, i].nonzero(as_tuple=True)[0]
            if len(sel) > 0:
                out[sel] = out[sel] + comb[sel, i].unsqueeze(1) * self.ex[i](f[sel])
        self.stats = {"dropped": 1 - (m1.sum() + m2.sum()).item() / (2 * f.shape[0]), "load": m1.sum(0).tolist()}
        return out.view(B, T, D)


@script("vision")
def vit_moe_with_capacity():
    pe = nn.Conv2d(1, 16, 2, 2)
    l1, l2 = (VMoE(), VMoE())
    n = nn.LayerNorm(16)
    h = nn.Linear(16, 10)
    m = nn.ModuleList([pe, l1, l2, n, h])
    o = torch.optim.AdamW(m.parameters(), 0.001)
    s = {"step": 0}
    log = []

    def coef(step, a=0.1, b=0.001, total=50):
        return b + (a - b) * (1 + math.cos(math.pi * step / total)) / 2

    def step(x, y):
        z = pe(x).flatten(2).transpose(1, 2)
        for l in (l1, l2):
            z = z + l(n(z))
        loss = F.cross_entropy(h(z.mean(1)), y)
        aux = [l.aux for l in m.modules() if isinstance(l, VMoE)]
        tot = loss + coef(s["step"]) * torch.stack(aux).mean()
        o.zero_grad()
        tot.backward()
        o.step()
        s["step"] += 1
        log.append(
            {"loss": loss.item(), **{f"l{i}/{k}": v for i, l in enumerate((l1, l2)) for k, v in l.stats.items()}}
        )
        return (log[-1]["loss"], log[-1]["l0/dropped"], max(log[-1]["l1/load"]))

    return Script(step, images(), [m], 2)


class HMoE(nn.Module):
    def __init__(self, d=16, G=2, E=3):
        super().__init__()
        self.outer = nn.Linear(d, G)
        self.inner = nn.ModuleList([nn.Linear(d, E) for _ in range(G)])
        self.ex = nn.ModuleList([nn.ModuleList([mlp(d, 16, d) for _ in range(E)]) for _ in range(G)])

    def forward(self, x):
        og, oi = self.outer(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for g, (gate, exs) in enumerate(zip(self.inner, self.ex)):
            rows_ = (oi == g).nonzero().squeeze(-1)
            if rows_.numel() == 0:
                continue
            sub = x[rows_]
            ig, ii = gate(sub).softmax(-1).max(-1)
            for e, ex in enumerate(exs):
                mask = ii == e
                if not mask.any():
                    continue
                r = rows_[mask]
                y[r] = ex(sub[mask]) * (og[r] * ig[mask]).unsqueeze(-1)
        return y


@script("language models")
def hierarchical_experts():
    e = nn.Embedding(40, 16)
    mo = HMoE()
    h = nn.Linear(16, 40)
    m = nn.ModuleList([e, mo, h])
    o = adam(m)

    def step(x, y):
        z = e(x).flatten(0, 1)
        z = z + mo(z)
        loss = F.cross_entropy(h(z), y.reshape(-1))
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.item()

    return Script(step, texts(), [m], 6)


@dataclass
class State:
    step: int = 0
    epoch: int = 0
    best: float = float("inf")
    bad: int = 0
    phase: str = "warmup"
    history: list = field(default_factory=list)


@script("habits")
def phases_of_a_dataclass():
    m = mlp(8, 16, 4)
    o = adam(m)
    st = State()

    def step(x, y):
        if st.phase == "warmup" and st.step >= 10:
            st.phase = "main"
        elif st.phase == "main" and st.bad > 6:
            st.phase = "cooldown"
        lr = {"warmup": 0.001 * (st.step + 1) / 10, "main": 0.001, "cooldown": 0.0001}[st.phase]
        for g in o.param_groups:
            g["lr"] = lr
        loss = F.cross_entropy(m(x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        v = loss.item()
        st.step += 1
        if v < st.best - 0.001:
            st.best, st.bad = (v, 0)
        else:
            st.bad += 1
        st.history.append((st.step, v))
        st.epoch = st.step // 10
        return (v, st.bad, st.phase)

    return Script(step, labelled(8, 4), [m])


@script("habits")
def number_chosen_by_loss():
    m = mlp(8, 16, 4)
    o = adam(m)
    s = {"patience": 0, "best": float("inf")}

    def step(x, y):
        loss = F.cross_entropy(m(x), y)
        k = 3 if loss > 1.3 else 5
        pen = sum(p.abs().sum() for p in m.parameters()) / k
        o.zero_grad()
        (loss + 0.0001 * pen).backward()
        o.step()
        if loss < s["best"]:
            s["best"] = loss.item() * 0.99
            s["patience"] = 0
        else:
            s["patience"] += 1
        return (loss.item(), k, s["patience"])

    return Script(step, labelled(8, 4), [m])


@script("habits")
def adaptive_steps():
    m = mlp(8, 16, 4)
    o = adam(m)
    st = {"lr": 0.001, "prev": None, "ups": 0, "downs": 0}

    def step(x, y):
        loss = F.cross_entropy(m(x), y)
        o.zero_grad()
        loss.backward()
        o.step()
        v = loss.item()
        if st["prev"] is not None:
            if v < st["prev"]:
                st["lr"] = min(st["lr"] * 1.05, 0.01)
                st["ups"] += 1
            elif v > st["prev"] * 1.04:
                st["lr"] = st["lr"] * 0.7
                st["downs"] += 1
        st["prev"] = v
        for g in o.param_groups:
            g["lr"] = st["lr"]
        return (v, st["ups"], st["downs"])

    return Script(step, labelled(8, 4), [m])


@script("habits")
def best_of_lists():
    m = mlp(8, 16, 4)
    o = adam(m)
    best = [float("inf")] * 3
    counts = [0, 0, 0]

    def step(x, y):
        out = m(x)
        ls = [F.cross_entropy(out, y), F.mse_loss(out.softmax(1), F.one_hot(y, 4).float()), out.pow(2).mean()]
        tot = sum(ls)
        o.zero_grad()
        tot.backward()
        o.step()
        for i, l in enumerate(ls):
            v = l.item()
            if v < best[i]:
                best[i] = v
                counts[i] = 0
            else:
                counts[i] += 1
        return (tot.item(), list(counts))

    return Script(step, labelled(8, 4), [m])


@script("vision")
def yolo_like_targets():
    m = nn.Conv2d(1, 7, 3, padding=1)
    o = adam(m)

    def step(x, targets):
        p = m(x)
        B, _, H, W = p.shape
        p = p.permute(0, 2, 3, 1)
        tobj = torch.zeros(B, H, W)
        lbox, lcls = (torch.zeros(1), torch.zeros(1))
        gain = torch.ones(6)
        gain[2:] = torch.tensor([W, H, W, H])
        t = targets * gain
        nt = targets.shape[0]
        if nt:
            b, c = t[:, :2].long().T
            gxy, gwh = (t[:, 2:4], t[:, 4:6])
            gij = gxy.long()
            gi, gj = gij.T
            gi, gj = (gi.clamp_(0, W - 1), gj.clamp_(0, H - 1))
            ps = p[b, gj, gi]
            pxy = ps[:, :2].sigmoid() * 2 - 0.5
            pwh = (ps[:, 2:4].sigmoid() * 2) ** 2
            lbox += F.mse_loss(torch.cat((pxy, pwh), 1), torch.cat((gxy - gij, gwh), 1))
            tobj[b, gj, gi] = 1.0
            tc = torch.full_like(ps[:, 5:], 0.05)
            tc[range(nt), c] = 0.95
            lcls += F.binary_cross_entropy_with_logits(ps[:, 5:], tc)
        lobj = F.binary_cross_entropy_with_logits(p[..., 4], tobj)
        loss = (lbox * 0.05 + lobj + lcls * 0.5) * B
        o.zero_grad()
        loss.backward()
        o.step()
        return torch.cat((lbox, lobj[None], lcls, loss)).detach().tolist()

    b = []
    for i in range(50):
        n = rows(i)
        k = i * 3 % 7
        t = torch.rand(k, 6)
        t[:, 0] = torch.randint(n, (k,))
        t[:, 1] = torch.randint(2, (k,))
        b.append((torch.randn(n, 1, 6, 6), t / torch.tensor([1, 1, 1, 1, 1, 1.0])))
    return Script(step, b, [m])
