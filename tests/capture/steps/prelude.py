"""What every generated program starts from: a small net with what users' nets have, and objects that a step changes.

Executed anew for each run of a program, so that classes, functions and globals are nobody else's.
"""

# ruff: noqa: F401, F821  (its programs use what it imports, and make `net`, `opt` and `log`)
import collections
import contextlib
import functools
import itertools
import random
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D, E, K = 4, 3, 2


def broken(value=None):
    """A graph break: a function in C that nobody listed."""
    sys.intern("broken")
    return value


class Box:
    """An object that a step writes into."""

    total = 0
    kinds = ["box"]

    def __init__(self):
        self.last, self.items, self.named = None, [], {}

    @property
    def newest(self):
        return self.items[-1] if self.items else None

    def keep(self, value, name=None):
        self.items.append(value)
        if name is not None:
            self.named[name] = value
        return value


class Slotted:
    __slots__ = ("value", "seen")

    def __init__(self):
        self.value = 1.0


class Meter(dict):
    """A dict that counts what is set."""

    sets = 0

    def __setitem__(self, key, value):
        self.sets += 1
        super().__setitem__(key, value)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, factor):
        ctx.factor = factor
        ctx.save_for_backward(h)
        return h * factor

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        return grad * ctx.factor + 0 * h, None


class Room:
    """A context manager with effects; swallows ValueError."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        log.append(f"in {self.name}")
        return self

    def __exit__(self, kind, value, trace):
        log.append(f"out {self.name} {kind and kind.__name__}")
        return kind is ValueError


@contextlib.contextmanager
def scaled_rate(factor):
    before = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = before * factor
    try:
        yield opt
    finally:
        opt.param_groups[0]["lr"] = before


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, 6, bias=False), nn.Linear(D, 6, bias=False)
        self.down = nn.Linear(6, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Top-k experts; `how` is the way that their loop is written."""

    how = "hits"

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.register_buffer("load", torch.zeros(E))
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x, scale=1.0):
        p = self.router(x).softmax(-1)
        chosen = (p + self.bias).topk(K).indices
        weight = p.gather(1, chosen) * scale
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, E).permute(2, 1, 0)
        if self.training:
            with torch.no_grad():
                self.load += mask.sum((1, 2))
        if self.how == "hits":
            for e in mask.sum((1, 2)).nonzero()[:, 0]:
                slot, token = torch.where(mask[e])
                out.index_add_(0, token, self.experts[e](x[token]) * weight[token, slot, None])
        elif self.how == "range":
            for e in range(E):
                token, slot = torch.where(chosen == e)
                if token.numel():
                    out[token] += weight[token, slot, None] * self.experts[e](x[token])
        else:
            dense = torch.zeros_like(p).scatter(1, chosen, weight)
            out = sum(expert(x) * dense[:, e, None] for e, expert in enumerate(self.experts))
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.block = nn.Linear(D, D), nn.LayerNorm(D), Block()
        self.stats = nn.BatchNorm1d(D)
        self.table = nn.Embedding(8, D)
        self.head = nn.Linear(D, 8, bias=False)
        self.head.weight = self.table.weight  # tied
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))
        self.free = nn.Parameter(torch.rand(D))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.drop, self.seen, self.scale = 0.25, 0, 1.0
        self.config = {"jitter": 0.0, "act": "silu"}

    def forward(self, x, scale=None):
        self.seen += 1
        h = self.norm(x)
        h = getattr(F, self.config["act"])(self.lin(h)) * (self.scale if scale is None else scale)
        for layer in self.layers:
            h = h + layer(h)
        return F.dropout(self.block(h) + x, self.drop, self.training)


def shift(h, by=1.0, *, twice=False):
    h = h + by
    return h * 2 if twice else h


def pieces(h):
    for row in h.split(2):
        yield row * 2


def recursive(h, n):
    return h if n == 0 else recursive(h.tanh(), n - 1) + h


@functools.lru_cache
def constant(n):
    return float(n) / 2


def make_adder(start):
    total = start

    def add(value):
        nonlocal total
        total = total + value
        return total

    return add
