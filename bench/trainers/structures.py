# mypy: ignore-errors
# ruff: noqa: E741
"""Graphs, trees, sequences of symbols, environments."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, mlp, rows, script, vectors


def adam(*mods, lr=1e-3):
    return torch.optim.Adam([p for m in mods for p in m.parameters() if p.requires_grad], lr=lr)


class MessagePassing(nn.Module):
    def __init__(s, aggr="add", flow="source_to_target"):
        super().__init__()
        import inspect

        s.aggr = aggr
        s.i, s.j = (1, 0)
        s.user_args = [k for k in inspect.signature(s.message).parameters]

    def collect(s, ei, size, kw):
        out = {}
        for a in s.user_args:
            if a[-2:] not in ("_i", "_j"):
                out[a] = kw.get(a)
            else:
                dim = s.j if a[-2:] == "_j" else s.i
                d = kw.get(a[:-2])
                if isinstance(d, (tuple, list)):
                    d = d[dim]
                if isinstance(d, torch.Tensor):
                    d = d.index_select(0, ei[dim])
                out[a] = d
        out.update(index=ei[s.i], dim_size=size)
        return out

    def propagate(s, ei, size, **kw):
        c = s.collect(ei, size, kw)
        m = s.message(**{k: c[k] for k in s.user_args})
        return torch.zeros(c["dim_size"], *m.shape[1:]).scatter_add_(
            0, c["index"].view(-1, *[1] * (m.dim() - 1)).expand_as(m), m
        )

    def message(s, x_j):
        return x_j


def softmax(src, index, n):
    mx = torch.zeros(n, src.size(1)).scatter_reduce_(
        0, index[:, None].expand_as(src), src.detach(), "amax", include_self=False
    )
    out = (src - mx.index_select(0, index)).exp()
    sm = torch.zeros(n, src.size(1)).scatter_add_(0, index[:, None].expand_as(src), out) + 1e-16
    return out / sm.index_select(0, index)


class Gat(MessagePassing):
    def __init__(s, i, o, h=2):
        s.h, s.o = h, o
        super().__init__()
        s.lin = nn.Linear(i, h * o, bias=False)
        s.att = nn.Parameter(torch.randn(1, h, 2 * o) * 0.1)

    def forward(s, x, ei):
        n = x.size(0)
        loop = torch.arange(n).unsqueeze(0).repeat(2, 1)
        mask = ei[0] != ei[1]
        ei = torch.cat([ei[:, mask], loop], 1)
        return s.propagate(ei, n, x=s.lin(x).view(-1, s.h, s.o), n=n, ind=ei[1]).flatten(1)

    def message(s, x_i, x_j, ind, n):
        a = F.leaky_relu((torch.cat([x_i, x_j], -1) * s.att).sum(-1), 0.2)
        a = F.dropout(softmax(a, ind, n), 0.1, s.training)
        return x_j * a.unsqueeze(-1)


@script("vision")
def graph_attention():
    g1, g2 = Gat(6, 4), Gat(8, 4)
    lin = nn.Linear(8, 3)
    o = adam(g1, g2, lin)

    def step(x, ei, batch, y):
        h = F.elu(g1(x, ei))
        h = g2(h, ei)
        size = int(batch.max().item() + 1)
        p = (
            torch.zeros(size, h.size(1)).index_add_(0, batch, h)
            / torch.bincount(batch, minlength=size).clamp(min=1)[:, None]
        )
        l = F.cross_entropy(lin(p), y)
        o.zero_grad()
        l.backward()
        o.step()
        return l.item()

    bs = []
    for i in range(STEPS):
        r = rows(i)
        n = [random.randint(3, 6) for _ in range(r)]
        b = torch.repeat_interleave(torch.arange(r), torch.tensor(n))
        off = 0
        es = []
        for k in n:
            es.append(torch.randint(k, (2, 2 * k)) + off)
            off += k
        bs.append((torch.randn(off, 6), torch.cat(es, 1), b, torch.randint(3, (r,))))
    return Script(step, bs, [g1, g2, lin])


@script("reinforcement learning")
def gflownet_trajectory_balance():
    H = 4
    fwd = mlp(2 * H, 32, 3)
    logZ = nn.Parameter(torch.zeros(1))
    o = torch.optim.Adam([{"params": fwd.parameters(), "lr": 1e-3}, {"params": [logZ], "lr": 0.1}])

    def oh(s):
        return torch.cat([F.one_hot(s[:, k], H).float() for k in range(2)], 1)

    def step(x):
        n = len(x)
        s = torch.zeros(n, 2, dtype=torch.long)
        done = torch.full((n,), False)
        ll = torch.zeros(n)
        while torch.any(~done):
            lg = fwd(oh(s[~done]))
            mask = torch.cat([s[~done] == H - 1, torch.zeros(len(lg), 1, dtype=torch.bool)], 1)
            lg = lg.masked_fill(mask, -1e9)
            d = torch.distributions.Categorical(logits=lg)
            a = d.sample()
            ll[~done] += d.log_prob(a)
            term = a == 2
            nd = done.clone()
            nd[~done] = term
            with torch.no_grad():
                s[~nd] = s[~nd].scatter_add(
                    1, a[~term].unsqueeze(1), torch.ones(int((~term).sum()), 1, dtype=torch.long)
                )
            done = nd
        r = 1e-1 + (s.float() / (H - 1) - 0.5).abs().prod(1)
        l = ((logZ + ll - r.log()) ** 2).mean()
        o.zero_grad()
        l.backward()
        o.step()
        return l.item(), logZ.item()

    return Script(step, vectors(2), [fwd])


class Batch:
    def __init__(s, d=None, **kw):
        s.__dict__.update(d or {})
        s.__dict__.update(kw)

    def __getitem__(s, i):
        return s.__dict__[i] if isinstance(i, str) else Batch({k: v[i] for k, v in s.__dict__.items()})

    def __len__(s):
        return min(len(v) for v in s.__dict__.values())

    def keys(s):
        return s.__dict__.keys()

    def split(s, size, shuffle=True):
        n = len(s)
        idx = np.random.permutation(n) if shuffle else np.arange(n)
        for i in range(0, n, size):
            yield s[idx[i : i + size]]


@script("reinforcement learning")
def tianshou_ppo():
    ac = mlp(6, 32, 3)
    cr = mlp(6, 32, 1)
    o = adam(ac, cr, lr=3e-4)

    def step(obs, rew):
        b = Batch(obs=obs, rew=rew[:, 0])
        with torch.no_grad():
            d = torch.distributions.Categorical(logits=ac(b.obs))
            b.act = d.sample()
            b.logp_old = d.log_prob(b.act)
            b.v_s = cr(b.obs).flatten()
            b.adv = b.rew - b.v_s
            b.returns = b.rew
        out = defaultdict(list)
        for _ in range(2):
            for mb in b.split(4):
                d = torch.distributions.Categorical(logits=ac(mb.obs))
                ratio = (d.log_prob(mb.act) - mb.logp_old).exp().float()
                ad = (mb.adv - mb.adv.mean()) / (mb.adv.std() + 1e-8) if len(mb) > 1 else mb.adv
                clip = -torch.min(ratio * ad, ratio.clamp(0.8, 1.2) * ad).mean()
                v = cr(mb.obs).flatten()
                vf = (mb.returns - v).pow(2).mean()
                ent = d.entropy().mean()
                l = clip + 0.25 * vf - 0.01 * ent
                o.zero_grad()
                l.backward()
                nn.utils.clip_grad_norm_([*ac.parameters(), *cr.parameters()], 0.5)
                o.step()
                out["clip"].append(clip.item())
                out["loss"].append(l.item())
        return {k: sum(v) / len(v) for k, v in out.items()}

    return Script(step, vectors(6, 1), [ac, cr])


RB = namedtuple("RB", "obs act old adv ret")


@script("reinforcement learning")
def stable_baselines_rollout():
    pi, vf = mlp(6, 32, 2), mlp(6, 32, 1)
    ls = nn.Parameter(torch.zeros(2))
    o = torch.optim.Adam([*pi.parameters(), *vf.parameters(), ls], lr=3e-4, eps=1e-5)
    log = {}

    class Buf:
        def __init__(s, n):
            s.n = n
            s.obs = np.zeros((n, 6), np.float32)
            s.act = np.zeros((n, 2), np.float32)
            s.rew = np.zeros(n, np.float32)
            s.val = np.zeros(n, np.float32)
            s.lp = np.zeros(n, np.float32)
            s.pos = 0

        def add(s, o_, a, r, v, l):
            s.obs[s.pos] = o_
            s.act[s.pos] = a
            s.rew[s.pos] = r
            s.val[s.pos] = v
            s.lp[s.pos] = l
            s.pos += 1

        def finish(s):
            s.adv = np.zeros_like(s.rew)
            last = 0.0
            for t in reversed(range(s.n)):
                nv = s.val[t + 1] if t < s.n - 1 else 0.0
                d = s.rew[t] + 0.99 * nv - s.val[t]
                last = d + 0.99 * 0.95 * last
                s.adv[t] = last
            s.ret = s.adv + s.val

        def get(s, bs):
            ix = np.random.permutation(s.n)
            st = 0
            while st < s.n:
                i = ix[st : st + bs]
                yield RB(*tuple(torch.as_tensor(x[i]) for x in (s.obs, s.act, s.lp, s.adv, s.ret)))
                st += bs

    def step(x):
        b = Buf(len(x))
        for row in x:
            with torch.no_grad():
                d = torch.distributions.Normal(pi(row), ls.exp())
                a = d.sample()
                v = vf(row)
                lp = d.log_prob(a).sum(-1)
            b.add(row.numpy(), a.numpy(), float(-a.pow(2).sum()), v.item(), lp.item())
        b.finish()
        pl = []
        for rb in b.get(4):
            d = torch.distributions.Normal(pi(rb.obs), ls.exp().expand(len(rb.obs), 2))
            lp = d.log_prob(rb.act).sum(-1)
            r = (lp - rb.old).exp()
            l1 = -torch.min(r * rb.adv, r.clamp(0.8, 1.2) * rb.adv).mean() + 0.5 * F.mse_loss(
                rb.ret, vf(rb.obs).flatten()
            )
            o.zero_grad()
            l1.backward()
            o.step()
            pl.append(l1.item())
        ev = 1 - np.var(b.ret - b.val) / (np.var(b.ret) + 1e-8)
        log["ev"] = float(ev)
        return float(np.mean(pl))

    return Script(step, [(x[:4] if len(x) > 4 else x,) for (x,) in vectors(6)], [pi, vf])


@script("reinforcement learning")
def td3_delayed_policy():
    class TD3:
        def __init__(s):
            s.a = nn.Sequential(mlp(4, 16, 2), nn.Tanh())
            s.at = copy.deepcopy(s.a)
            s.q1, s.q2 = mlp(6, 16, 1), mlp(6, 16, 1)
            s.t1, s.t2 = copy.deepcopy(s.q1), copy.deepcopy(s.q2)
            s.ao = adam(s.a)
            s.co = adam(s.q1, s.q2)
            s.total_it = 0

        def train(s, o, a, r, o2):
            s.total_it += 1
            with torch.no_grad():
                n = (torch.randn_like(a) * 0.2).clamp(-0.5, 0.5)
                na = (s.at(o2) + n).clamp(-1, 1)
                sa = torch.cat([o2, na], 1)
                tq = r + 0.99 * torch.min(s.t1(sa), s.t2(sa))
            sa = torch.cat([o, a], 1)
            cl = F.mse_loss(s.q1(sa), tq) + F.mse_loss(s.q2(sa), tq)
            s.co.zero_grad()
            cl.backward()
            s.co.step()
            al = None
            if s.total_it % 2 == 0:
                al = -s.q1(torch.cat([o, s.a(o)], 1)).mean()
                s.ao.zero_grad()
                al.backward()
                s.ao.step()
                for n_, t in ((s.q1, s.t1), (s.q2, s.t2), (s.a, s.at)):
                    for p, q in zip(n_.parameters(), t.parameters(), strict=False):
                        q.data.copy_(0.005 * p.data + 0.995 * q.data)
            return cl.item(), None if al is None else al.item()

    t = TD3()
    return Script(t.train, vectors(4, 2, 1, 4), [t.a, t.q1, t.q2, t.at, t.t1])


@script("reinforcement learning")
def prioritized_c51():
    atoms = 11
    sup = torch.linspace(-2, 2, atoms)
    q = mlp(4, 16, 2 * atoms)
    t = copy.deepcopy(q)
    o = adam(q)
    pri = np.ones(64, np.float32)
    data = torch.randn(64, 4)
    nxt = torch.randn(64, 4)
    rew = torch.randn(64)
    act = torch.randint(2, (64,))
    st = {"n": 0}

    def step(n):
        p = pri**0.6
        p /= p.sum()
        idx = np.random.choice(64, n, p=p)
        w = (64 * p[idx]) ** -0.4
        w = torch.from_numpy((w / w.max()).astype(np.float32))
        b = torch.from_numpy(idx)
        with torch.no_grad():
            nd = t(nxt[b]).view(-1, 2, atoms).softmax(-1)
            na = (nd * sup).sum(-1).argmax(1)
            nd = nd[range(n), na]
            Tz = (rew[b].unsqueeze(1) + 0.9 * sup).clamp(-2, 2)
            bb = (Tz + 2) / 0.4
            l = bb.floor().long()
            u = bb.ceil().long()
            l[(u > 0) * (l == u)] -= 1
            u[(l < atoms - 1) * (l == u)] += 1
            off = torch.linspace(0, (n - 1) * atoms, n).long().unsqueeze(1).expand(n, atoms)
            m = torch.zeros(n, atoms)
            m.view(-1).index_add_(0, (l + off).view(-1), (nd * (u.float() - bb)).view(-1))
            m.view(-1).index_add_(0, (u + off).view(-1), (nd * (bb - l.float())).view(-1))
        lp = q(data[b]).view(-1, 2, atoms).log_softmax(-1)[range(n), act[b]]
        loss = -torch.sum(m * lp, 1)
        o.zero_grad()
        (w * loss).mean().backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10)
        o.step()
        pri[idx] = loss.detach().cpu().numpy()
        st["n"] += 1
        if st["n"] % 5 == 0:
            t.load_state_dict(q.state_dict())
        return float(loss.detach().mean())

    return Script(step, [(rows(i),) for i in range(STEPS)], [q, t])


@script("language models")
def seq2seq_tutorial():
    enc_e, enc = nn.Embedding(20, 16), nn.GRU(16, 16)
    dec_e, dec, out = nn.Embedding(20, 16), nn.GRU(16, 16), nn.Linear(16, 20)
    mods = [enc_e, enc, dec_e, dec, out]
    eo = torch.optim.SGD([*enc_e.parameters(), *enc.parameters()], lr=0.01)
    do = torch.optim.SGD([*dec_e.parameters(), *dec.parameters(), *out.parameters()], lr=0.01)
    c = nn.NLLLoss()

    def step(x, y):
        h = torch.zeros(1, 1, 16)
        eo.zero_grad()
        do.zero_grad()
        eouts = torch.zeros(8, 16)
        loss = 0
        for ei in range(x.size(0)):
            o_, h = enc(enc_e(x[ei]).view(1, 1, -1), h)
            eouts[ei] = o_[0, 0]
        inp = torch.tensor([[0]])
        tf = random.random() < 0.5
        for di in range(y.size(0)):
            o_, h = dec(F.relu(dec_e(inp).view(1, 1, -1)), h)
            lo = out(o_[0]).log_softmax(1)
            loss += c(lo, y[di])
            if tf:
                inp = y[di]
            else:
                _, ti = lo.topk(1)
                inp = ti.squeeze().detach()
                if inp.item() == 1:
                    break
        loss.backward()
        eo.step()
        do.step()
        return loss.item() / y.size(0)

    return Script(
        step,
        [
            (torch.randint(2, 20, (random.choice([3, 4, 5]), 1)), torch.randint(2, 20, (random.choice([3, 4]), 1)))
            for _ in range(STEPS)
        ],
        mods,
    )


@script("recommenders")
def dice_din():
    class Dice(nn.Module):
        def __init__(s, n):
            super().__init__()
            s.bn = nn.BatchNorm1d(n, eps=1e-8)
            s.alpha = nn.Parameter(torch.zeros(n))

        def forward(s, x):
            p = torch.sigmoid(s.bn(x))
            return s.alpha * (1 - p) * x + p * x

    emb = nn.Embedding(50, 8, padding_idx=0)
    att = nn.Sequential(nn.Linear(32, 8), nn.PReLU(), nn.Linear(8, 1))
    top = nn.Sequential(nn.Linear(16, 8), Dice(8), nn.Linear(8, 1))
    mods = [emb, att, top]
    o = adam(*mods)

    def step(hist, lens, item, y):
        k = emb(hist)
        q = emb(item).unsqueeze(1).expand(-1, hist.size(1), -1)
        a = att(torch.cat([q, k, q - k, q * k], -1))
        mask = (torch.arange(hist.size(1))[None] < lens[:, None]).unsqueeze(1)
        s = a.transpose(1, 2)
        s = torch.where(mask, s, torch.zeros_like(s))
        p = torch.matmul(s, k).squeeze(1)
        z = torch.sigmoid(top(torch.cat([p, emb(item)], -1)).squeeze(-1))
        l = F.binary_cross_entropy(z, y)
        reg = sum(torch.norm(w, p=2) * 1e-5 for n, w in emb.named_parameters())
        o.zero_grad()
        (l + reg).backward()
        o.step()
        return l.item()

    return Script(
        step,
        [
            (
                torch.randint(50, (r, 6)),
                torch.randint(1, 7, (r,)),
                torch.randint(1, 50, (r,)),
                torch.randint(2, (r,)).float(),
            )
            for r in map(rows, range(STEPS))
        ],
        mods,
    )


def argmax(v):
    _, i = torch.max(v, 1)
    return i.item()


def lse(v):
    m = v[0, argmax(v)]
    return m + torch.log(torch.sum(torch.exp(v - m.view(1, -1).expand(1, v.size(1)))))


@script("language models")
def bilstm_crf():
    T = 4
    emb, lstm, h2t = nn.Embedding(20, 8), nn.LSTM(8, 4, bidirectional=True), nn.Linear(8, T)
    trans = nn.Parameter(torch.randn(T, T))
    trans.data[2, :] = -10000
    trans.data[:, 3] = -10000
    mods = [emb, lstm, h2t]
    o = torch.optim.SGD([trans, *[p for m in mods for p in m.parameters()]], lr=0.01, weight_decay=1e-4)

    def step(s, tags):
        f = h2t(lstm(emb(s).view(len(s), 1, -1))[0].view(len(s), 8))
        fv = torch.full((1, T), -10000.0)
        fv[0][2] = 0.0
        for feat in f:
            al = []
            for nt in range(T):
                al.append(lse(fv + trans[nt].view(1, -1) + feat[nt].view(1, -1).expand(1, T)).view(1))
            fv = torch.cat(al).view(1, -1)
        a = lse(fv + trans[3])
        sc = torch.zeros(1)
        tg = torch.cat([torch.tensor([2]), tags])
        for i, feat in enumerate(f):
            sc = sc + trans[tg[i + 1], tg[i]] + feat[tg[i + 1]]
        sc = sc + trans[3, tg[-1]]
        l = a - sc
        o.zero_grad()
        l.backward()
        o.step()
        return l.item()

    return Script(
        step,
        [(torch.randint(20, (n,)), torch.randint(2, (n,))) for n in (random.choice([3, 4]) for _ in range(STEPS))],
        mods + [trans],
    )


class Tree:
    def __init__(s, val, kids):
        s.val, s.kids = val, kids


@script("language models")
def tree_lstm():
    emb = nn.Embedding(20, 8)
    iou, uiou, fx, fh = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
    head = nn.Linear(8, 3)
    mods = [emb, iou, uiou, fx, fh, head]
    o = torch.optim.Adagrad([p for m in mods for p in m.parameters()], lr=0.05)

    def node(x, hc):
        hs = sum((h for h, _ in hc), torch.zeros(1, 8))
        i, og, u = torch.split(iou(x) + uiou(hs), 8, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h, cc in hc:
            c = c + torch.sigmoid(fh(h) + fx(x)) * cc
        return torch.sigmoid(og) * torch.tanh(c), c

    def walk(t):
        return node(emb(torch.tensor([t.val])), [walk(k) for k in t.kids])

    def step(t, y):
        h, _ = walk(t)
        l = F.cross_entropy(head(h), y)
        o.zero_grad()
        l.backward()
        o.step()
        return l.item()

    rnd = random.Random(3)

    def make(d):
        return Tree(rnd.randrange(20), [make(d - 1) for _ in range(rnd.choice([0, 2]))] if d else [])

    return Script(step, [(make(2), torch.randint(3, (1,))) for _ in range(STEPS)], mods)
