"""Training loops in the style that users write them: optimizers, schedules, averages, layers that are chosen.

Six calls of each beside plain Python: results, gradients, what the step changed, what was printed, random
state.
"""

# ruff: noqa: B006, B007, B008, B012, B018, B023, B028, B904, B905, E701, E702, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import collections
import contextlib
import random

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import ROWS, net
from torch import nn


def inputs_inplace():
    def step(x):
        y = x.detach()
        y += 1
        y[0] = 0
        y[:, 1].mul_(2)
        y[y > 1] = 0.5
        z = y.view(-1)[::2]
        z.zero_()
        torch.add(y, 1, out=y)
        y.index_add_(0, torch.tensor([0]), torch.ones(1, y.shape[1]))
        y.T.copy_(y.clone().T)
        return x * 2, y, z, y.is_contiguous()

    return step, []


def overlap():
    b = torch.arange(8.0)

    def step(x):
        b[1:].copy_(b[:-1].clone())
        v = b.as_strided((3,), (2,))
        v += 1
        w = b.unfold(0, 2, 2)
        c = b.view(2, 4)
        c[1] += c[0]
        b.roll(1)
        s = b.split(4)
        s[0].fill_(7)
        u, v2 = b.chunk(2)
        u.add_(v2)
        b[[0, 1]] = b[[1, 0]]
        return x.sum() + b.sum(), b.clone(), w.clone()

    return step, [b]


def backward_twice():
    m = net()

    def step(x):
        l = m(x).pow(2).sum()
        l.backward(retain_graph=True)
        g = m[0].weight.grad
        g1 = g.clone()
        l.backward()
        same = m[0].weight.grad is g
        m[0].weight.grad.zero_()
        (m(x).sum() * 2).backward(inputs=[m[2].weight])
        return g1, g.clone(), same, m[0].weight.grad.sum(), m[2].weight.grad.clone()

    return step, [m]


def grad_swap():
    m = nn.Linear(4, 4)
    bank = {}

    def step(x):
        m.zero_grad()
        m(x).sum().backward()
        bank["a"] = {n: p.grad for n, p in m.named_parameters()}
        for p in m.parameters():
            p.grad = None
        m(x * 2).sum().backward()
        for n, p in m.named_parameters():
            p.grad = p.grad + bank["a"][n]
        bank["b"] = m.weight.grad
        return m.weight.grad is bank["b"], bank["a"]["weight"].sum()

    return step, [m, bank]


def add_group():
    m, n = nn.Linear(4, 4), nn.Linear(4, 4)
    opt = torch.optim.Adam(m.parameters(), lr=0.1)
    k = [0]

    def step(x):
        k[0] += 1
        if k[0] == 2:
            opt.add_param_group({"params": list(n.parameters()), "lr": 0.01})
        if k[0] == 4:
            opt.param_groups[0]["betas"] = (0.5, 0.9)
        if k[0] == 5:
            opt.state[m.weight]["exp_avg"].zero_()
        opt.zero_grad()
        l = n(m(x)).pow(2).mean()
        l.backward()
        opt.step()
        return l.detach(), len(opt.param_groups), opt.state[m.weight]["step"].clone()

    return step, [m, n, k]


def scheds():
    m = net()
    opt = torch.optim.AdamW(m.parameters(), lr=0.1)
    ss = [
        torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, total_steps=20),
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
    ]
    w = (
        torch.optim.lr_scheduler.SequentialLR(
            torch.optim.SGD(m.parameters(), 0.1),
            [torch.optim.lr_scheduler.ConstantLR(opt, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)],
            [2],
        )
        if False
        else None
    )

    def step(x):
        l = m(x).pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
        for s in ss:
            s.step()
        return l.detach(), opt.param_groups[0]["lr"], ss[1].last_epoch

    return step, [m]


def swa():
    m = net()
    a = torch.optim.swa_utils.AveragedModel(m)
    opt = torch.optim.SGD(m.parameters(), 0.1)

    def step(x):
        l = m(x).pow(2).mean()
        l.backward()
        opt.step()
        opt.zero_grad()
        a.update_parameters(m)
        return a(x.detach()).sum(), int(a.n_averaged)

    return step, [m, a]


def spectral():
    m = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    w = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    k = [0]

    def step(x):
        k[0] += 1
        if k[0] == 4:
            m.eval()
        return w(m(x)).sum() + m.weight.sum()

    return step, [m, w, k]


def clip_value():
    m = net()
    opt = torch.optim.RMSprop(m.parameters(), 0.01)

    def step(x):
        opt.zero_grad()
        l = (m(x) * 100).pow(2).mean()
        l.backward()
        nn.utils.clip_grad_value_(m.parameters(), 0.5)
        n = nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True)
        if n > 0.5:
            opt.step()
        else:
            print("skip")
        return n, l.detach()

    return step, [m]


def rnn():
    m = nn.LSTM(4, 8, batch_first=True)
    h = {"s": None}

    def step(x):
        o, s = m(x[None], h["s"])
        h["s"] = tuple(t.detach() for t in s)
        return o, h["s"][0]

    return step, [m, h]


def emb_max():
    e = nn.Embedding(10, 4, max_norm=1.0, padding_idx=0)
    eb = nn.EmbeddingBag(10, 4)

    def step(x):
        i = (x.detach() * 9).long()[:, 0]
        return e(i) * x + eb(i[None]), e.weight.detach().norm(dim=1)

    return step, [e, eb]


def bn_modes():
    b = nn.BatchNorm1d(4, momentum=None)
    g = nn.GroupNorm(2, 4)
    k = [0]

    def step(x):
        k[0] += 1
        b.track_running_stats = k[0] != 3
        b.momentum = None if k[0] < 4 else 0.1
        return g(b(x)), b.num_batches_tracked.clone(), b.running_mean.clone()

    return step, [b, g, k]


def cond_layers():
    m = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    st = {"use": "a", "hist": collections.deque(maxlen=2)}

    def step(x):
        y = m[st["use"]](x)
        st["hist"].append(st["use"])
        st["use"] = "b" if st["hist"].count("a") else "a"
        for n, p in m.named_parameters():
            if n.startswith(st["use"]):
                y = y + p.sum()
        return y, [n for n, _ in m.named_children()], "a" in m, list(m.keys())

    return step, [m, st]


def early_layers():
    ls = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    k = [0]

    def step(x):
        k[0] += 1
        outs = []
        for i, l in enumerate(ls):
            if random.random() < 0.3:
                continue
            x = l(x)
            outs.append(x)
            if i + 1 >= k[0]:
                break
        ls[0].weight.data.mul_(0.99)
        return x, len(outs), torch.stack(outs).sum() if outs else None

    return step, [ls, k]


def trainer_class():
    class T:
        def __init__(self):
            self.m = net()
            self.opt = torch.optim.Adam(self.m.parameters(), 0.01)
            self.step_no = 0
            self.metrics = collections.defaultdict(float)
            self.cb = [self.on_log]
            self.history = []

        def on_log(self, **k):
            self.history.append({**k, "step": self.step_no})

        def fire(self, **k):
            for c in self.cb:
                c(**k)

        def train_step(self, x):
            self.step_no += 1
            l = F.mse_loss(self.m(x), x.detach())
            self.opt.zero_grad(set_to_none=True)
            l.backward()
            self.opt.step()
            self.metrics["loss"] += l.item()
            self.metrics["n"] += 1
            if self.step_no % 2 == 0:
                self.fire(loss=self.metrics["loss"] / self.metrics["n"])
                self.metrics.clear()
            return {"loss": l.detach(), "step": self.step_no}

    t = T()
    return t.train_step, [t.m, t.metrics, t.history]


def distill():
    s, t = net(), net().eval().requires_grad_(False)
    opt = torch.optim.SGD(s.parameters(), 0.1)
    k = [0]

    def step(x):
        k[0] += 1
        with torch.no_grad():
            tgt = t(x).softmax(-1)
        T = 2.0 if k[0] < 3 else 1.0
        l = F.kl_div(F.log_softmax(s(x) / T, -1), tgt, reduction="batchmean") * T * T
        opt.zero_grad()
        l.backward()
        opt.step()
        if k[0] % 3 == 0:
            t.load_state_dict(s.state_dict())
        return l.detach(), (s(x).argmax(-1) == tgt.argmax(-1)).float().mean().item()

    return step, [s, t, k]


def micro():
    m = net()
    opt = torch.optim.SGD(m.parameters(), 0.1)

    def step(x):
        tot = 0.0
        for i, mb in enumerate(x.split(2)):
            ctx = contextlib.nullcontext() if i else torch.autocast("cpu", dtype=torch.bfloat16)
            with ctx:
                l = m(mb).float().mean() / 2
            l.backward()
            tot += l.item()
        opt.step()
        opt.zero_grad()
        return tot

    return step, [m]


CASES = [
    inputs_inplace,
    overlap,
    backward_twice,
    grad_swap,
    add_group,
    scheds,
    swa,
    spectral,
    clip_value,
    rnn,
    emb_max,
    bn_modes,
    cond_layers,
    early_layers,
    trainer_class,
    distill,
    micro,
]


@pytest.mark.share(7)
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_six_calls_are_plain_pythons(recipe):
    plain_python.compare(recipe, sizes=ROWS)
