# mypy: ignore-errors
# ruff: noqa: E741
"""A runner with registered hooks, as mmcv has it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import Script, labelled, mlp, script

HOOKS = {}


def register(cls):
    HOOKS[cls.__name__] = cls
    return cls


class Hook:
    def before_iter(s, r):
        pass

    def after_iter(s, r):
        pass

    def every_n_iters(s, r, n):
        return (r.iter + 1) % n == 0 if n > 0 else False


@register
class OptimizerHook(Hook):
    def __init__(s, grad_clip=None):
        s.grad_clip = grad_clip

    def after_iter(s, r):
        r.optimizer.zero_grad()
        r.outputs["loss"].backward()
        if s.grad_clip is not None:
            ps = list(filter(lambda p: p.requires_grad and p.grad is not None, r.model.parameters()))
            if len(ps) > 0:
                r.log_buffer.update(
                    {"grad_norm": float(nn.utils.clip_grad_norm_(ps, **s.grad_clip))}, r.outputs["num_samples"]
                )
        r.optimizer.step()


@register
class LrUpdater(Hook):
    def __init__(s, warmup=5, ratio=0.1, step=(8, 11)):
        s.w, s.r, s.steps = warmup, ratio, step

    def before_iter(s, r):
        base = 0.1 * 0.1 ** sum(r.iter >= a for a in s.steps)
        if r.iter < s.w:
            k = (1 - r.iter / s.w) * (1 - s.r)
            base = base * (1 - k)
        for g in r.optimizer.param_groups:
            g["lr"] = base


@register
class Logger(Hook):
    def after_iter(s, r):
        if s.every_n_iters(r, 4):
            r.log_buffer.average(4)
            r.lines.append(", ".join(f"{k}: {v:.4f}" for k, v in r.log_buffer.output.items()))


@register
class EmaHook(Hook):
    def __init__(s, momentum=0.01):
        s.m = momentum
        s.bufs = None

    def after_iter(s, r):
        if s.bufs is None:
            s.bufs = {n: p.data.clone() for n, p in r.model.named_parameters()}
        m = min(s.m, (1 + r.iter) / (10 + r.iter))
        for n, p in r.model.named_parameters():
            s.bufs[n].mul_(1 - m).add_(p.data, alpha=m)


class LogBuffer:
    def __init__(s):
        s.val_history = OrderedDict()
        s.n_history = OrderedDict()
        s.output = OrderedDict()

    def update(s, vars, count=1):
        for k, v in vars.items():
            if k not in s.val_history:
                s.val_history[k] = []
                s.n_history[k] = []
            s.val_history[k].append(v)
            s.n_history[k].append(count)

    def average(s, n=0):
        for k in s.val_history:
            v = np.array(s.val_history[k][-n:])
            c = np.array(s.n_history[k][-n:])
            s.output[k] = np.sum(v * c) / np.sum(c)


class Runner:
    def __init__(s, model, opt):
        s.model, s.optimizer, s.hooks, s.iter, s.lines = model, opt, [], 0, []
        s.log_buffer = LogBuffer()
        s.outputs = None

    def call_hook(s, f):
        for h in s.hooks:
            getattr(h, f)(s)

    def parse(s, losses):
        lv = OrderedDict()
        for n, v in losses.items():
            if isinstance(v, torch.Tensor):
                lv[n] = v.mean()
            elif isinstance(v, list):
                lv[n] = sum(_l.mean() for _l in v)
        loss = sum(v for k, v in lv.items() if "loss" in k)
        lv["loss"] = loss
        for k, v in lv.items():
            lv[k] = v.item()
        return loss, lv

    def train(s, x, y):
        s.call_hook("before_iter")
        out = s.model(x)
        loss, lv = s.parse(
            {
                "loss_cls": F.cross_entropy(out, y, reduction="none"),
                "loss_aux": [out.abs(), out.pow(2)],
                "acc": (out.argmax(1) == y).float(),
            }
        )
        s.outputs = dict(loss=loss, log_vars=lv, num_samples=len(x))
        s.log_buffer.update(lv, len(x))
        s.call_hook("after_iter")
        s.iter += 1
        return dict(lv)


@script("engines")
def mmcv_runner_with_hooks():
    m = mlp(8, 32, 4)
    r = Runner(m, torch.optim.SGD(m.parameters(), lr=0.1))
    cfg = [
        dict(type="LrUpdater"),
        dict(type="OptimizerHook", grad_clip=dict(max_norm=1.0, norm_type=2)),
        dict(type="EmaHook"),
        dict(type="Logger"),
    ]
    for c in cfg:
        c = dict(c)
        r.hooks.append(HOOKS[c.pop("type")](**c))
    return Script(r.train, labelled(8, 4), [m])
