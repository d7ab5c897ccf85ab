"""A tree of modules: parameters, buffers, lists and dicts of modules, class attributes, methods and properties."""

import torch
from torch import nn


class Base(nn.Module):
    factor = 1.5

    def act(self, x):
        return torch.relu(x)


class Block(Base):
    shift = 0.25

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("offset", torch.ones(4))
        self.dropout = nn.Dropout(0.5)
        self.gain = 2.0
        self.order = [1.0, 2.0]

    @property
    def twice(self):
        return self.factor * 2.0

    def forward(self, x):
        h = self.act(self.linear(self.norm(x))) * self.twice + self.offset
        for step, value in enumerate(self.order):
            h = h + value * step
        return self.dropout(h) * self.gain + self.shift


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))])
        self.tail = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x, head="a"):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        x = self.tail(x) if self.training else x
        return self.heads[head](x).sum(-1)


def f(model, x):
    return model(x)


def make():
    return f, [Model().eval(), torch.randn(3, 4)], {}
