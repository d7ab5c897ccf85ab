"""Copies of weights that an open autocast block holds: capture leaves them, and gradients are added as plain Python's.

A weight that is used twice in a block is cast once, and its gradient's two parts are added in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

import moebius
from moebius import capture, torch_private


@moebius.disable
def natively(x):
    return x * 1


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def broken(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = natively(model(x))
        loss = (y * model(x * 2)).float().sum()
    loss.backward()
    return loss.detach()


def part(model, x):
    return model(x).sin()


def around(function, model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        loss = (y * function(model, x)).float().sum()
        for _ in range(2):
            with torch.autocast("cpu", enabled=False):
                loss = loss + function(model, x).sum()
        loss = loss + (model(x * 3) * y).float().sum()
    loss.backward()
    return loss.detach()


def nested(model, x):
    """Leaves a block of its own, inside of the caller's."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).sin()


def run(step, model):
    torch.manual_seed(1)
    found = []
    for _ in range(4):
        model.zero_grad()
        found.append(step(model, torch.randn(3, 4)))
        found += [p.grad for p in model.parameters()]
    return found


STEPS = {
    "a graph break in a block": (broken, lambda: capture(broken, backend="eager")),
    "a captured part": (
        lambda model, x: around(part, model, x),
        lambda: (lambda inner: lambda model, x: around(inner, model, x))(capture(part, backend="eager")),
    ),
    "a captured part with its own": (
        lambda model, x: around(nested, model, x),
        lambda: (lambda inner: lambda model, x: around(inner, model, x))(capture(nested, backend="eager")),
    ),
}


@pytest.mark.parametrize(("plain", "captured"), STEPS.values(), ids=STEPS)
def test_copies_in_an_open_block_are_kept(plain, captured):
    assert all(map(torch.equal, run(captured(), net()), run(plain, net())))
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


def test_it_shows_where_they_are_forgotten(monkeypatch):
    throw = torch_private.throw_switches

    def forgets(wanted):
        throw(wanted)
        torch.clear_autocast_cache()

    monkeypatch.setattr(torch_private, "throw_switches", forgets)
    assert not all(map(torch.equal, run(capture(broken, backend="eager"), net()), run(broken, net())))
