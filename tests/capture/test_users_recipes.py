"""Steps in the style that users write them: queues, masks, adapters, policies, experts, two optimizers.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841, UP031 (as users write)

from __future__ import annotations

import collections
import dataclasses
import itertools

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import ROWS, net
from torch import nn


def tensor_attr_kept():
    keep = {}

    def step(x):
        y = x.detach() * 2
        y.note = x.shape[0]
        keep["y"] = y
        z = keep["y"]
        return x * z, z.note

    def outer(x):
        r = step(x)
        return r

    return step, [keep]


def dataclass_field_tensor():
    @dataclasses.dataclass
    class S:
        t: torch.Tensor
        n: int = 0
        h: tuple = ()

        def __post_init__(self):
            self.h = (self.n,)

        @property
        def twice(self):
            return self.t * 2

    st = {"s": S(torch.zeros(4))}

    def step(x):
        s = st["s"]
        st["s"] = dataclasses.replace(s, t=s.t + x.detach().sum(0), n=s.n + 1)
        return x * st["s"].twice, st["s"].h, s == s, dataclasses.asdict(st["s"])["n"], s is st["s"]

    return step, [st]


def list_alias_tensor():
    l = [torch.zeros(4)]
    v = l[0]

    def step(x):
        l.append(l[0])
        l[-1].add_(1)
        l[0] = l[0] + x.detach().sum(0)
        if len(l) > 3:
            del l[1:]
        return x * v, l[0] is v, len(l), l[-1] is v

    return step, [l, [v]]


def nested_default():
    t = collections.defaultdict(lambda: collections.defaultdict(int))

    def step(x):
        t["a"][x.shape[0]] += 1
        t[str(x.shape[0])]["n"] += len(t)
        return x * t["a"][x.shape[0]], {k: dict(v) for k, v in t.items()}, "zz" in t, t["new"]["q"]

    return step, [t]


def ring_roll():
    st = {"b": torch.zeros(3, 4)}

    def step(x):
        st["b"] = torch.roll(st["b"], 1, 0)
        st["b"][0] = x.detach().sum(0)
        o = st["b"]
        st["b"] = st["b"].clone()
        o.zero_()
        return x * st["b"].mean(0)

    return step, [st]


def queue_contrast():
    m = nn.Linear(4, 4)

    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("q", F.normalize(torch.randn(4, 6), dim=0))
            self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def push(self, k):
            p = int(self.ptr)
            n = min(k.shape[0], 6 - p)
            self.q[:, p : p + n] = k[:n].T
            self.ptr[0] = (p + n) % 6

        def forward(self, x):
            k = F.normalize(m(x), dim=1)
            l = k @ self.q.clone().detach()
            self.push(k)
            return l

    q = Q()

    def step(x):
        l = q(x).sum()
        l.backward()
        return l.detach(), q.ptr.clone()

    return step, [m, q]


def ppo_loop():
    m = net()
    opt = torch.optim.Adam(m.parameters(), 0.01)
    k = [0]

    def step(x):
        old = m(x).detach()
        logs = []
        for epoch in range(3):
            for i in torch.randperm(x.shape[0]).split(2):
                r = (m(x[i]) - old[i]).exp()
                l = -torch.min(r, r.clamp(0.8, 1.2)).mean()
                opt.zero_grad()
                l.backward()
                opt.step()
                logs.append(l.detach())
            kl = (m(x) - old).abs().mean().item()
            if kl > 0.05:
                k[0] += 1
                break
        return torch.stack(logs), epoch, k[0]

    return step, [m, k]


def gumbel_moe():
    g = nn.Linear(4, 3)
    es = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    load = torch.zeros(3)

    def step(x):
        p = F.gumbel_softmax(g(x), hard=True)
        w, i = g(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(3):
            t, s = torch.where(i == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, es[e](x[t]) * w[t, s, None])
            load[e] += t.numel()
        aux = (load / load.sum() * p.mean(0)).sum()
        (out.sum() + aux).backward()
        return out.detach(), load.clone(), aux.detach()

    return step, [g, es, [load]]


def nan_guard():
    m = net()
    opt = torch.optim.SGD(m.parameters(), 0.1)
    st = {"skipped": 0, "n": 0}

    def step(x):
        st["n"] += 1
        l = m(x).pow(2).mean() * (float("nan") if st["n"] == 3 else 1.0)
        if not torch.isfinite(l):
            st["skipped"] += 1
            print("skip", st["n"])
            return None
        opt.zero_grad()
        l.backward()
        if any(not torch.isfinite(p.grad).all() for p in m.parameters()):
            return -1
        opt.step()
        return l.item()

    return step, [m, st]


def l2_sp():
    m = net()
    init = {n: p.detach().clone() for n, p in m.named_parameters()}

    def step(x):
        reg = sum(((p - init[n]) ** 2).sum() for n, p in m.named_parameters() if "bias" not in n)
        (m(x).sum() + reg).backward()
        with torch.no_grad():
            for n, p in m.named_parameters():
                p.sub_(p.grad, alpha=0.1)
                init[n].lerp_(p, 0.1)
                p.grad.zero_()
        return reg.detach()

    return step, [m, init]


def prune_mask():
    m = nn.Linear(4, 4)
    masks = {}

    def step(x):
        if "w" not in masks or len(masks["h"]) % 2:
            masks["w"] = (m.weight.detach().abs() > 0.2).float()
        masks.setdefault("h", []).append(masks["w"].sum().item())
        m.weight.data *= masks["w"]
        m(x).sum().backward()
        m.weight.grad.mul_(masks["w"])
        return m.weight.grad.clone(), masks["h"][-1]

    return step, [m, masks]


def lora():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, 4) * 0.1)
            self.b = nn.Parameter(torch.zeros(4, 2))
            self.merged = False

        def merge(self):
            self.base.weight.data += self.b.data @ self.a.data
            self.merged = True

        def unmerge(self):
            self.base.weight.data -= self.b.data @ self.a.data
            self.merged = False

        def forward(self, x):
            return self.base(x) if self.merged else self.base(x) + x @ self.a.T @ self.b.T

    m = Lora(nn.Linear(4, 4))
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1)
    k = [0]

    def step(x):
        k[0] += 1
        l = m(x).pow(2).mean()
        l.backward()
        opt.step()
        opt.zero_grad()
        if k[0] == 3:
            m.merge()
            with torch.no_grad():
                e = m(x.detach())
            m.unmerge()
            return l.detach(), e
        return l.detach()

    return step, [m, k]


def multi_opt():
    m = net()
    o = {
        "a": torch.optim.SGD(m[0].parameters(), 0.1, nesterov=True, momentum=0.9),
        "b": torch.optim.Adagrad(m[2].parameters(), 0.1),
    }
    k = itertools.count()
    cnt = {"n": 0}

    def step(x):
        cnt["n"] += 1
        l = m(x).pow(2).mean()
        for v in o.values():
            v.zero_grad()
        l.backward()
        o["a" if cnt["n"] % 2 else "b"].step()
        return l.detach(), {n: len(v.state) for n, v in o.items()}

    return step, [m, cnt]


def sam():
    m = net()
    opt = torch.optim.SGD(m.parameters(), 0.1)
    state = {}

    def step(x):
        m(x).pow(2).mean().backward()
        gn = torch.norm(torch.stack([p.grad.norm() for p in m.parameters()]))
        with torch.no_grad():
            for p in m.parameters():
                e = p.grad * (0.05 / (gn + 1e-12))
                p.add_(e)
                state[p] = e
        opt.zero_grad()
        l = m(x).pow(2).mean()
        l.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(state[p])
        opt.step()
        opt.zero_grad()
        return l.detach(), gn

    return step, [m]


CASES = [
    tensor_attr_kept,
    dataclass_field_tensor,
    list_alias_tensor,
    nested_default,
    ring_roll,
    queue_contrast,
    ppo_loop,
    gumbel_moe,
    nan_guard,
    l2_sp,
    prune_mask,
    lora,
    multi_opt,
    sam,
]


@pytest.mark.share(6)
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)
