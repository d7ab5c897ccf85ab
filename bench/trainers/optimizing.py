# mypy: ignore-errors
# ruff: noqa: E741
"""Optimizers, schedules and averages of public code bases; small habits around a step."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import time
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import Script, labelled, mlp, script, texts, vectors


def adam(*mods, lr=1e-3):
    return torch.optim.Adam([p for m in mods for p in m.parameters()], lr=lr)


def numbered(b):
    return [(*x, i) for i, x in enumerate(b)]


@script("optimizers")
def learning_rate_finder():
    m = mlp(8, 32, 4)
    o = torch.optim.SGD(m.parameters(), lr=1e-4)
    s = {"best": 0.0, "avg": 0.0, "n": 0, "losses": [], "lrs": [], "stop": False}
    beta = 0.98
    mult = (1 / 1e-4) ** (1 / 40)

    def step(x, y):
        if s["stop"]:
            return None
        s["n"] += 1
        o.zero_grad()
        l = F.cross_entropy(m(x), y)
        s["avg"] = beta * s["avg"] + (1 - beta) * l.item()
        sm = s["avg"] / (1 - beta ** s["n"])
        if s["n"] > 1 and sm > 4 * s["best"]:
            s["stop"] = True
            return sm
        if sm < s["best"] or s["n"] == 1:
            s["best"] = sm
        s["losses"].append(sm)
        s["lrs"].append(math.log10(o.param_groups[0]["lr"]))
        l.backward()
        o.step()
        o.param_groups[0]["lr"] *= mult
        return sm

    return Script(step, labelled(8, 4), [m])


class Lookahead(torch.optim.Optimizer):
    def __init__(s, base, alpha=0.5, k=3):
        s.base = base
        s.param_groups = base.param_groups
        s.defaults = base.defaults
        s.state = defaultdict(dict)
        s.alpha, s.k = alpha, k
        for g in s.param_groups:
            g["step_counter"] = 0

    def update_slow(s, g):
        for p in g["params"]:
            if p.grad is None:
                continue
            st = s.state[p]
            if "slow" not in st:
                st["slow"] = torch.empty_like(p.data)
                st["slow"].copy_(p.data)
            slow = st["slow"]
            slow.add_(p.data - slow, alpha=s.alpha)
            p.data.copy_(slow)

    def step(s, closure=None):
        l = s.base.step(closure)
        for g in s.param_groups:
            g["step_counter"] += 1
            if g["step_counter"] % s.k == 0:
                s.update_slow(g)
        return l

    def zero_grad(s):
        s.base.zero_grad()


class RAdam(torch.optim.Optimizer):
    def __init__(s, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, buffer=[[None, None, None] for _ in range(10)]))

    @torch.no_grad()
    def step(s, closure=None):
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                gr = p.grad.float()
                st = s.state[p]
                if len(st) == 0:
                    st["step"] = 0
                    st["exp_avg"] = torch.zeros_like(p)
                    st["exp_avg_sq"] = torch.zeros_like(p)
                b1, b2 = g["betas"]
                a, q = st["exp_avg"], st["exp_avg_sq"]
                q.mul_(b2).addcmul_(gr, gr, value=1 - b2)
                a.mul_(b1).add_(gr, alpha=1 - b1)
                st["step"] += 1
                buf = g["buffer"][int(st["step"] % 10)]
                if st["step"] == buf[0]:
                    nsma, size = buf[1], buf[2]
                else:
                    buf[0] = st["step"]
                    b2t = b2 ** st["step"]
                    mx = 2 / (1 - b2) - 1
                    nsma = mx - 2 * st["step"] * b2t / (1 - b2t)
                    buf[1] = nsma
                    if nsma >= 5:
                        size = math.sqrt((1 - b2t) * (nsma - 4) / (mx - 4) * (nsma - 2) / nsma * mx / (mx - 2)) / (
                            1 - b1 ** st["step"]
                        )
                    else:
                        size = 1.0 / (1 - b1 ** st["step"])
                    buf[2] = size
                if nsma >= 5:
                    p.addcdiv_(a, q.sqrt().add_(g["eps"]), value=-size * g["lr"])
                else:
                    p.add_(a, alpha=-size * g["lr"])


@script("optimizers")
def ranger():
    m = mlp(8, 32, 4)
    o = Lookahead(RAdam(m.parameters()))

    def step(x, y):
        o.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        o.step()
        return l.item()

    return Script(step, labelled(8, 4), [m])


class Lamb(torch.optim.Optimizer):
    def __init__(s, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    def step(s, closure=None):
        dev = s.param_groups[0]["params"][0].device
        one = torch.tensor(1.0, device=dev)
        gn = torch.zeros(1, device=dev)
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                gn.add_(p.grad.pow(2).sum())
        gn = torch.sqrt(gn)
        clip = torch.where(gn > 1.0, gn / 1.0, one)
        for g in s.param_groups:
            g["step"] = g.get("step", 0) + 1
            for p in g["params"]:
                if p.grad is None:
                    continue
                gr = p.grad.data.div_(clip)
                st = s.state[p]
                if not st:
                    st["m"] = torch.zeros_like(p.data)
                    st["v"] = torch.zeros_like(p.data)
                st["m"].mul_(0.9).add_(gr, alpha=0.1)
                st["v"].mul_(0.999).addcmul_(gr, gr, value=0.001)
                u = (st["m"] / (1 - 0.9 ** g["step"])).div_(
                    (st["v"].sqrt() / math.sqrt(1 - 0.999 ** g["step"])).add_(1e-6)
                )
                u.add_(p.data, alpha=0.01)
                w, un = p.data.norm(2.0), u.norm(2.0)
                tr = torch.where(w > 0, torch.where(un > 0, w / un, one), one)
                u.mul_(tr)
                p.data.add_(u, alpha=-g["lr"])


@script("optimizers")
def lamb():
    m = mlp(8, 32, 4)
    o = Lamb(m.parameters())

    def step(x, y):
        o.zero_grad()
        l = F.cross_entropy(m(x), y)
        l.backward()
        o.step()
        return l.item()

    return Script(step, labelled(8, 4), [m])


@script("optimizers")
def reptile():
    m = mlp(4, 16, 1)
    np.random.RandomState(1)

    def step(x, y, i):
        before = copy.deepcopy(m.state_dict())
        for _ in range(2):
            m.zero_grad()
            l = F.mse_loss(m(x), y)
            l.backward()
            for p in m.parameters():
                p.data -= 0.02 * p.grad.data
        after = m.state_dict()
        outer = 0.1 * (1 - i / 50)
        m.load_state_dict({n: before[n] + (after[n] - before[n]) * outer for n in before})
        return l.item()

    return Script(step, numbered(vectors(4, 1)), [m])


@script("optimizers")
def federated_averaging():
    g = mlp(8, 16, 4)

    def step(x, y):
        locals_ = []
        for a, b in zip(torch.chunk(x, 2), torch.chunk(y, 2), strict=False):
            net = copy.deepcopy(g)
            net.train()
            o = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
            for _ in range(2):
                net.zero_grad()
                l = F.cross_entropy(net(a), b)
                l.backward()
                o.step()
            locals_.append((copy.deepcopy(net.state_dict()), l.item()))
        w = copy.deepcopy(locals_[0][0])
        for k in w.keys():
            for i in range(1, len(locals_)):
                w[k] += locals_[i][0][k]
            w[k] = torch.div(w[k], len(locals_))
        g.load_state_dict(w)
        return sum(l for _, l in locals_) / len(locals_)

    return Script(step, labelled(8, 4), [g])


class ModelEMA:
    def __init__(s, model, decay):
        s.model, s.decay, s.shadow, s.backup = model, decay, {}, {}

    def register(s):
        for n, p in s.model.named_parameters():
            if p.requires_grad:
                s.shadow[n] = p.data.clone()

    def update(s):
        for n, p in s.model.named_parameters():
            if p.requires_grad:
                assert n in s.shadow
                s.shadow[n] = ((1.0 - s.decay) * p.data + s.decay * s.shadow[n]).clone()

    def apply_shadow(s):
        for n, p in s.model.named_parameters():
            if p.requires_grad:
                s.backup[n] = p.data
                p.data = s.shadow[n]

    def restore(s):
        for n, p in s.model.named_parameters():
            if p.requires_grad:
                p.data = s.backup[n]
        s.backup = {}


@script("habits")
def ema_with_shadow_dict():
    m = mlp(8, 32, 4)
    o = adam(m)
    e = ModelEMA(m, 0.9)
    e.register()

    def step(x, y, i):
        l = F.cross_entropy(m(x), y)
        o.zero_grad()
        l.backward()
        o.step()
        e.update()
        acc = None
        if i % 4 == 3:
            e.apply_shadow()
            m.eval()
            with torch.no_grad():
                acc = (m(x).argmax(-1) == y).float().mean().item()
            m.train()
            e.restore()
        return l.item(), acc

    return Script(step, numbered(labelled(8, 4)), [m])


class NoamOpt:
    def __init__(s, size, factor, warmup, opt):
        s.optimizer, s._step, s.warmup, s.factor, s.model_size, s._rate = opt, 0, warmup, factor, size, 0

    def step(s):
        s._step += 1
        r = s.rate()
        for p in s.optimizer.param_groups:
            p["lr"] = r
        s._rate = r
        s.optimizer.step()

    def rate(s, step=None):
        if step is None:
            step = s._step
        return s.factor * (s.model_size**-0.5 * min(step**-0.5, step * s.warmup**-1.5))


class LabelSmoothing(nn.Module):
    def __init__(s, size, pad, sm=0.1):
        super().__init__()
        s.c = nn.KLDivLoss(reduction="sum")
        s.pad, s.conf, s.sm, s.size = pad, 1 - sm, sm, size
        s.true_dist = None

    def forward(s, x, t):
        d = x.data.clone()
        d.fill_(s.sm / (s.size - 2))
        d.scatter_(1, t.data.unsqueeze(1), s.conf)
        d[:, s.pad] = 0
        mask = torch.nonzero(t.data == s.pad)
        if mask.dim() > 0 and len(mask) > 0:
            d.index_fill_(0, mask.squeeze(1), 0.0)
        s.true_dist = d
        return s.c(x, d.clone())


@script("language models")
def annotated_transformer():
    emb = nn.Embedding(40, 16)
    enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    out = nn.Linear(16, 40)
    mods = [emb, enc, out]
    o = NoamOpt(
        16, 1, 10, torch.optim.Adam([p for m in mods for p in m.parameters()], lr=0, betas=(0.9, 0.98), eps=1e-9)
    )
    c = LabelSmoothing(40, 0)

    def step(x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        h = out(enc(emb(x) * math.sqrt(16), mask=mask)).log_softmax(-1)
        n = (y != 0).data.sum()
        l = c(h.contiguous().view(-1, h.size(-1)), y.contiguous().view(-1)) / n
        l.backward()
        o.step()
        o.optimizer.zero_grad()
        return l.item() * n.item(), o._rate

    return Script(step, texts(8), mods)


@script("habits")
def json_lines_and_dict_writer():
    m = mlp(8, 32, 4)
    o = adam(m)
    f = io.StringIO()
    j = io.StringIO()
    w = csv.DictWriter(f, ["step", "loss", "lr"])
    w.writeheader()
    last = [time.time()]

    def step(x, y, i):
        l = F.cross_entropy(m(x), y)
        o.zero_grad()
        l.backward()
        o.step()
        row = {"step": i, "loss": f"{l.item():.4f}", "lr": o.param_groups[0]["lr"]}
        if i % 3 == 0:
            w.writerow(row)
            print(json.dumps(row), file=j)
            j.flush()
        now = time.time()
        dt = now - last[0]
        last[0] = now
        return row["loss"], dt >= 0

    return Script(step, numbered(labelled(8, 4)), [m])


@script("recommenders")
def fit_called_twice():
    class DeepCtr(nn.Module):
        def __init__(s):
            super().__init__()
            s.net = mlp(8, 16, 1)
            s.metrics = {"auc": lambda y, p: float(np.mean(p[y > 0.5]) if (y > 0.5).any() else 0.0)}
            s.optim = adam(s.net)
            s.history = {}

        def fit(s, x, y, batch_size=4, epochs=2):
            torch.utils.data.TensorDataset(x, y)
            n = len(x)
            steps = (n - 1) // batch_size + 1
            for epoch in range(epochs):
                loss_epoch = 0
                tr = {}
                for i in range(steps):
                    a, b = x[i * batch_size : (i + 1) * batch_size], y[i * batch_size : (i + 1) * batch_size]
                    p = torch.sigmoid(s.net(a)).squeeze(-1)
                    s.optim.zero_grad()
                    l = F.binary_cross_entropy(p, b, reduction="sum")
                    l.backward()
                    s.optim.step()
                    loss_epoch += l.item()
                    for nme, fn in s.metrics.items():
                        tr.setdefault(nme, []).append(fn(b.cpu().data.numpy(), p.cpu().data.numpy().astype("float64")))
                logs = {"loss": loss_epoch / n, **{k: float(np.sum(v) / steps) for k, v in tr.items()}}
                s.history.setdefault(epoch, []).append(logs["loss"])
            return logs

    m = DeepCtr()

    def step(x, y):
        m.fit(x, y)
        return m.fit(x, y)

    return Script(step, [(x, (z[:, 0] > 0).float()) for x, z in vectors(8, 1)], [m])
