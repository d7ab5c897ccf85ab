"""Steps in the style that users write them, which change parameters, gradients, buffers and switches.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import copy
import math
import random
import sys

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import ROWS, net
from torch import nn


def view_inplace():
    buf = torch.zeros(3, 4)

    def step(x):
        row = buf[1]
        row += 1
        buf[0].copy_(row * 2)
        t = buf.t()
        t[2].mul_(3)
        return x.sum() + buf.sum(), row, buf.clone()

    return step, [buf]


def rng_mix():
    def step(x):
        a = random.random()
        n = torch.randn(4)
        if a < 0.5:
            n = n + torch.rand(4)
        d = F.dropout(x, 0.5)
        return d * n + random.gauss(0, 1), random.sample(range(10), 2)

    return step, []


def rng_state():
    def step(x):
        s = torch.random.get_rng_state()
        a = torch.rand(3)
        torch.random.set_rng_state(s)
        b = torch.rand(3)
        torch.manual_seed(int(x.shape[0]))
        return a - b, torch.rand(2), x * 1

    return step, []


def ema_hand():
    m = net()
    ema = {k: v.clone() for k, v in m.state_dict().items()}
    opt = torch.optim.SGD(m.parameters(), lr=0.1)

    def step(x):
        opt.zero_grad()
        l = m(x).pow(2).mean()
        l.backward()
        opt.step()
        with torch.no_grad():
            for k, v in m.state_dict().items():
                ema[k].mul_(0.9).add_(v, alpha=0.1)
        return l.detach(), ema["0.bias"].sum()

    return step, [m, ema]


def ema_lerp():
    m = net()
    e = copy.deepcopy(m).requires_grad_(False)
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)

    def step(x):
        l = m(x).pow(2).mean()
        l.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(m.parameters(), e.parameters()):
                q.lerp_(p, 0.5)
            for p, q in zip(m.buffers(), e.buffers()):
                q.copy_(p)
        return e(x.detach()).sum(), l.detach()

    return step, [m, e]


def buffers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.register_buffer("n", torch.zeros((), dtype=torch.long))
            self.register_buffer("mx", None)

        def forward(self, x):
            self.n += 1
            self.mx = x.detach().max() if self.mx is None else torch.maximum(self.mx, x.detach().max())
            return self.bn(x) * self.n + self.mx

    m = M()

    def step(x):
        return m(x)

    return step, [m]


def buf_reassign():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("h", torch.zeros(4), persistent=False)

        def forward(self, x):
            self.h = 0.5 * self.h + x.mean(0)
            return x + self.h

    m = M()

    def step(x):
        y = m(x)
        m.h = m.h.detach()
        return y

    return step, [m]


def tying():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Linear(4, 4, bias=False)
            self.d = nn.Linear(4, 4, bias=False)
            self.d.weight = self.e.weight

        def forward(self, x):
            return self.d(self.e(x))

    m = M()
    opt = torch.optim.Adam(m.parameters(), lr=0.1)
    k = [0]

    def step(x):
        k[0] += 1
        if k[0] == 3:
            m.d.weight = nn.Parameter(m.e.weight.detach().clone())
        l = m(x).pow(2).sum()
        opt.zero_grad()
        l.backward()
        opt.step()
        return l.detach(), m.d.weight is m.e.weight, len(list(m.parameters()))

    return step, [m, k]


def param_data():
    p = nn.Parameter(torch.ones(4))

    def step(x):
        y = (x * p).sum()
        p.data = p.data * 0.9
        z = (x * p).sum()
        p.data.add_(0.1)
        p.data.copy_(p.data + 1)
        return y + z, p.detach().clone()

    return step, [p]


def param_data_view():
    m = nn.Linear(4, 4)

    def step(x):
        w = m.weight.data
        w[0] = 0
        w.clamp_(-0.3, 0.3)
        y = m(x)
        m.weight.data.sub_(0.01 * torch.sign(m.weight.data))
        return y

    return step, [m]


def req_grad_toggle():
    m = net()
    n = [0]

    def step(x):
        n[0] += 1
        for p in m[0].parameters():
            p.requires_grad_(n[0] % 2 == 0)
        l = m(x).sum()
        l.backward()
        return [p.grad is None for p in m.parameters()], [p.requires_grad for p in m.parameters()]

    return step, [m, n]


def gan_freeze():
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    og, od = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)

    def step(x):
        d.requires_grad_(True)
        od.zero_grad()
        ld = d(x.detach()).mean() - d(g(x.detach()).detach()).mean()
        ld.backward()
        od.step()
        d.requires_grad_(False)
        og.zero_grad()
        lg = -d(g(x.detach())).mean()
        lg.backward()
        og.step()
        return ld.detach(), lg.detach()

    return step, [g, d]


def set_grad_flag():
    m = net()
    n = [0]

    def step(x):
        n[0] += 1
        train = n[0] % 2 == 1
        with torch.set_grad_enabled(train):
            y = m(x)
        prev = torch.is_grad_enabled()
        torch.set_grad_enabled(not train)
        z = m(x)
        torch.set_grad_enabled(prev)
        return y, z, y.requires_grad, z.requires_grad

    return step, [m, n]


def autocast_nest():
    m = net()

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = m(x)
            with torch.autocast("cpu", enabled=False):
                b = m(x.float())
                with torch.autocast("cpu", dtype=torch.float16):
                    c = x @ x.T
            d = a @ a.T
        return a.float().sum() + b.sum() + c.float().sum() + d.float().sum(), a.dtype, c.dtype, d.dtype

    return step, [m]


def grad_accum():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    st = {"i": 0}

    def step(x):
        (m(x).pow(2).mean() / 2).backward()
        st["i"] += 1
        if st["i"] % 2 == 0:
            gn = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            opt.step()
            opt.zero_grad(set_to_none=st["i"] % 4 == 0)
            return gn
        return m[0].weight.grad.norm()

    return step, [m, st]


def lr_by_hand():
    m = net()
    opt = torch.optim.Adam(m.parameters(), lr=1e-2)
    st = {"i": 0}

    def step(x):
        st["i"] += 1
        for g in opt.param_groups:
            g["lr"] = 1e-2 * math.cos(st["i"] / 3)
        l = m(x).pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
        return l.item(), opt.param_groups[0]["lr"]

    return step, [m, st]


def sched():
    m = net()
    opt = torch.optim.SGD(m.parameters(), lr=1.0)
    s = torch.optim.lr_scheduler.LambdaLR(opt, lambda e: 1 / (e + 1))
    p = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)

    def step(x):
        l = m(x).pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
        s.step()
        p.step(l.item())
        return l.detach(), s.get_last_lr(), opt.param_groups[0]["lr"]

    return step, [m]


def grad_by_hand():
    m = net()

    def step(x):
        m.zero_grad()
        m(x).sum().backward()
        with torch.no_grad():
            for p in m.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return [p.grad for p in m.parameters()]

    return step, [m]


def grad_modify():
    m = net()

    def step(x):
        m(x).pow(2).sum().backward()
        tot = 0
        for n, p in m.named_parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
                p.grad += 0.01 * p.detach()
                tot = tot + p.grad.norm() ** 2
        return tot.sqrt(), m[0].weight.grad is m[0].weight.grad

    return step, [m]


def grad_alias():
    p = nn.Parameter(torch.ones(4))
    keep = []

    def step(x):
        (x * p).sum().backward()
        g = p.grad
        keep.append(g)
        p.grad = None if len(keep) % 2 else g.clone()
        return len(keep), [k is p.grad for k in keep]

    return step, [p, keep]


def autograd_grad():
    m = net()

    def step(x):
        y = m(x).sum()
        gs = torch.autograd.grad(y, list(m.parameters()), retain_graph=True)
        (gx,) = torch.autograd.grad(y, x)
        return gx, [g.norm() for g in gs], m[0].weight.grad is None

    return step, [m]


def penalty():
    m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x):
        y = m(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return (g.norm(2, dim=1) - 1).pow(2).mean()

    return step, [m]


def ret_alias():
    buf = torch.zeros(4)
    st = {}

    def step(x):
        buf.add_(1)
        st["v"] = buf[:2]
        st["same"] = buf
        out = (buf, st["v"], [buf])
        return x.sum(), out[0] is buf, out[2][0] is st["same"], st["v"].data_ptr() == buf.data_ptr()

    return step, [st, buf]


def ret_input():
    def step(x):
        return x, [x, x][0] is x, {"x": x}, x.view(-1), x[0]

    return step, []


def mod_train_eval():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    n = [0]

    def step(x):
        n[0] += 1
        m.train(n[0] % 2 == 0)
        y = m(x)
        m.eval()
        with torch.no_grad():
            z = m(x)
        m.train()
        return y, z, m.training

    return step, [m, n]


def mod_swap_layers():
    m = net()
    n = [0]

    def step(x):
        n[0] += 1
        if n[0] == 2:
            m[1] = nn.GELU()
        if n[0] == 4:
            m.append(nn.Identity())
            m.add_module("extra", nn.Linear(4, 4))
        return m(x), len(m), type(m[1]).__name__

    return step, [m, n]


def mod_new_attr():
    m = nn.Linear(4, 4)

    def step(x):
        m.last = x.detach().mean()
        m.count = getattr(m, "count", 0) + 1
        if not hasattr(m, "extra"):
            m.extra = nn.Parameter(torch.ones(4))
        return m(x) * m.extra + m.count + m.last

    return step, [m]


def alternate():
    n = [0]

    def step(x):
        n[0] += 1
        flag = n[0] % 2 == 0
        y = torch.nn.functional.dropout(x, 0.5, training=flag)
        z = x.sum(0, keepdim=flag)
        return y, z, torch.mul(x, flag), x * flag, x.sort(descending=flag)[0]

    return step, [n]


def sqrt_guard():
    n = [0]

    def step(x):
        n[0] += 1
        if x.shape[0] ** 0.5 > 1.9:
            return x * 2
        if n[0] / 2 > 1.75:
            return x + n[0]
        return x * n[0] ** 0.5

    return step, [n]


def print_order():
    log = []

    class Noisy:
        def __repr__(self):
            log.append("repr")
            return "N()"

        def __str__(self):
            return "n"

    n = Noisy()

    def step(x):
        print("a", n, [n], {"k": n}, x.shape, x.dtype, end=";")
        y = x.sum()
        print(f"{y.item():.3f} {n!r:>5} {len(log)}")
        print(*range(3), sep="|", file=sys.stderr)
        return y

    return step, [log]


def id_key():
    st = {}
    m = net()

    def step(x):
        for p in m.parameters():
            st[p] = st.get(p, 0) + 1
        return m(x) * sum(st.values())

    return step, [m]


CASES = [
    view_inplace,
    rng_mix,
    rng_state,
    ema_hand,
    ema_lerp,
    buffers,
    buf_reassign,
    tying,
    param_data,
    param_data_view,
    req_grad_toggle,
    gan_freeze,
    set_grad_flag,
    autocast_nest,
    grad_accum,
    lr_by_hand,
    sched,
    grad_by_hand,
    grad_modify,
    grad_alias,
    autograd_grad,
    penalty,
    ret_alias,
    ret_input,
    mod_train_eval,
    mod_swap_layers,
    mod_new_attr,
    alternate,
    sqrt_guard,
    print_order,
    id_key,
]


@pytest.mark.share(12)
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)
