"""Modules of one class with other weights, called in every order: what was read of one says nothing of another."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture


class Outer(nn.Module):
    """Two of three share what they hold."""

    def __init__(self, inner, scale):
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.scale


def layers():
    torch.manual_seed(0)
    plain = [nn.Linear(4, 4).double() for _ in range(3)]
    shared = nn.Linear(4, 4).double()
    nested = [Outer(shared, 1.0), Outer(shared, 1.0), Outer(nn.Linear(4, 4).double(), 1.0)]
    tied = [nn.Linear(4, 4).double() for _ in range(3)]
    tied[1].weight = tied[0].weight
    return {"plain": plain, "nested": nested, "tied": tied}


@pytest.mark.parametrize("kind", ["plain", "nested", "tied"])
def test_in_every_order(kind):
    x = torch.randn(5, 4, dtype=torch.float64)
    for order in ((0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 2, 2), (0, 1, 1, 2), (1, 0, 2, 0), (2, 2, 0, 1), (0, 0, 0, 1)):
        modules = layers()[kind]

        def step(modules, x, order=order):
            out = x
            for number in order:
                out = modules[number](out) + out
            return out

        assert torch.equal(capture(step, backend="eager")(modules, x), step(modules, x)), order


def test_called_twice_in_a_loop():
    modules, x = nn.ModuleList(layers()["plain"]), torch.randn(5, 4, dtype=torch.float64)

    def step(modules, x):
        return sum(module(x) - module(x).mean(0) + module(x) for module in modules)

    assert torch.equal(capture(step, backend="eager")(modules, x), step(modules, x))
