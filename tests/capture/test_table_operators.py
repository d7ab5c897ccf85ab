"""Custom operators in a step: with a fake they are nodes, without one a graph break.

Six calls of each beside plain Python (``tests/support/tables.py``), and equal to the bit with backend="eager".
"""

from __future__ import annotations

import plain_python
import pytest
import torch
from tables import ROWS, hold, net
from torch import Tensor


@torch.library.custom_op("moebius_tables::wave", mutates_args=())
def wave(x: Tensor, scale: float) -> Tensor:
    return torch.sin(x) * scale


@wave.register_fake
def _(x, scale):
    return torch.empty_like(x)


def set_up(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def differentiate(ctx, g):
    return g * torch.cos(ctx.saved_tensors[0]) * ctx.scale, None


wave.register_autograd(differentiate, setup_context=set_up)


@torch.library.custom_op("moebius_tables::no_gradient", mutates_args=())
def no_gradient(x: Tensor) -> Tensor:
    return torch.sin(x)


no_gradient.register_fake(torch.empty_like)


@torch.library.custom_op("moebius_tables::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return torch.sin(x)


no_fake.register_autograd(lambda ctx, g: g * 2)


@torch.library.custom_op("moebius_tables::add_into", mutates_args={"out"})
def add_into(x: Tensor, out: Tensor) -> None:
    out.add_(x)


@torch.library.custom_op("moebius_tables::lists", mutates_args=())
def lists(xs: list[Tensor], k: int) -> tuple[Tensor, Tensor]:
    return torch.stack(xs).sum(0), xs[0] * k


@lists.register_fake
def _(xs, k):
    return torch.empty_like(xs[0]), torch.empty_like(xs[0])


@torch.library.custom_op("moebius_tables::rows", mutates_args=())
def rows(mask: Tensor) -> Tensor:
    return mask.nonzero().flatten().clone()


@rows.register_fake
def _(mask):
    return mask.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


LIBRARY = torch.library.Library("moebius_tables_too", "DEF")
LIBRARY.define("old(Tensor x) -> Tensor")
LIBRARY.impl("old", lambda x: x.exp(), "CompositeExplicitAutograd")
LIBRARY.define("on_cpu(Tensor x) -> Tensor")
LIBRARY.impl("on_cpu", lambda x: x.exp(), "CPU")


def with_gradient():
    m = net()

    def step(x):
        m.zero_grad()
        (wave(m(x), 2.0) + torch.ops.moebius_tables.wave(x, 3.0)).sum().backward()
        return m[0].weight.grad.clone(), x.grad * 1

    return step, [m]


def twice_differentiable():
    def step(x):
        (g,) = torch.autograd.grad(wave(x, 2.0).sum(), x, create_graph=True)
        return g.pow(2).sum()

    return step, []


def without_gradient():
    return lambda x: no_gradient(x.detach()) + 1, []


def without_gradient_asked_for_one():
    return lambda x: no_gradient(x) + 1, []


def without_fake():
    m = net()

    def step(x):
        m.zero_grad()
        no_fake(m(x)).sum().backward()
        return m[0].weight.grad.clone()

    return step, [m]


def mutates():
    total = torch.zeros(4)

    def step(x):
        mine = torch.zeros(4)
        add_into(x.detach().sum(0), mine)
        add_into(mine, total)
        return mine * 2, total * 3

    return step, [total]


def of_lists():
    def step(x):
        a, b = lists([x.detach(), x.detach() * 2], 3)
        return a + b

    return step, []


def of_rows():
    return lambda x: x[rows(x[:, 0] > 0.3)].sum(), []


def in_the_old_way():
    return lambda x: torch.ops.moebius_tables_too.old(x.detach()) * 2, []


def of_one_device():
    return lambda x: torch.ops.moebius_tables_too.on_cpu(x.detach()) * 2, []


TABLE = {
    with_gradient: None,
    twice_differentiable: None,
    without_gradient: None,
    without_gradient_asked_for_one: None,
    mutates: None,
    of_lists: None,
    of_rows: None,
    in_the_old_way: None,
    without_fake: ("operator without a fake", "register_fake"),
    of_one_device: ("operator without a fake", "register_fake"),
}


@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break(recipe):
    hold(recipe, TABLE[recipe])
    plain_python.compare(recipe, backend="eager", sizes=ROWS)
