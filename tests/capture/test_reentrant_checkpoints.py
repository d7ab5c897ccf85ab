"""``checkpoint(..., use_reentrant=True)``: forward without gradients, then the function's own backward within backward.

Six calls of each beside plain Python (``tests/support/tables.py``), and equal to the bit with backend="eager".
"""

# ruff: noqa: E731 (as users write)

from __future__ import annotations

import functools

import plain_python
import pytest
import torch
from gradient_programs import kept
from tables import ROWS, hold, net
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import moebius.lowering.step.checkpoint as lowered
from moebius import capture

reentrant = functools.partial(checkpoint, use_reentrant=True)


def trained():
    m = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)) for _ in range(3))
    optimizer = torch.optim.AdamW(m.parameters())

    def step(x):
        optimizer.zero_grad()
        y = x * 1
        for block in m:
            y = y + reentrant(block, y)
        loss = y.pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, [m]


def in_segments():
    m = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def step(x):
        m.zero_grad()
        checkpoint_sequential(m, 2, x * 1, use_reentrant=True).pow(2).sum().backward()
        return m[0][0].weight.grad.clone()

    return step, [m]


def several_results():
    m, other, unused = net(), net(), net()

    def step(x):
        for each in (m, other, unused):
            each.zero_grad()
        a, nothing, b, rows, c = reentrant(lambda t: (m(t), None, other(t), t.argmax(-1), unused(t)), x * 1)
        (a.sum() + b.pow(2).sum()).backward()
        # what nobody used has zeros for a gradient: the function's own backward begins at all that it gave
        gradients = m[0].weight.grad.clone(), unused[0].weight.grad.clone()
        return gradients, nothing, rows, c.requires_grad, rows.requires_grad

    return step, [m, other, unused]


def shared_weights():
    m = net()

    def step(x):
        y = reentrant(m, x * 1) + m(x) + reentrant(m, m(x))
        y.pow(2).sum().backward()
        return m[0].weight.grad.clone()

    return step, [m]


def a_result_without_history():
    m = net()

    def step(x):
        y, ones = reentrant(lambda t: (m(t), torch.ones(2) * 3), x * 1)
        return y.sum() + ones.sum(), ones.requires_grad, y.is_leaf

    return step, [m]


def modes_inside():
    m = net()

    def block(t):
        with torch.no_grad():
            scale = t.abs().mean()
        with torch.enable_grad():
            y = m(t)
        return y * scale

    def step(x):
        reentrant(block, x * 1).pow(2).sum().backward()
        return m[0].weight.grad.clone(), torch.is_grad_enabled()

    return step, [m]


def under_autocast():
    m = net()

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = reentrant(m, x * 1)
        y.float().pow(2).sum().backward()
        return m[0].weight.grad.clone(), y.dtype

    return step, [m]


def through_a_closure():
    """What the function reaches without its arguments is part of both backward passes."""
    m = net()

    def step(x):
        scale = x.sum()
        y = reentrant(lambda t: m(t) * scale.detach(), x * 1)
        y.sum().backward()
        return m[0].weight.grad.clone(), x.grad.clone()

    return step, [m]


def gives_its_argument():
    m = net()
    return lambda x: [t.sum() for t in reentrant(lambda t: (m(t), t), x * 1)], [m]


def gives_a_view_of_its_argument():
    m = net()
    return lambda x: [t.sum() for t in reentrant(lambda t: (m(t), t.view(-1)), x * 1)], [m]


def gives_a_list():
    m = net()

    def step(x):
        try:
            return [t * 2 for t in reentrant(lambda t: [m(t)], x * 1)]
        except TypeError as error:
            return str(error)

    return step, [m]


def changes_its_argument():
    m = net()
    return lambda x: reentrant(lambda t: m(t.mul_(2)), x * 1).sum(), [m]


def no_argument_needs_it():
    m = net()
    return lambda x: (reentrant(m, x.detach()).requires_grad, x * 2), [m]


def asks_for_the_mode():
    m = net()
    return lambda x: reentrant(lambda t: m(t) * (2 if torch.is_grad_enabled() else 3), x * 1).sum(), [m]


def asks_a_tensor():
    m = net()

    def block(t):
        h = m[0](t)
        return m[2](h * 2 if h.requires_grad else h * 3)

    return lambda x: reentrant(block, x * 1).sum(), [m]


def of_a_keyword():
    m = net()

    def step(x):
        try:
            return reentrant(m, input=x * 1)
        except ValueError as error:
            return str(error)

    return step, [m]


def asked_for_gradients():
    m = net()

    def step(x):
        y = reentrant(m, x * 1).sum()
        try:
            return torch.autograd.grad(y, x)[0]
        except RuntimeError as error:
            return str(error)

    return step, [m]


def asked_for_inputs():
    m = net()

    def step(x):
        y = reentrant(m, x * 1).sum()
        y.backward(inputs=[m[0].weight])
        return m[0].weight.grad is None

    return step, [m]


INSTEAD = ("checkpoint", "use_reentrant=False")
TABLE = {
    trained: None,
    in_segments: None,
    several_results: None,
    shared_weights: None,
    a_result_without_history: None,
    modes_inside: None,
    under_autocast: None,
    through_a_closure: None,
    gives_its_argument: INSTEAD,
    gives_a_view_of_its_argument: INSTEAD,
    gives_a_list: INSTEAD,
    changes_its_argument: INSTEAD,
    no_argument_needs_it: INSTEAD,
    asks_for_the_mode: INSTEAD,
    asks_a_tensor: INSTEAD,
    of_a_keyword: INSTEAD,
    asked_for_gradients: None,
    asked_for_inputs: ("checkpoint", "natively"),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break(recipe):
    hold(recipe, TABLE[recipe])
    plain_python.compare(recipe, backend="eager", sizes=ROWS)


def test_forward_keeps_nothing_where_the_function_leaves_no_grad(monkeypatch):
    m = net()

    def step(x):
        def block(t):
            with torch.no_grad():
                scale = t.abs().mean()
            return m(t) * scale

        return reentrant(block, x)

    x = torch.randn(3, 4, requires_grad=True)
    assert kept(capture(step), x) == kept(step, x) == x.numel()
    monkeypatch.setattr(lowered, "keep_mode", lambda *args: None)
    assert kept(capture(step), x) > x.numel()
