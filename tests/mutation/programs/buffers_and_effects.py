"""A module that changes itself: counters, lists, buffers in place, caches; and gradients of what it returns."""

import torch
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 3
        self.history = [0.5]
        self.cache = {"last": 1.0}
        self.linear = nn.Linear(3, 3)
        self.register_buffer("running", torch.ones(3))
        self.register_buffer("steps", torch.tensor(2))
        self.momentum = 0.9

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.running.mul_(self.momentum).add_(y.detach().mean(0), alpha=1 - self.momentum)
            self.steps += 1
        self.calls += 1
        self.history.append(float(self.calls))
        self.cache["last"] = self.cache["last"] * 2
        return (y - self.running) * len(self.cache) + self.cache["last"] + self.calls


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x)


def f(counter, norm, x):
    return norm(counter(x)).relu()


def make():
    return f, [Counter(), Norm(), torch.randn(4, 3)], {}
