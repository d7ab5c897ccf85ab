# mypy: ignore-errors
"""Scripts with numpy between the tensors: targets, masks, boxes, replay buffers, sums for the log."""

from __future__ import annotations

import copy
import itertools
import logging
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS as N
from .script import Script, images, mlp, rows, script

VISION, SPEECH, RECOMMENDERS = "vision", "time series and speech", "recommenders"
REINFORCEMENT = "reinforcement learning"


class DLRM(nn.Module):
    def __init__(s, ln=(50, 30, 20)):
        super().__init__()
        s.bot = mlp(5, 8, 4)
        s.embl = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum", sparse=False) for n in ln])
        s.top = mlp(4 + 6, 8, 1)

    def forward(s, dense, lS_o, lS_i):
        x = s.bot(dense)
        ly = [E(lS_i[k], lS_o[k]) for k, E in enumerate(s.embl)]
        T = torch.cat([x] + ly, dim=1).view((x.shape[0], -1, 4))
        Z = torch.bmm(T, T.transpose(1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        R = torch.cat([x] + [Z[:, li, lj]], dim=1)
        return torch.sigmoid(s.top(R))


@script(RECOMMENDERS)
def dlrm():
    m = DLRM()
    o = torch.optim.SGD(m.parameters(), lr=0.1)
    tot = [0.0, 0, 0]

    class LRPolicy(torch.optim.lr_scheduler.LRScheduler):
        def __init__(s, optimizer, warm, start, n):
            s.warm, s.start, s.n = warm, start, n
            super().__init__(optimizer)

        def get_lr(s):
            c = s._step_count
            if c < s.warm:
                return [b * (1 - (s.warm - c) / s.warm) for b in s.base_lrs]
            if s.start <= c < s.start + s.n:
                return [max(1e-7, b * ((s.start + s.n - c) / s.n) ** 2) for b in s.base_lrs]
            return s.base_lrs

    sch = LRPolicy(o, 5, 10, 20)

    def step(d, off, idx, y, j):
        Z = m(d, off, idx)
        E = F.binary_cross_entropy(Z, y)
        L = E.detach().cpu().numpy()
        mb = y.shape[0]
        o.zero_grad()
        E.backward()
        o.step()
        sch.step()
        tot[0] += L * mb
        tot[1] += 1
        tot[2] += mb
        if (j + 1) % 5 == 0:
            print("loss {:.6f}".format(tot[0] / tot[2]))  # noqa: UP032
            tot[0], tot[1], tot[2] = 0.0, 0, 0
        return float(L)

    bs = []
    for i in range(N):
        r = rows(i, N)
        bs.append(
            (
                torch.rand(r, 5),
                [torch.arange(0, 2 * r, 2) for _ in range(3)],
                [torch.randint(n, (2 * r,)) for n in (50, 30, 20)],
                torch.randint(2, (r, 1)).float(),
                i,
            )
        )
    return Script(step, bs, [m])


class Mixup:
    def __init__(s, alpha=0.8, cutmix=1.0, prob=1.0, switch=0.5, sm=0.1, nc=10):
        s.a, s.c, s.p, s.sw, s.sm, s.nc = alpha, cutmix, prob, switch, sm, nc

    def rand_bbox(s, shape, lam):
        r = np.sqrt(1 - lam)
        h, w = shape[-2:]
        ch, cw = int(h * r), int(w * r)
        cy = np.random.randint(0, h)
        cx = np.random.randint(0, w)
        return (
            np.clip(cy - ch // 2, 0, h),
            np.clip(cy + ch // 2, 0, h),
            np.clip(cx - cw // 2, 0, w),
            np.clip(cx + cw // 2, 0, w),
        )

    def __call__(s, x, t):
        lam = 1.0
        cut = False
        if np.random.rand() < s.p:
            cut = np.random.rand() < s.sw
            lam = float(np.random.beta(s.c, s.c) if cut else np.random.beta(s.a, s.a))
        if cut:
            yl, yh, xl, xh = s.rand_bbox(x.shape, lam)
            x[:, :, yl:yh, xl:xh] = x.flip(0)[:, :, yl:yh, xl:xh]
            lam = 1 - (yh - yl) * (xh - xl) / float(x.shape[-2] * x.shape[-1])
        else:
            xf = x.flip(0).mul_(1.0 - lam)
            x.mul_(lam).add_(xf)
        off = s.sm / s.nc
        on = 1 - s.sm + off

        def oh(v):
            return torch.full((v.size(0), s.nc), off).scatter_(1, v.long().view(-1, 1), on)

        return x, oh(t) * lam + oh(t.flip(0)) * (1.0 - lam)


class Ema(nn.Module):
    def __init__(s, m, d=0.99):
        super().__init__()
        s.module = copy.deepcopy(m).eval()
        s.decay = d
        [p.requires_grad_(False) for p in s.module.parameters()]

    @torch.no_grad()
    def update(s, m):
        for e, v in zip(s.module.state_dict().values(), m.state_dict().values(), strict=True):
            e.copy_(s.decay * e + (1.0 - s.decay) * v)


@script(VISION)
def cutmix_with_boxes():
    m = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 10),
    )
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)
    mix = Mixup()
    ema = Ema(m)

    class AM:
        def __init__(s):
            s.val = s.avg = s.sum = s.count = 0

        def update(s, v, n=1):
            s.val = v
            s.sum += v * n
            s.count += n
            s.avg = s.sum / s.count

    lm = AM()
    tm = AM()
    log = logging.getLogger("train")
    end = [time.time()]

    def step(x, y, i):
        x = x.clone()
        x, t = mix(x, y)
        out = m(x)
        loss = torch.sum(-t * F.log_softmax(out, -1), -1).mean()
        lm.update(loss.item(), x.size(0))
        o.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(m.parameters(), 0.1)
        o.step()
        ema.update(m)
        tm.update(time.time() - end[0])
        end[0] = time.time()
        if i % 5 == 0:
            text = "Train: {} [{:>4d}] Loss: {loss.val:#.4g} ({loss.avg:#.3g}) Time {bt.val:.3f}s"
            log.info(text.format(0, i, loss=lm, bt=tm))
        if i % 10 == 9:
            m.eval()
            with torch.no_grad():
                acc = (m(x).argmax(1) == y).float().mean().item()
            m.train()
            return loss.item(), acc
        return loss.item(), None

    return Script(step, [(*b, i) for i, b in enumerate(images(3, 8))], [m, ema.module])


@script(VISION)
def detection_with_numpy_targets():
    class Y(nn.Module):
        def __init__(s):
            super().__init__()
            s.b = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.Conv2d(8, 2 * (5 + 3), 3, 2, 1)
            )
            s.anchors = [(1.0, 2.0), (2.0, 1.0)]

        def forward(s, x):
            p = s.b(x)
            n, _, g, _ = p.shape
            return p.view(n, 2, 8, g, g).permute(0, 1, 3, 4, 2).contiguous()

    m = Y()
    o = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)
    bce = nn.BCELoss()
    mse = nn.MSELoss()

    def iou_wh(a, b):
        b = b.t()
        w1, h1 = a[0], a[1]
        w2, h2 = b[0], b[1]
        inter = torch.min(w1, w2) * torch.min(h1, h2)
        return inter / ((w1 * h1 + 1e-16) + w2 * h2 - inter)

    def build(pb, target, g):
        nB, nA, nC = pb.size(0), 2, 3
        obj = torch.zeros(nB, nA, g, g, dtype=torch.bool)
        noobj = torch.ones(nB, nA, g, g, dtype=torch.bool)
        tx = torch.zeros(nB, nA, g, g)
        tcls = torch.zeros(nB, nA, g, g, nC)
        tb = target[:, 2:6] * g
        gxy = tb[:, :2]
        gwh = tb[:, 2:]
        ious = torch.stack([iou_wh(torch.tensor(a), gwh) for a in m.anchors])
        best, bn = ious.max(0)
        b, lab = target[:, :2].long().t()
        gx, gy = gxy.t()
        gi, gj = gxy.long().t()
        obj[b, bn, gj, gi] = True
        noobj[b, bn, gj, gi] = False
        for i, an in enumerate(ious.t()):
            noobj[b[i], an > 0.5, gj[i], gi[i]] = False
        tx[b, bn, gj, gi] = gx - gx.floor()
        tcls[b, bn, gj, gi, lab] = 1
        return obj, noobj, tx, tcls

    def step(x, t):
        target = torch.from_numpy(t).float()
        p = m(x)
        g = p.size(2)
        xx = torch.sigmoid(p[..., 0])
        conf = torch.sigmoid(p[..., 4])
        cls = torch.sigmoid(p[..., 5:])
        obj, noobj, tx, tcls = build(p, target, g)
        lx = mse(xx[obj], tx[obj])
        lc = bce(conf[obj], torch.ones_like(conf[obj])) + 0.5 * bce(conf[noobj], torch.zeros_like(conf[noobj]))
        lk = bce(cls[obj], tcls[obj])
        loss = lx + lc + lk
        o.zero_grad()
        loss.backward()
        o.step()
        return {"x": lx.item(), "conf": lc.item(), "cls": lk.item(), "acc": (conf[obj].mean()).item()}

    bs = []
    for i in range(N):
        r = rows(i, N)
        n = r * 2
        t = np.zeros((n, 6))
        t[:, 0] = np.repeat(np.arange(r), 2)
        t[:, 1] = np.random.randint(0, 3, n)
        t[:, 2:] = np.random.rand(n, 4) * 0.9 + 0.05
        bs.append((torch.randn(r, 3, 16, 16), t))
    return Script(step, bs, [m])


def compute_mask_indices(shape, prob, length, min_masks=1):
    b, sz = shape
    n = int(prob * sz / float(length) + np.random.rand())
    n = max(min_masks, n)
    mask = np.full((b, sz), False)
    idcs = []
    for _ in range(b):
        st = np.random.choice(sz - length, n, replace=False)
        idcs.append(np.unique(np.asarray([st[j] + k for j in range(len(st)) for k in range(length)])))
    ml = min(len(m) for m in idcs)
    for i, mi in enumerate(idcs):
        if len(mi) > ml:
            mi = np.random.choice(mi, ml, replace=False)
        mask[i, mi] = True
    return mask


@script(SPEECH)
def masked_speech():
    class W(nn.Module):
        def __init__(s):
            super().__init__()
            s.f = nn.Conv1d(1, 16, 4, 4)
            s.mask_emb = nn.Parameter(torch.rand(16))
            s.enc = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            s.p = nn.Linear(16, 16)

        def forward(s, x):
            h = s.f(x).transpose(1, 2)
            y = h.detach()
            B, T, C = h.shape
            mi = torch.from_numpy(compute_mask_indices((B, T), 0.5, 2)).to(x.device)
            h = h.clone()
            h[mi] = s.mask_emb
            h = s.p(s.enc(h))
            xm = h[mi].view(B, -1, C)
            ym = y[mi].view(B, -1, C)
            num = ym.size(1)
            with torch.no_grad():
                neg = torch.randint(0, num - 1, (B, 3 * num))
                ts = torch.arange(num).unsqueeze(-1).expand(-1, 3).flatten()
                neg[neg >= ts] += 1
                neg = neg + (torch.arange(B).unsqueeze(1) * num)
            negs = ym.reshape(-1, C)[neg.view(-1)].view(B, num, 3, C).permute(2, 0, 1, 3)
            tg = torch.cat([ym.unsqueeze(0), negs], 0)
            lg = torch.cosine_similarity(xm.float(), tg.float(), dim=-1) / 0.1
            same = (ym == negs).all(-1)
            if same.any():
                lg[1:][same] = float("-inf")
            return lg.permute(1, 2, 0).reshape(-1, 4)

    m = W()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step(x):
        lg = m(x)
        loss = F.cross_entropy(lg, lg.new_zeros(lg.size(0), dtype=torch.long), reduction="sum")
        o.zero_grad()
        loss.backward()
        o.step()
        with torch.no_grad():
            c = (lg.argmax(-1) == 0).long().sum().item()
        return loss.item() / 0.6931471805599453, c

    return Script(step, [(torch.randn(rows(i, N), 1, 64),) for i in range(N)], [m])


class Replay:
    def __init__(s, obs, act, size):
        s.o = np.zeros((size, obs), dtype=np.float32)
        s.o2 = np.zeros((size, obs), dtype=np.float32)
        s.a = np.zeros((size, act), dtype=np.float32)
        s.r = np.zeros(size, dtype=np.float32)
        s.d = np.zeros(size, dtype=np.float32)
        s.ptr, s.size, s.max = 0, 0, size

    def store(s, o, a, r, o2, d):
        s.o[s.ptr] = o
        s.o2[s.ptr] = o2
        s.a[s.ptr] = a
        s.r[s.ptr] = r
        s.d[s.ptr] = d
        s.ptr = (s.ptr + 1) % s.max
        s.size = min(s.size + 1, s.max)

    def sample(s, n):
        i = np.random.randint(0, s.size, size=n)
        b = dict(obs=s.o[i], obs2=s.o2[i], act=s.a[i], rew=s.r[i], done=s.d[i])
        return {k: torch.as_tensor(v, dtype=torch.float32) for k, v in b.items()}


@script(REINFORCEMENT)
def ddpg():
    pi = nn.Sequential(mlp(4, 16, 2), nn.Tanh())
    q = mlp(6, 16, 1)
    pit, qt = copy.deepcopy(pi), copy.deepcopy(q)
    po = torch.optim.Adam(pi.parameters(), lr=1e-3)
    qo = torch.optim.Adam(q.parameters(), lr=1e-3)
    buf = Replay(4, 2, 100)
    rng = np.random.RandomState(0)
    for _ in range(30):
        buf.store(rng.randn(4), rng.randn(2), rng.rand(), rng.randn(4), rng.rand() < 0.1)

    def lossq(d):
        o, a, r, o2, dn = d["obs"], d["act"], d["rew"], d["obs2"], d["done"]
        qq = q(torch.cat([o, a], -1)).squeeze(-1)
        with torch.no_grad():
            b = r + 0.99 * (1 - dn) * qt(torch.cat([o2, pit(o2)], -1)).squeeze(-1)
        return ((qq - b) ** 2).mean(), dict(QVals=qq.detach().numpy())

    def step(n):
        with torch.no_grad():
            a = pi(torch.as_tensor(buf.o[buf.ptr - 1])).numpy()
        a += 0.1 * np.random.randn(2)
        a = np.clip(a, -1, 1)
        buf.store(np.random.randn(4), a, float(a.sum()), np.random.randn(4), 0.0)
        d = buf.sample(n)
        qo.zero_grad()
        lq, info = lossq(d)
        lq.backward()
        qo.step()
        for p in q.parameters():
            p.requires_grad = False
        po.zero_grad()
        lp = -q(torch.cat([d["obs"], pi(d["obs"])], -1)).mean()
        lp.backward()
        po.step()
        for p in q.parameters():
            p.requires_grad = True
        with torch.no_grad():
            for p, t in zip(
                itertools.chain(pi.parameters(), q.parameters()),
                itertools.chain(pit.parameters(), qt.parameters()),
                strict=True,
            ):
                t.data.mul_(0.995)
                t.data.add_(0.005 * p.data)
        return lq.item(), float(info["QVals"].mean()), lp.item()

    return Script(step, [(rows(i, N),) for i in range(N)], [pi, q, pit, qt])
