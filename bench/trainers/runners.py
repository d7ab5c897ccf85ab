# mypy: ignore-errors
# ruff: noqa: E741
"""How other public code bases run their steps: hooks, meters, storages, states, optimizers of their own."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import Script, labelled, mlp, script, texts, vectors


def adam(*mods, lr=1e-3):
    return torch.optim.Adam([p for m in mods for p in m.parameters()], lr=lr)


def numbered(b):
    return [(*x, i) for i, x in enumerate(b)]


class SmoothedValue:
    def __init__(s, window_size=20, fmt=None):
        s.fmt = fmt or "{median:.4f} ({global_avg:.4f})"
        s.deque = deque(maxlen=window_size)
        s.total = 0.0
        s.count = 0

    def update(s, value, n=1):
        s.deque.append(value)
        s.count += n
        s.total += value * n

    @property
    def median(s):
        return torch.tensor(list(s.deque)).median().item()

    @property
    def avg(s):
        return torch.tensor(list(s.deque), dtype=torch.float32).mean().item()

    @property
    def global_avg(s):
        return s.total / s.count

    @property
    def max(s):
        return max(s.deque)

    @property
    def value(s):
        return s.deque[-1]

    def __str__(s):
        return s.fmt.format(median=s.median, avg=s.avg, global_avg=s.global_avg, max=s.max, value=s.value)


class MetricLogger:
    def __init__(s, delimiter="  "):
        s.meters = defaultdict(SmoothedValue)
        s.delimiter = delimiter

    def update(s, **kw):
        for k, v in kw.items():
            if isinstance(v, torch.Tensor):
                v = v.item()
            assert isinstance(v, (float, int))
            s.meters[k].update(v)

    def __getattr__(s, a):
        if a in s.meters:
            return s.meters[a]
        if a in s.__dict__:
            return s.__dict__[a]
        raise AttributeError(f"no {a}")

    def __str__(s):
        return s.delimiter.join(f"{n}: {m}" for n, m in s.meters.items())


@script("engines")
def detr_metric_logger():
    m = mlp(8, 32, 4)
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)
    log = MetricLogger()
    lines = []
    weight_dict = {"loss_ce": 1.0, "loss_l1": 0.5}

    def step(x, y, i):
        out = m(x)
        loss_dict = {"loss_ce": F.cross_entropy(out, y), "loss_l1": F.l1_loss(out, F.one_hot(y, 4).float())}
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            raise SystemExit(1)
        o.zero_grad()
        losses.backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        o.step()
        log.update(loss=loss_value, **loss_dict)
        log.update(lr=o.param_groups[0]["lr"])
        if i % 5 == 0:
            lines.append(str(log))
        return {k: meter.global_avg for k, meter in log.meters.items()}

    return Script(step, numbered(labelled(8, 4)), [m])


class HistoryBuffer:
    def __init__(s, max_length=1000):
        s._max = max_length
        s._data = []
        s._count = 0
        s._global = 0.0

    def update(s, value, iteration=None):
        if iteration is None:
            iteration = s._count
        if len(s._data) == s._max:
            s._data.pop(0)
        s._data.append((value, iteration))
        s._count += 1
        s._global += (value - s._global) / s._count

    def median(s, w):
        return np.median([x[0] for x in s._data[-w:]])

    def latest(s):
        return s._data[-1][0]


_STACK = []


class EventStorage:
    def __init__(s):
        s._history = defaultdict(HistoryBuffer)
        s._latest = {}
        s.iter = 0

    def put_scalar(s, name, value):
        value = float(value)
        s._history[name].update(value, s.iter)
        s._latest[name] = (value, s.iter)

    def put_scalars(s, **k):
        for a, b in k.items():
            s.put_scalar(a, b)

    def step(s):
        s.iter += 1

    def __enter__(s):
        _STACK.append(s)
        return s

    def __exit__(s, *a):
        assert _STACK[-1] == s
        _STACK.pop()


def get_event_storage():
    assert len(_STACK)
    return _STACK[-1]


@script("engines")
def detectron_event_storage():
    m = mlp(8, 32, 4)
    o = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
    st = EventStorage()

    def write(metrics, dt):
        md = {k: v.detach().cpu().item() for k, v in metrics.items()}
        md["data_time"] = dt
        allm = [md]
        avg = {k: np.mean([x[k] for x in allm]) for k in allm[0].keys()}
        tot = sum(v for k, v in avg.items() if k != "data_time")
        if not np.isfinite(tot):
            raise FloatingPointError
        get_event_storage().put_scalar("total_loss", tot)
        get_event_storage().put_scalars(**{k: v for k, v in avg.items() if k != "data_time"})

    def step(x, y):
        with st:
            out = m(x)
            ld = {"loss_cls": F.cross_entropy(out, y), "loss_reg": out.pow(2).mean() * 0.01}
            losses = sum(ld.values())
            o.zero_grad()
            losses.backward()
            write(ld, 0.0)
            o.step()
            st.step()
        return st._latest["total_loss"][0], float(st._history["loss_cls"].median(20))

    return Script(step, labelled(8, 4), [m])


class AttrDict(dict):
    def __getattr__(s, k):
        try:
            v = s[k]
        except KeyError:
            raise AttributeError(k) from None
        return AttrDict(v) if isinstance(v, dict) and not isinstance(v, AttrDict) else v

    def __setattr__(s, k, v):
        s[k] = v


@script("engines")
def omegaconf_like():
    cfg = AttrDict(
        model=dict(width=32, drop=0.1),
        optim=dict(lr=1e-3, clip=1.0, sched=dict(warmup=4, total=30)),
        log=AttrDict(every=3, seen=0),
    )
    m = nn.Sequential(
        nn.Linear(8, cfg.model.width), nn.ReLU(), nn.Dropout(cfg.model.drop), nn.Linear(cfg.model.width, 4)
    )
    o = torch.optim.AdamW(m.parameters(), lr=cfg.optim.lr)

    def get_lr(it):
        c = cfg.optim.sched
        if it < c.warmup:
            return cfg.optim.lr * (it + 1) / c.warmup
        r = (it - c.warmup) / (c.total - c.warmup)
        return 0.1 * cfg.optim.lr + 0.5 * (1 + math.cos(math.pi * min(1, r))) * 0.9 * cfg.optim.lr

    def step(x, y, i):
        for g in o.param_groups:
            g["lr"] = get_lr(i)
        l = F.cross_entropy(m(x), y, label_smoothing=cfg.model.get("smooth", 0.1))
        l.backward()
        nn.utils.clip_grad_norm_(m.parameters(), cfg.optim.clip)
        o.step()
        o.zero_grad()
        cfg.log.seen += len(x)
        if i % cfg.log.every == 0:
            cfg.log.last = l.item()
        return cfg.log.seen, cfg.log.last

    return Script(step, numbered(labelled(8, 4)), [m])


@dataclass
class TrainState:
    epoch: int = 0
    step: int = 0
    best: float = float("inf")
    hist: list = field(default_factory=list)

    @property
    def progress(s):
        return s.step / 50


@script("habits")
def argparse_and_dataclass_state():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--wd", type=float, default=0.01)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--amp", action="store_true")
    args = p.parse_args([])
    m = mlp(8, 32, 4)
    o = torch.optim.AdamW(m.parameters(), lr=args.lr, weight_decay=args.wd)
    st = TrainState()

    def step(x, y):
        with torch.autocast("cpu", enabled=args.amp):
            l = F.cross_entropy(m(x), y) / args.accum
        l.backward()
        if (st.step + 1) % args.accum == 0:
            o.step()
            o.zero_grad()
        st.step += 1
        v = l.item() * args.accum
        if v < st.best:
            st.best = v
            st.hist.append((st.step, v))
        return st.progress, st.best, len(vars(args))

    return Script(step, labelled(8, 4), [m])


@script("engines")
def skorch_like():
    class Net:
        def __init__(s):
            s.module_ = mlp(8, 32, 4)
            s.optimizer_ = adam(s.module_)
            s.history = [{"batches": []}]
            s.callbacks_ = [("print", s.on)]
            s.kw = {"lr": 1e-3}

        def on(s, net, **kw):
            b = net.history[-1]["batches"]
            if len(b) >= 2:
                net.trend = b[-1]["train_loss"] - b[-2]["train_loss"]

        def notify(s, name, **kw):
            for _n, c in s.callbacks_:
                c(s, **kw)

        def infer(s, x):
            return s.module_(x)

        def train_step_single(s, x, y):
            s.module_.train()
            p = s.infer(x)
            l = F.cross_entropy(p, y)
            l.backward()
            return {"loss": l, "y_pred": p}

        def train_step(s, x, y):
            acc = {}

            def fn():
                s.optimizer_.zero_grad(set_to_none=True)
                r = s.train_step_single(x, y)
                acc["r"] = r
                return r["loss"]

            s.optimizer_.step(fn)
            return acc["r"]

        def run(s, x, y):
            s.history[-1]["batches"].append({})
            r = s.train_step(x, y)
            s.history[-1]["batches"][-1]["train_loss"] = r["loss"].item()
            s.history[-1]["batches"][-1]["train_batch_size"] = len(x)
            s.notify("on_batch_end", X=x, y=y)
            return r["loss"].item(), getattr(s, "trend", None)

    n = Net()
    return Script(n.run, labelled(8, 4), [n.module_])


@script("engines")
def fairseq_like():
    _agg = OrderedDict()

    class Avg:
        def __init__(s, r=None):
            s.val = None
            s.sum = 0
            s.count = 0
            s.round = r

        def update(s, v, n=1):
            if v is not None:
                s.val = v
                if n > 0:
                    s.sum = s.sum + (v * n)
                    s.count = s.count + n

        @property
        def avg(s):
            return s.sum / s.count if s.count > 0 else s.val

        @property
        def smoothed(s):
            v = s.avg
            return round(v.item() if torch.is_tensor(v) else v, s.round) if s.round is not None and v is not None else v

    def log_scalar(k, v, w=1, round=None):
        for a in _agg.values():
            if k not in a:
                a[k] = Avg(round)
            a[k].update(v, w)

    @contextlib.contextmanager
    def aggregate(name):
        _agg.setdefault(name, {})
        yield _agg[name]

    m = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    o = adam(m)

    def criterion(sample):
        lp = F.log_softmax(m(sample["net_input"]["src_tokens"]), -1, dtype=torch.float32).reshape(-1, 40)
        t = sample["target"].reshape(-1)
        nll = -lp.gather(-1, t.unsqueeze(-1))
        sm = -lp.sum(-1, keepdim=True)
        pad = t.unsqueeze(-1).eq(1)
        nll.masked_fill_(pad, 0.0)
        sm.masked_fill_(pad, 0.0)
        nll = nll.sum()
        sm = sm.sum()
        eps = 0.1 / (lp.size(-1) - 1)
        loss = (1 - 0.1 - eps) * nll + eps * sm
        return (
            loss,
            sample["ntokens"],
            {"loss": loss.data, "nll": nll.data, "ntokens": sample["ntokens"], "nsentences": sample["target"].size(0)},
        )

    def step(x, y):
        sample = {
            "id": torch.arange(len(x)),
            "net_input": {"src_tokens": x},
            "target": y,
            "ntokens": y.ne(1).sum().item(),
        }
        m.train()
        o.zero_grad()
        logs = []
        loss, n, lo = criterion(sample)
        loss.backward()
        logs.append(lo)
        for p in m.parameters():
            if p.grad is not None:
                p.grad.data.mul_(1 / n)
        gn = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        with aggregate("train") as a:
            log_scalar("loss", sum(l.get("loss", 0) for l in logs) / n / math.log(2), n, round=3)
            log_scalar("gnorm", gn, round=3)
            log_scalar("wpb", n, round=1)
            return {k: v.smoothed for k, v in a.items()}

    return Script(step, texts(8), [m])


@script("engines")
def lightning_manual_optimization():
    class LM(nn.Module):
        def __init__(s):
            super().__init__()
            s.gen = mlp(4, 16, 8)
            s.dis = mlp(8, 16, 1)
            s.logged = {}
            s.automatic_optimization = False
            s.global_step = 0
            s._opts = [
                torch.optim.Adam(s.gen.parameters(), lr=2e-4, betas=(0.5, 0.999)),
                torch.optim.Adam(s.dis.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            ]
            s._sch = [torch.optim.lr_scheduler.OneCycleLR(o, 0.01, 60) for o in s._opts]

        def optimizers(s):
            return s._opts

        def manual_backward(s, l):
            l.backward()

        @contextlib.contextmanager
        def toggled(s, opt):
            st = {}
            for o in s._opts:
                for g in o.param_groups:
                    for p in g["params"]:
                        st[p] = p.requires_grad
                        p.requires_grad = False
            for g in opt.param_groups:
                for p in g["params"]:
                    p.requires_grad = st[p]
            yield opt
            for p, v in st.items():
                p.requires_grad = v

        def log_dict(s, d, prog_bar=False):
            s.logged.update({k: v.detach() for k, v in d.items()})

        def training_step(s, batch, batch_idx):
            (real,) = batch
            g, d = s.optimizers()
            z = torch.randn(real.size(0), 4)
            with s.toggled(g):
                f = s.gen(z)
                gl = F.binary_cross_entropy_with_logits(s.dis(f), torch.ones(len(z), 1))
                s.manual_backward(gl)
                g.step()
                g.zero_grad()
            with s.toggled(d):
                dl = (
                    F.binary_cross_entropy_with_logits(s.dis(real), torch.ones(len(z), 1))
                    + F.binary_cross_entropy_with_logits(s.dis(f.detach()), torch.zeros(len(z), 1))
                ) / 2
                s.manual_backward(dl)
                d.step()
                d.zero_grad()
            for c in s._sch:
                c.step()
            s.log_dict({"g_loss": gl, "d_loss": dl}, prog_bar=True)
            s.global_step += 1
            return {k: v.item() for k, v in s.logged.items()}

    m = LM()
    return Script(lambda r, i: m.training_step((r,), i), numbered(vectors(8)), [m])
