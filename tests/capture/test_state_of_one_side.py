"""A side of a branch that makes what only it has: state of optimizers, answers of caches. Who did not come to it has
neither, and the arithmetic of optimizers that branch on numbers is plain Python's."""

from __future__ import annotations

import functools

import pytest
import torch

from moebius import capture, stats

O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "SGD": functools.partial(O.SGD, lr=0.1, momentum=0.9),
    **{name: getattr(O, name) for name in ("Adam", "AdamW", "NAdam", "RAdam", "ASGD", "Adadelta", "Adagrad")},
    **{name: getattr(O, name) for name in ("Adamax", "RMSprop", "Rprop", "Adafactor")},
}
BAD = {"first": (0, 3, 4), "later": (2, 6), "never": ()}


def scaled(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def where_finite(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    return loss.detach()


def where_a_number_is_small(model, optimizer, scaler, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not norm.item() < 1e9:
        return loss.detach() * 2
    optimizer.step()
    return loss.detach()


def shown(value):
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else value


def trained(step, make, options, bad):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False))
    optimizer = make(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    found = []
    for number in range(9):
        x = torch.randn(3, 4) * (float("inf") if number in bad else 1)
        loss = step(model, optimizer, scaler, x)
        states = {k: {name: shown(v) for name, v in s.items()} for k, s in optimizer.state_dict()["state"].items()}
        found.append((shown(loss), list(map(shown, model.parameters())), states, scaler.state_dict()))
    return repr(found)  # (NaN is equal to NaN by its text)


@pytest.mark.share(6)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("step", [scaled, where_finite, where_a_number_is_small], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_are_left_out(name, step, foreach, bad):
    given = OPTIMIZERS[name], {"foreach": foreach}, BAD[bad]
    assert trained(capture(step), *given) == trained(step, *given)


@pytest.mark.parametrize("step", [where_finite, where_a_number_is_small], ids=lambda f: f.__name__)
def test_the_first_step_is_left_out(step):
    found = [trained(s, OPTIMIZERS["SGD"], {}, BAD["first"]) for s in (capture(step), step)]
    assert found[0] == found[1]


def test_an_optimizer_that_branches_on_numbers_is_one_graph():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = O.RAdam([p])

    def step(x):
        optimizer.zero_grad()
        (p * x).sum().backward()
        optimizer.step()

    captured = capture(step)
    for number in range(9):  # (the sixth goes the other way)
        captured(torch.ones(3) * number)
    assert (stats(captured).graphs, stats(captured).misses, stats(captured).breaks) == (1, 1, 0)


def test_caches_are_asked_where_the_side_runs(capsys):
    counts = []

    @functools.lru_cache
    def counted(n):
        counts.append(n)
        return n

    @functools.lru_cache
    def loud(n):
        print(n)
        return n

    @functools.lru_cache
    def quiet(n):
        return [i * i for i in range(n)]

    def branch(function, x):
        if x.sum() > 0:
            x = x * function(3)
        return x

    minus, plus = -torch.ones(2), torch.ones(2)
    captured = capture(branch)
    assert torch.equal(captured(counted, minus), minus) and counts == []
    assert torch.equal(captured(counted, plus), 3 * plus) and counts == [3]
    captured = capture(branch)
    captured(loud, minus)
    assert not capsys.readouterr().out
    captured(loud, plus)
    assert capsys.readouterr().out == "3\n"

    def looked_up(x):
        return x * quiet(3)[2] if x.sum() > 0 else x

    captured = capture(looked_up)
    assert torch.equal(captured(minus), minus) and torch.equal(captured(plus), 4 * plus)
    assert (stats(captured).graphs, stats(captured).misses) == (1, 1)
