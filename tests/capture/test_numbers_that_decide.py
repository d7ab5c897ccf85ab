"""Branches on numbers of the call that go another way in another call: where a number is × how it decides × what for.

``lr = base * step / warmup if step < warmup else base``: once it has gone the other way, both sides are in the graph.
"""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from torch import nn

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering.graph import expert_loop

CALLS = 14


def by_return(n):
    if n < 4:
        return 0.1 * (n + 1) / 4
    if n > 9:
        return 0.02
    return 0.02 + 0.5 * (1 + math.cos(math.pi * (n - 4) / 6)) * 0.08


def by_expression(n):
    return 0.5 if n % 3 == 0 and n % 2 else 0.25 * n


def by_statement(n):
    scale = 1.0
    if n % 3 == 1:
        scale = 0.5
        if n > 6:
            scale *= 0.5
    elif n >= 5:
        scale = scale + n / 10
    return scale


def by_type(n):
    return 0.3 * min(1, (n + 1) / 5) + 0.1 * max(0, 3 - n / 2)


def clamped(n):
    return 0.1 * max(0, min(1, (n - 3) / 5))


def by_ints(n):
    period = 2 if n < 6 else 3
    return 0.1 * (n % period + 1)


def may_raise(n):
    """A side that raises where it is not taken, for some numbers."""
    try:
        return 1 / (n - 5) if n > 5 else math.sqrt(5 - n)
    except ZeroDivisionError:
        return 0.0


HOW = (by_return, by_expression, by_statement, by_type, clamped, by_ints, may_raise)


def argument(decide):
    def step(x, n):
        return used(x, decide(n))

    return step


def counter(decide):
    state = types.SimpleNamespace(n=0, last=0.0)

    def step(x, _):
        state.last = decide(state.n)
        state.n += 1
        return used(x, state.last)

    return step


def in_dict(decide):
    state = {"n": 0.0}

    def step(x, _):
        value = decide(state["n"])
        state["n"] = state["n"] + 1.0
        return used(x, value)

    return step


def scheduled(decide):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decide)

    def step(x, _):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        return optimizer.param_groups[0]["lr"], model.weight.detach().clone()

    return step


def used(x, value):
    return x * value, torch.full((2,), value), value, f"{value:.3f}", type(value).__name__


WHERE = (argument, counter, in_dict, scheduled)


def run(step):
    torch.manual_seed(3)
    results = []
    for n in range(CALLS):
        try:
            results.append(step(torch.randn(3, 4), n))
        except ArithmeticError as error:
            results.append((type(error), str(error)))
    return results


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.share(6)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("where, how", list(itertools.product(WHERE, HOW)), ids=lambda f: f.__name__)
def test_as_in_plain_python(where, how, backend):
    torch.manual_seed(1)
    expected = run(where(how))
    torch.manual_seed(1)
    captured = capture(where(how), backend=backend)
    assert same(expected, run(captured))
    assert not [s for m in captured_of(captured).family() for s in m.segments if s.graph_break is not None]
    assert stats(captured).misses <= 3, stats(captured).recompiles  # another number, another way


def test_what_operators_run_for_is_captured_for_each_way():
    """A branch that runs operators is no node: each way is a graph without it."""

    def step(x, n):
        if n % 3 == 0:
            x = x.sin().cos()
        return x * 2

    captured = capture(step)
    for n in range(7):
        x = torch.randn(4)
        assert torch.equal(captured(x, n), step(x, n))
    targets = {node.target for g in report_of(captured_of(captured)).graphs for node in g.gm.graph.nodes}
    assert torch.sin in targets or "sin" in targets
    assert expert_loop not in targets


def test_in_an_exported_step(tmp_path):
    def made():
        state = {"n": 0.0}

        def step(x):
            value = by_return(state["n"])
            state["n"] += 1.0
            return x * value, value

        return step

    plain, captured, x = made(), capture(made()), torch.ones(3, 4)
    for _ in range(6):
        plain(x), captured(x)
    captured.export(tmp_path / "file")
    loaded = moebius.load(tmp_path / "file")
    assert all(same(loaded(x), plain(x)) for _ in range(6))
