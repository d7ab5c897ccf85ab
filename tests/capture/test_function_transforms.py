"""``torch.func``: a transform in a captured step, and a captured function inside of a transform, are graph breaks.

Neither warns, and answers and gradients are plain Python's.
"""

from __future__ import annotations

import pytest
import torch
from gradient_programs import tanh_net
from plain_python import graph_breaks
from tables import hold
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vmap

from moebius import capture, stats
from moebius.torch_facts import torch_private


def of_weights():
    m = tanh_net()

    def step(x):
        return grad(lambda w: (x @ w.T).tanh().sum())(m[0].weight) * 2

    return step, [m]


def of_a_module():
    m = tanh_net()

    def step(x):
        weights = dict(m.named_parameters())
        gradients, loss = grad_and_value(lambda p: functional_call(m, p, (x,)).pow(2).mean())(weights)
        return loss, gradients["0.weight"]

    return step, [m]


def of_each_row():
    m = tanh_net()

    def step(x):
        def loss(weights, row):
            return functional_call(m, weights, (row[None],)).pow(2).mean()

        weights = {name: p.detach() for name, p in m.named_parameters()}
        return vmap(grad(loss), in_dims=(None, 0))(weights, x.detach())["0.weight"]

    return step, [m]


def jacobian():
    m = tanh_net()
    return lambda x: jacrev(m)(x.detach()[0]) + 1, [m]


BREAK = ("function transform", "torch.autograd.grad")


@pytest.mark.parametrize("recipe", [of_weights, of_a_module, of_each_row, jacobian], ids=lambda r: r.__name__)
def test_a_transform_in_a_step_is_a_graph_break(recipe):
    hold(recipe, BREAK)


def functional():
    m = tanh_net()

    def step(x):
        loss = functional_call(m, {name: p * 1.1 for name, p in m.named_parameters()}, (x,)).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step, [m]


def test_functional_call_is_in_the_graph():
    hold(functional, None)


@pytest.mark.parametrize("warm", [False, True])
def test_a_captured_function_inside_of_a_transform(warm):
    m = tanh_net()

    def plain(x):
        return m(x).pow(2).sum()

    step = capture(plain)
    x = torch.randn(3, 4)
    for _ in range(2):
        if warm:
            assert torch.equal(step(x), plain(x))
        assert torch.equal(grad(step)(x), grad(plain)(x))
        assert torch.equal(vmap(step)(x.expand(2, 3, 4)), vmap(plain)(x.expand(2, 3, 4)))
        for got, want in zip(jvp(step, (x,), (x,)), jvp(plain, (x,), (x,)), strict=True):
            assert torch.equal(got, want)
    assert stats(step).graphs == warm
    assert any("inside of torch.func" in b.detail for b in graph_breaks(step))


def asks(x):
    return x * 2 if torch._C._are_functorch_transforms_active() else x * 3


def test_it_is_guarded_that_no_transform_runs(monkeypatch):
    x, rows = torch.randn(3), torch.randn(2, 3)
    step = capture(asks)
    step(x)
    assert torch.equal(vmap(step)(rows), rows * 2)
    readers = torch_private.global_state()
    monkeypatch.setattr(torch_private, "global_state", lambda: readers[:-1])
    step = capture(asks)
    step(x)
    assert torch.equal(vmap(step)(rows), rows * 3)  # wrong: nothing looked
