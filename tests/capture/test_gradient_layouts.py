"""``torch.autograd.grad`` through many operators: gradients, their strides, and which are None, as in plain Python.

The step is told all of it while it is traced, by fakes, with sizes that stay and with sizes that vary.
"""

from __future__ import annotations

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import ROWS
from torch import nn

grad = torch.autograd.grad


def first_column_set(y, x):
    y[:, 0] = x[:, 1]
    return y


def zeros(x, columns=1):
    return torch.zeros(x.shape[0], columns, dtype=torch.long)


OPERATORS = {
    "mask": lambda m, x: m(x)[x.detach()[:, 0] > 0.3],
    "nonzero": lambda m, x: m(x)[(x.detach()[:, 0] > 0.3).nonzero()[:, 0]],
    "where": lambda m, x: torch.where(m(x) > 0, m(x), x),
    "layer_norm": lambda m, x: F.layer_norm(m(x), (4,)),
    "rms_norm": lambda m, x: F.rms_norm(m(x), (4,)),
    "batch_norm": lambda m, x: F.batch_norm(m(x), None, None, training=True),
    "cumsum": lambda m, x: m(x).cumsum(0),
    "sort": lambda m, x: m(x).sort(-1)[0],
    "topk": lambda m, x: m(x).topk(2)[0],
    "gather": lambda m, x: m(x).gather(1, zeros(x)),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add(1, zeros(x, 4), m(x)),
    "log_softmax": lambda m, x: m(x).log_softmax(-1),
    "cross_entropy": lambda m, x: F.cross_entropy(m(x), zeros(x)[:, 0]),
    "dropout": lambda m, x: F.dropout(m(x), 0.5),
    "unbind": lambda m, x: sum(m(x).unbind(0)),
    "einsum": lambda m, x: torch.einsum("bi,ij,bj->b", x, m.weight, x),
    "gelu": lambda m, x: F.gelu(m(x)),
    "expand": lambda m, x: m(x)[None].expand(3, -1, -1),
    "in place": lambda m, x: m(x).clone().mul_(2).add_(x),
    "set item": lambda m, x: first_column_set(m(x).clone(), x),
    "max": lambda m, x: m(x).max(0)[0],
    "norm": lambda m, x: m(x).norm(dim=1),
    "detach": lambda m, x: m(x) * m(x).detach(),
    "solve": lambda m, x: torch.linalg.solve(torch.eye(4) * 2 + m.weight @ m.weight.T, x.T),
    "pad": lambda m, x: F.pad(m(x), (1, 1)),
    "cat": lambda m, x: torch.cat([m(x), x], 1),
    "unfold": lambda m, x: m(x).unfold(1, 2, 1),
    "rfft": lambda m, x: torch.fft.rfft(m(x)).abs(),
    "embedding": lambda m, x: F.embedding(torch.zeros(2, dtype=torch.long), m.weight) * x.sum(),
    "convolution": lambda m, x: F.conv2d(x[None, None], m.weight[None, None, :2, :2]),
    "attention": lambda m, x: F.scaled_dot_product_attention(m(x)[None, None], x[None, None], x[None, None]),
}
ONCE = {"attention"}  # torch differentiates it once on a CPU


def first_order(f):
    def recipe():
        m = nn.Linear(4, 4)

        def step(x):
            x = x.detach().clone().requires_grad_()
            found = grad(f(m, x).pow(2).sum(), [x, *m.parameters()], allow_unused=True)
            return [None if g is None else (g * 2, g.stride()) for g in found]

        return step, [m]

    return recipe


def second_order(f):
    def recipe():
        m = nn.Linear(4, 4)

        def step(x):
            x = x.detach().clone().requires_grad_()
            (g,) = grad(f(m, x).pow(2).sum(), x, create_graph=True)
            g.pow(2).sum().backward()
            return g.detach(), g.stride(), m.weight.grad is None

        return step, [m]

    return recipe


@pytest.mark.share(9)
@pytest.mark.parametrize("name", OPERATORS)
def test_first_order(name):
    captured = plain_python.compared(first_order(OPERATORS[name]), "eager", ROWS)
    assert not plain_python.graph_breaks(captured)


@pytest.mark.share(6)
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - ONCE))
def test_second_order(name):
    captured = plain_python.compared(second_order(OPERATORS[name]), "eager", ROWS)
    assert not plain_python.graph_breaks(captured)
