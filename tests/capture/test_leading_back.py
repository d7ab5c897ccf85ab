"""Models that their own parts lead back to die at the first full collection after nobody holds them."""

from __future__ import annotations

import functools
import gc
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import moebius
from moebius import capture, stats
from moebius.cache import short_lived
from moebius.cache.captured import LEADING_BACK
from moebius.cache.reference_cycles import ReferenceCycles

from .test_names_given_anew import World, X, dies, net, same


class Hooked(nn.Module):
    """Its child's hook is its own bound method."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.factor = nn.Linear(3, 3), 2
        self.inner.register_forward_hook(self.doubled)

    def doubled(self, module, args, output):
        return output * self.factor

    def forward(self, x):
        return self.inner(x)


class Known(Hooked):
    """Its child knows it."""

    def __init__(self, seed=0):
        super().__init__(seed)
        object.__setattr__(self.inner, "parent", self)

    def doubled(self, module, args, output):
        return output * module.parent.factor


class Trained(nn.Module):
    """What trains it is an attribute of it."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.trainer = nn.Linear(3, 3), types.SimpleNamespace(model=self, factor=2)

    def forward(self, x):
        return self.inner(x) * self.trainer.factor


class Patched(nn.Module):
    """Its forward was replaced by one of its own, as accelerate does."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3)
        self.forward = functools.partial(type(self).forward, self)

    def forward(self, x):
        return self.inner(x)


class Counted(nn.Module):
    """A gradient hook of its weight is its own bound method; it writes into a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3)
        self.inner.weight.register_hook(self.halved)
        self.register_buffer("calls", torch.zeros(()))

    def halved(self, grad):
        return grad / 2

    def forward(self, x):
        self.calls.add_(1)
        return self.inner(x)


class Ring(nn.Module):
    """Its items at a key that counts know it."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.calls, self.factor = nn.Linear(3, 3), 0, 2
        self.ring = [types.SimpleNamespace(model=self, factor=torch.ones(3)) for _ in range(3)]

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.ring[self.calls % 3].factor


MADE = [Hooked, Known, Trained, Patched, Counted, Ring]


def a_global(model):
    world = World("def step(x): return model(x).sum()", model=model)
    step = capture(world.step)
    return step, step, lambda: vars(world).update(model=None)


def a_cell(model):
    def step(x):
        return model(x).sum()

    def let_go():
        nonlocal model
        model = None

    step = capture(step)
    return step, step, let_go


def an_argument(model):
    held, step = [model], capture(lambda model, x: model(x).sum())
    return step, lambda x: step(*held, x), held.clear


def a_keyword(model):
    held, step = {"model": model}, capture(lambda x, model: model(x).sum())
    return step, lambda x: step(x, **held), held.clear


def an_attribute(model):
    holder = types.SimpleNamespace(model=model)
    step = capture(lambda x: holder.model(x).sum())
    return step, step, vars(holder).clear


def a_generator(model):
    def holding(held):
        yield held

    waiting, reference, step = holding(model), weakref.ref(model), capture(lambda model, x: model(x).sum())
    next(waiting)
    return step, lambda x: step(reference(), x), waiting.close


def a_global_after_a_graph_break(model):
    source = "def step(x):\n  y = model(x)\n  open('/dev/null').close()\n  return model(x).sum() + 0 * y.sum()"
    world = World(source, model=model)
    step = capture(world.step)
    return step, step, lambda: vars(world).update(model=None)


WAYS = [a_global, a_cell, an_argument, a_keyword, an_attribute, a_generator, a_global_after_a_graph_break]


def dies_at_a_collection(reference: weakref.ref) -> bool:
    LEADING_BACK.rest_until = 0.0  # (a look is followed by a rest of some milliseconds)
    return dies(reference)


@pytest.mark.share(1)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_it_dies_at_a_collection_once_nobody_holds_it(made, way):
    for seed in range(2):
        model = made(seed)
        reference, plain = weakref.ref(model), model(X).sum().detach()  # (its history would hold the weight)
        _, call, let_go = way(model)
        del model
        for _ in range(2):
            same(call(X), plain)
            assert not dies_at_a_collection(reference)
        let_go()
        assert dies_at_a_collection(reference)


@pytest.mark.share(2)
@pytest.mark.parametrize("made", MADE)
def test_without_the_look_it_lives(monkeypatch, made):
    monkeypatch.setattr(ReferenceCycles, "look", lambda *_: None)
    model = made()
    reference = weakref.ref(model)
    _, call, let_go = an_argument(model)
    del model
    call(X)
    let_go()
    assert not dies_at_a_collection(reference)
    monkeypatch.undo()
    assert dies_at_a_collection(reference)


@pytest.mark.share(2)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("way", WAYS)
def test_while_it_is_held_nothing_is_captured_anew(made, way):
    misses = []
    for collecting in (False, True):
        step, call, held = way(made())
        for _ in range(4):
            call(X)
            if collecting:
                LEADING_BACK.rest_until = 0.0
                gc.collect()
        misses.append(stats(step).misses)
        held()
    assert misses[0] == misses[1]


def test_a_model_that_somebody_else_holds_below_it():
    """A part that leads to the model is held outside: the model is alive."""
    model, step = Hooked(), capture(lambda model, x: model(x).sum())
    reference, part = weakref.ref(model), model.inner
    step(model, X)
    del model
    assert not dies_at_a_collection(reference)
    assert step(reference(), X) is not None and stats(step).misses == 1
    hook = next(iter(part._forward_hooks.values()))
    del part
    assert not dies_at_a_collection(reference)
    del hook
    assert dies_at_a_collection(reference)


def test_what_does_not_lead_back_is_no_reason():
    """Its weight outlives it."""
    model, step = Trained(), capture(lambda model, x: model(x).sum())
    reference, weight = weakref.ref(model), model.inner.weight
    step(model, X)
    del model
    assert dies_at_a_collection(reference) and weight.shape == (3, 3)


def test_two_captures_of_one_model():
    model, steps = Known(), [capture(lambda model, x, k=k: model(x).sum() * k) for k in range(3)]
    reference = weakref.ref(model)
    for step in steps:
        step(model, X)
    del model
    assert dies_at_a_collection(reference) and [stats(step).entries for step in steps] == [0, 0, 0]


def test_a_trainer_that_its_models_hook_knows():
    class Trainer:
        def __init__(self):
            self.model, self.seen = net(depth=2), []
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.model[0].register_forward_hook(lambda *args: self.seen.append(args[2].detach().mean()))

        @capture
        def step(self, x):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    trainer = Trainer()
    for _ in range(3):
        trainer.step(X)
    mortal = [trainer, trainer.model, trainer.optimizer, trainer.model[0].weight, trainer.model[0].weight.grad]
    references = [*map(weakref.ref, mortal)]
    del mortal
    assert not dies_at_a_collection(references[0])
    del trainer
    assert all(map(dies_at_a_collection, references))


def test_one_that_was_let_go_of_and_lives_is_let_be(monkeypatch):
    """Whatever counts it wrongly costs one capture."""
    monkeypatch.setattr("moebius.cache.reference_cycles.is_held_by_captures_alone", lambda *_: True)
    model, step = Hooked(), capture(lambda model, x: model(x).sum())
    for _ in range(5):
        same(step(model, X), model(X).sum())
        LEADING_BACK.rest_until = 0.0
        gc.collect()
    assert stats(step).misses == 2


def test_one_with_too_much_hanging_from_it_lives(monkeypatch):
    monkeypatch.setattr("moebius.cache.reference_cycles.MAX_HANGING", 20)
    model, step = Hooked(), capture(lambda model, x: model(x).sum())
    reference = weakref.ref(model)
    step(model, X)
    del model
    assert not dies_at_a_collection(reference)
    moebius.reset()
    assert dies(reference)


@pytest.mark.parametrize("share", [0, 10**6])
def test_looks_are_a_small_part_of_the_time(monkeypatch, share):
    model, step, looked = Hooked(), capture(lambda model, x: model(x).sum()), []
    step(model, X)
    monkeypatch.setattr("moebius.cache.reference_cycles.SHARE", share)
    captures, counts = LEADING_BACK.captures, []
    monkeypatch.setattr(LEADING_BACK, "captures", lambda: looked.append(model) or captures())
    LEADING_BACK.rest_until = 0.0
    for _ in range(2):
        gc.collect()
        counts.append(len(looked))
    LEADING_BACK.rest_until = 0.0
    assert counts[0] and (counts[1] > counts[0]) == (share == 0)


def test_two_models_that_nothing_leads_back_to_are_captured_once_each():
    models, step = [net(), net(1)], capture(lambda model, x: model(x).sum(), backend="eager")
    for number in range(10):
        same(step(models[number % 2], X), models[number % 2](X).sum())
    assert stats(step).misses == 2


def test_many_models_in_one_search_are_no_reason_to_give_up(monkeypatch):
    monkeypatch.setattr(short_lived, "MANY", 5)
    step = capture(lambda model, x: model(x).sum(), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(short_lived.MANY + 2):
            model = Trained(seed)
            for _ in range(2):
                same(step(model, X), model(X).sum())
            del model
            LEADING_BACK.rest_until = 0.0
            gc.collect()
            assert stats(step).entries == 0
