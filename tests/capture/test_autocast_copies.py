"""Copies of weights that an open autocast block holds: capture leaves them, and gradients are added as plain Python's.

A weight that is used twice in a block is cast once, and its gradient's two parts are added in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

import moebius
from moebius import capture, stats
from moebius.lowering.autocast import depth_of_autocast
from moebius.torch_facts import torch_private


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


class Chosen(torch.nn.Module):
    """Two experts; one that no token chose is left out, and gets no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.inner(x)
        out = x * 1
        for i, expert in enumerate(self.experts):
            rows = (x[:, i] > 0.0).nonzero().squeeze(-1)
            if rows.numel():
                out[rows] += expert(x[rows])
        return out


def scaled(model, x, optimizer, scaler):
    """Other code than torch's optimizers looks for gradients: backward is between two graphs once one was left out."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def test_a_branch_that_leaves_the_graph_in_a_block_leaves_the_block_once():
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(2, 4, generator=generator) for _ in range(30)]
    plain, ours = Chosen(), Chosen()
    tools = [
        (torch.optim.SGD(m.parameters(), 0.3), torch.amp.GradScaler("cpu", init_scale=4.0)) for m in (plain, ours)
    ]
    step = capture(scaled, backend="eager")
    for x in batches:
        want, got = scaled(plain, x, *tools[0]), step(ours, x, *tools[1])
        assert depth_of_autocast() == 0
        assert torch.equal(got, want)
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert {"branch on data", "backward()"} <= {r.guard for r in stats(step).recompiles}


def trained(model, x):
    y = model[2](natively(model[1](model[0](x))))
    loss = y.float().square().sum()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
    return loss.detach()


def test_autocast_that_was_switched_on_without_a_block():
    """Nothing leaves it: plain Python goes on with the copies that its first call has made."""

    def run(call):
        model, step, found = net(), call(trained), []
        try:
            for i in range(5):
                if i == 1:
                    torch.set_autocast_enabled("cpu", True)
                found.append(step(model, torch.ones(3, 4) * i).item())
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()
        return found

    assert run(capture) == pytest.approx(run(lambda step: step))
