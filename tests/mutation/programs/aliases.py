"""One object under two names: among arguments, in attributes, in a list and in a module."""

import torch
from torch import nn


class Pair:
    def __init__(self):
        self.left = [1.0, 2.0]
        self.right = self.left
        self.weights = {"a": 2.0}


class Mark(nn.Module):
    """Nothing but itself."""


KEPT: list[Mark] = []  # they outlive their places: with a module's death its captures go, whatever the guards say


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("table", torch.ones(2, 3))
        self.table.scale = 2.0

    def forward(self, x):
        return self.decode(self.encode(x)) * (2.0 if self.encode.weight is self.decode.weight else 3.0)


def f(first, second, pair, table, tied, other, one, two, x, y, z):
    first.append(3.0)
    total = x * len(second)
    pair.left[0] = 5.0
    total = total + pair.right[0] * sum(pair.right)
    table["a"] = 4.0
    total = total * pair.weights["a"]
    if one is two:
        total = total * 7.0
    if x is y:
        total = total - 1.0
    z.scale = total.shape[0] + 3.0  # under each name of it; memory has no part in it
    total = total * tied.table.scale
    first.pop()
    pair.left[0] = 1.0
    table["a"] = 2.0
    return tied(total + y) - other(x), [first, second]


def make():
    shared, pair, x = [0.5], Pair(), torch.randn(2, 3)
    KEPT.extend([Mark(), Mark()])
    return f, [shared, shared, pair, pair.weights, Tied(), Tied(), *KEPT, x, x, torch.randn(2, 3)], {}
