"""What is captured for an object that lives for one call: it is not captured for ever."""

from __future__ import annotations

import gc
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.cache import captured, short_lived


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def with_a_teacher(net, x):
    """A graph break in each call, and then a module that no later call meets again."""
    teacher = pickle.loads(pickle.dumps(net))
    loss = (net(x) - teacher(x + 1).detach()).square().mean()
    loss.backward()
    return loss.detach()


@pytest.fixture
def by_identity(monkeypatch):
    """As where what is read in a model does not tell the next one: a class of its own, other layers."""
    monkeypatch.setattr(short_lived.ShortLived, "places", lambda self: set())


@pytest.mark.usefixtures("by_identity")
def test_a_copy_in_each_call_is_captured_a_few_times():
    mine, plain, step = model(), model(), capture(with_a_teacher, backend="eager")
    seconds = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(short_lived.MANY + 4):
            x = torch.full((2, 3), float(number))
            assert torch.equal(step(mine, x), with_a_teacher(plain, x))
            assert torch.equal(mine[0].weight.grad, plain[0].weight.grad)
            seconds.append(stats(step).cold_seconds)
    assert seconds[-1] == seconds[short_lived.FEW + 1] and seconds[2] > seconds[1]
    (said,) = [str(w.message) for w in caught if "moebius" in str(w.message)]
    assert "objects that lived for one call" in said and said.endswith(captured.hints.MADE_ANEW)


def modules():
    return [kept for kept in gc.get_objects() if type(kept) is nn.Sequential]


def test_a_copy_dies_with_its_call():
    """With no collection of garbage: a trace, whose parts refer to one another, lets it go."""
    mine, step = model(), capture(with_a_teacher, backend="eager")
    gc.collect()
    gc.disable()
    try:
        others = modules()  # other tests' ones live on
        for number in range(3):
            step(mine, torch.full((2, 3), float(number)))
            assert [net for net in modules() if not any(net is other for other in others)] == []
    finally:
        gc.enable()


def test_models_that_were_used_are_captured_for_ever():
    """A search over hyperparameters: each model is another, and trains for several calls."""
    step = capture(lambda net, x: net(x).square().mean(), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(short_lived.MANY + 2):
            net = model()
            for number in range(2):
                step(net, torch.full((2, 3), float(number)))
            assert stats(step).graphs == 1
            del net


@pytest.mark.usefixtures("by_identity")
def test_a_few_models_that_were_not_used_are_forgotten_by_one_that_was():
    step = capture(lambda net, x: net(x).square().mean(), backend="eager")
    for calls in (*[1] * (short_lived.MANY - 1), 2, *[1] * (short_lived.MANY - 1)):
        net = model()
        for _ in range(calls):
            step(net, torch.ones(2, 3))
        assert stats(step).graphs == (calls == 2 or stats(step).misses <= short_lived.FEW)
        del net


@pytest.mark.usefixtures("by_identity")
def test_without_the_count_it_goes_on(monkeypatch):
    monkeypatch.setattr(short_lived, "MANY", 10**9)
    monkeypatch.setattr(short_lived, "FEW", 10**9)
    net, step = model(), capture(with_a_teacher, backend="eager")
    seconds = [(step(net, torch.ones(2, 3)), stats(step).cold_seconds)[1] for _ in range(20)]
    assert seconds[-1] > seconds[-2]


def test_a_model_that_dies_with_the_interpreter(monkeypatch):
    """Python has emptied our modules by then: nothing is looked up for a capture that nobody will ask again."""
    ended = []
    monkeypatch.setattr(sys, "is_finalizing", lambda: bool(ended))
    net, step, said = model(), capture(lambda net, x: net(x).sum(), backend="eager"), []
    step(net, torch.ones(2, 3))
    assert stats(step).entries == 1
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with monkeypatch.context() as ending:
        for name in vars(captured):
            if not name.startswith("__"):
                ending.setitem(vars(captured), name, None)
        ended.append(True)
        del net
    assert said == [] and stats(step).entries == 1


@pytest.mark.usefixtures("by_identity")
def test_one_that_comes_again_is_captured_then():
    step = capture(lambda net, x: net(x).square().mean(), backend="eager")
    for _ in range(short_lived.FEW + 2):
        net = model()
        step(net, torch.ones(2, 3))
        del net
    net, entries = model(), []
    for _ in range(4):
        step(net, torch.ones(2, 3))
        entries.append(stats(step).entries)
    assert entries == [0, 1, 1, 1] and stats(step).hits >= 2
