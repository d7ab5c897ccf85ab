"""``tensor.data`` read and set: weights updated by hand, averaged, swapped and tied.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B018, B023, B028, B904, B905, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import pytest
import torch
from tables import hold, net
from torch import nn

import moebius
from moebius.api import captured_of, report_of
from moebius.lowering.aliasing import Storage
from moebius.lowering.step import set_data


def sgd():
    m = net()

    def step(x):
        loss = m(x).sum()
        loss.backward()
        for p in m.parameters():
            p.data -= 0.01 * p.grad.data
            p.grad = None
        return loss.detach()

    return step, [m]


def sgd_new_data():
    m = net()

    def step(x):
        loss = m(x).sum()
        loss.backward()
        for p in m.parameters():
            p.data = p.data - 0.01 * p.grad.data
            p.grad.data.zero_()
        return loss.detach()

    return step, [m]


def ema():
    m, e = net(), net()

    def step(x):
        loss = m(x).sum()
        for p, q in zip(m.parameters(), e.parameters()):
            q.data = 0.9 * q.data + 0.1 * p.data
        return loss + e(x).sum()

    return step, [m, e]


def ema_in_place():
    m, e = net(), net()

    def step(x):
        for p, q in zip(m.parameters(), e.parameters()):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        return m(x) + e(x)

    return step, [m, e]


def swapped_back():
    m = net()

    def step(x):
        a, b = m[0].weight.data.clone(), m[2].weight.data.t().clone()
        m[0].weight.data = b
        y = m(x).sum()
        m[0].weight.data = a
        a.mul_(0.5)
        z = m(x).sum()
        (y + z).backward()
        g = m[0].weight.grad.clone()
        m.zero_grad()
        return g, z

    return step, [m]


def tied():
    m, e = net(), net()

    def step(x):
        e[0].weight.data = m[0].weight.data
        m[0].weight.data.add_(0.1)
        return e(x) + m(x)

    return step, [m, e]


def older_view():
    m = net()

    def step(x):
        w = m[0].weight
        v = w.view(-1)
        w.data = w.data * 2
        return v.sum() + m(x).sum(), v

    return step, [m]


def transposed():
    m = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def step(x):
        m.weight.data = m.weight.data.t()
        return m(x), m.weight.stride()

    return step, [m]


def not_a_leaf():
    def step(x):
        y = x * 2
        y.data = y.data + 1
        y.data[0] += 5
        return (y * y).sum()

    return step, []


def before_backward():
    m = net()

    def step(x):
        y = m(x).pow(2).sum()
        for p in m.parameters():
            p.data = p.data * 0.9
        y.backward()
        g = [p.grad.clone() for p in m.parameters()]
        m.zero_grad()
        return g

    return step, [m]


def pruned():
    m = nn.Linear(4, 8)

    def step(x):
        keep = min(m.weight.shape[0], x.shape[0] + 2)
        m.weight.data = m.weight.data[:keep]
        m.bias.data = m.bias.data[:keep]
        return m(x)

    return step, [m]


def of_another_dtype():
    def step(x):
        b = torch.ones(3)
        b.data = torch.ones(5, dtype=torch.float64) * x.shape[0]
        return b * 2

    return step, []


def a_number():
    m = net()

    def step(x):
        m[0].bias.data = 3
        return m(x)

    return step, [m]


TABLE = {
    sgd: None,
    sgd_new_data: None,
    ema: None,
    ema_in_place: None,
    swapped_back: None,
    tied: None,
    older_view: None,
    transposed: None,
    not_a_leaf: None,
    before_backward: None,
    pruned: ("data of a tensor is set", "copy_"),
    of_another_dtype: ("data of a tensor is set", "copy_"),
    a_number: ("attribute of a tensor is set", "outside of the step"),
}


@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])


def test_what_was_changed_in_place_is_not_set_again():
    """``p.data -= …`` sets what it has changed: as much as nothing, and no node of the graph."""
    step, (model,) = sgd()
    captured = moebius.capture(step)
    captured(torch.ones(3, 4))
    nodes = [node for graph in report_of(captured_of(captured)).graphs for node in graph.gm.graph.nodes]
    assert any(n.target == "sub_" or getattr(n.target, "__name__", "") == "isub" for n in nodes)
    assert not any(n.target is set_data for n in nodes)


def test_after_data_is_set_the_two_may_share_storage():
    """What a pass may move past a write depends on it."""
    graph = torch.fx.Graph()
    weight, other = graph.placeholder("weight"), graph.placeholder("other")
    view = graph.call_method("view", (weight, -1))
    graph.call_function(set_data, (weight, other))
    write = graph.call_method("add_", (other, 1))
    graph.output(view)
    storage = Storage(graph)
    assert storage.share(weight, other)
    assert storage.writer_between(weight, graph.output_node()) is not None
    assert write in storage.writers
