"""A model, optimizer or tensor whose name is given to another one: the next call has the new one, the old one dies."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of
from moebius.cache import captured as captured_module
from moebius.guards.recorder import GuardRecorder
from moebius.guards.sources import Part
from moebius.heap import cells, lifetimes, objects

X = torch.ones(2, 3)


def net(seed: int = 0, depth: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(3, 3), nn.Tanh())))


class World(types.SimpleNamespace):
    """The globals of one program."""

    def __init__(self, source: str, **names: Any):
        vars(self).update(names, torch=torch)
        exec(source, vars(self))


def dies(reference: weakref.ref) -> bool:
    gc.collect()
    return reference() is None


class Holder:
    def __init__(self, seed: int = 0):
        self.model = net(seed)


def optimizer_over(world: World) -> None:
    world.model = net(1)
    world.optimizer = torch.optim.AdamW(world.model.parameters())


def with_schedule(world: World) -> None:
    world.optimizer = torch.optim.AdamW(world.model.parameters())
    world.schedule = torch.optim.lr_scheduler.StepLR(world.optimizer, 2)


TRAINING = """
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
# name -> (the program, what names what, what gives the names to others, what must be gone then)
PROGRAMS: dict[str, tuple[str, Any, Any, Any]] = {
    "a global": (
        "def step(x): return model(x).sum()",
        lambda: {"model": net()},
        lambda w: setattr(w, "model", net(1)),
        lambda w: [w.model, w.model[0].weight],
    ),
    "a global in a loop over a generator": (
        "def rows(x):\n  for i in range(3): yield model(x + i)\ndef step(x): return sum(y.sum() for y in rows(x))",
        lambda: {"model": net()},
        lambda w: setattr(w, "model", net(1)),
        lambda w: [w.model],
    ),
    "a global before and after a graph break": (
        "def step(x):\n  y = model(x)\n  n = float(y.detach().abs().sum())\n  return n, model(x + n).sum() + y.sum()",
        lambda: {"model": net()},
        lambda w: setattr(w, "model", net(1)),
        lambda w: [w.model],
    ),
    "an item of a global dict": (
        "def step(x): return models['a'](x).sum()",
        lambda: {"models": {"a": net()}},
        lambda w: w.models.update(a=net(1)),
        lambda w: [w.models["a"]],
    ),
    "an attribute of a global object": (
        "def step(x): return holder.model(x).sum()",
        lambda: {"holder": Holder()},
        lambda w: setattr(w.holder, "model", net(1)),
        lambda w: [w.holder.model],
    ),
    "a model and its optimizer": (
        TRAINING,
        lambda: {"model": (m := net()), "optimizer": torch.optim.AdamW(m.parameters())},
        optimizer_over,
        lambda w: [w.model, w.optimizer, w.optimizer.state[w.model[0].weight]["exp_avg"]],
    ),
    "an optimizer and its schedule over a model that stays": (
        TRAINING.replace("    return", "    schedule.step()\n    return"),
        lambda: {
            "model": (m := net()),
            "optimizer": (o := torch.optim.AdamW(m.parameters())),
            "schedule": torch.optim.lr_scheduler.StepLR(o, 2),
        },
        with_schedule,
        lambda w: [w.optimizer, w.schedule, w.optimizer.state[w.model[0].weight]["exp_avg"]],
    ),
    "a tensor": (
        "def step(x): return (x * weight).sum()",
        lambda: {"weight": torch.arange(3.0)},
        lambda w: setattr(w, "weight", torch.ones(3)),
        lambda w: [w.weight],
    ),
}
# the same, where what is named is held by a container or object that dies itself: the next call lets it go
LATER: dict[str, tuple[str, Any, Any, Any]] = {
    "a global dict": (
        "def step(x): return models['a'](x).sum()",
        lambda: {"models": {"a": net()}},
        lambda w: setattr(w, "models", {"a": net(1)}),
        lambda w: [w.models["a"]],
    ),
    "an item of a global list": (
        "def step(x): return models[0](x).sum()",
        lambda: {"models": [net()]},
        lambda w: w.models.__setitem__(0, net(1)),
        lambda w: [w.models[0]],
    ),
    "a global object": (
        "def step(x): return holder.model(x).sum()",
        lambda: {"holder": Holder()},
        lambda w: setattr(w, "holder", Holder(1)),
        lambda w: [w.holder.model],
    ),
    "a part of a model": (
        "def step(x): return model(x).sum()",
        lambda: {"model": net(depth=2)},
        lambda w: w.model.__setitem__(2, net(1)),
        lambda w: [w.model[2], w.model[2].weight],
    ),
    "a part of a model before and after a graph break": (
        "def step(x):\n  y = model(x)\n  n = float(y.detach().abs().sum())\n  return n, model(x + n).sum() + y.sum()",
        lambda: {"model": net(depth=2)},
        lambda w: w.model.__setitem__(2, net(1)),
        lambda w: [w.model[2], w.model[2].weight],
    ),
    "a part of a part of a model": (
        "def step(x):\n  y = model(x).sum()\n  y.backward()\n  return y.detach()",
        lambda: {"model": nn.Sequential(net(), net(1))},
        lambda w: w.model[1].__setitem__(0, net(2)[0]),
        lambda w: [w.model[1][0], w.model[1][0].weight],
    ),
    "an attribute of a class": (
        "def step(x): return Holder.model(x).sum()",
        lambda: {"Holder": type("Holder", (), {"model": net()})},
        lambda w: setattr(w.Holder, "model", net(1)),
        lambda w: [w.Holder.model],
    ),
    "a tensor in a global dict": (
        "def step(x): return (x * weights['a']).sum()",
        lambda: {"weights": {"a": torch.arange(3.0)}},
        lambda w: w.weights.update(a=torch.ones(3)),
        lambda w: [w.weights["a"]],
    ),
}


def watched(case: tuple[str, Any, Any, Any]) -> tuple[World, Any, World, list[weakref.ref]]:
    """A program after three captured calls, the same one plain, and what must die."""
    source, names, _, mortal = case
    mine, plain = World(source, **names()), World(source, **names())
    step = capture(mine.step, backend="eager")
    for _ in range(3):
        same(step(X), plain.step(X))
    return mine, step, plain, [weakref.ref(one) for one in mortal(mine)]


def same(ours: Any, plain: Any) -> None:
    for a, b in zip(ours, plain, strict=True) if isinstance(plain, tuple) else [(ours, plain)]:
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


@pytest.mark.share(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_had_the_name_dies_at_once(name):
    case = PROGRAMS[name]
    mine, step, plain, references = watched(case)
    for world in (mine, plain):
        case[2](world)
    assert all(map(dies, references))
    for _ in range(3):
        same(step(X), plain.step(X))


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LATER)
def test_what_a_container_held_dies_with_the_next_call(name):
    case = LATER[name]
    mine, step, plain, references = watched(case)
    for world in (mine, plain):
        case[2](world)
    for _ in range(3):
        same(step(X), plain.step(X))
    assert all(map(dies, references))
    assert not captured_of(step).given_up


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("a tensor",)])
def test_without_the_way_it_lives(monkeypatch, name):
    for module in (lifetimes, cells):
        monkeypatch.setattr(module, "named", lambda value: False)
    monkeypatch.setattr(lifetimes.Lifetimes, "by_its_way", lambda self, record, value: False)
    case = PROGRAMS[name]
    mine, _step, _plain, references = watched(case)
    case[2](mine)
    assert not all(map(dies, references))


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LATER)
def test_without_letting_go_it_lives(monkeypatch, name):
    monkeypatch.setattr("moebius.cache.captured.MAX_SEGMENTS", 0)
    monkeypatch.setattr("moebius.cache.captured.Captured.give_up", lambda *_: None)
    monkeypatch.setattr("moebius.cache.captured.Captured.learn", learn_and_keep)
    case = LATER[name]
    mine, step, _plain, references = watched(case)
    case[2](mine)
    step(X)
    assert not all(map(dies, references))


def learn_and_keep(self, args, kwargs):
    from moebius.cache.generalize_guards import open_place

    for segment in self.segments:
        fact, _ = segment.guards.failure(args, kwargs)
        if fact is not None:
            open_place(self.assumptions, fact, segment.guards, args, kwargs)
    return True


def test_a_closure_cell_that_two_functions_share():
    def make():
        model = net()

        def step(x):
            return model(x).sum()

        def helper(x):
            return model(x).sum() * 2

        def give(other):
            nonlocal model
            model = other
            return weakref.ref(model)

        return step, helper, give, weakref.ref(model)

    step, helper, give, first = make()
    ours, also = capture(step, backend="eager"), capture(helper, backend="eager")
    for _ in range(2):
        same(ours(X), step(X))
        same(also(X), helper(X))
    second = give(net(1))
    assert dies(first)
    for _ in range(2):
        same(ours(X), step(X))
        same(also(X), helper(X))
    assert stats(ours).entries == stats(also).entries == 1
    give(net(2))
    assert dies(second)


def test_a_name_that_is_deleted_is_an_error_and_the_model_dies():
    world = World("def step(x): return model(x).sum()", model=net())
    step, reference = capture(world.step, backend="eager"), weakref.ref(world.model)
    for _ in range(2):
        step(X)
    del world.model
    assert dies(reference)
    with pytest.raises(NameError, match="model"):
        step(X)
    world.model = net(1)
    same(step(X), world.step(X))


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum() * self.factor


def test_another_object_at_the_same_address_is_another():
    """The id of a model that has died is given to the next one."""
    world = World("def step(x): return model(x)", model=Scaled(3.0))
    step = capture(world.step, backend="eager")
    for _ in range(2):
        assert step(X) == 18
    address, world.model = id(world.model), None
    others = [Scaled.__new__(Scaled) for _ in range(10_000)]
    world.model = next((other for other in others if id(other) == address), None)
    if world.model is None:
        pytest.skip("nobody got its address")
    world.model.__init__(5.0)
    assert step(X) == 30


def test_two_models_in_iterations_are_captured_once_each():
    first, second = net(), net(1)
    world = World("def step(x): return model(x).sum()", model=first)
    step = capture(world.step, backend="eager")
    for number in range(8):
        world.model = (first, second)[number % 2]
        same(step(X), world.step(X))
    assert stats(step).misses == 2


def test_parts_of_a_model_in_iterations_are_kept_once_one_came_back():
    world = World("def step(x): return model(x).sum()", model=net(depth=2))
    heads = world.model[2], nn.Linear(3, 3)
    step = capture(world.step, backend="eager")
    for number in range(10):
        world.model[2] = heads[number % 2]
        same(step(X), world.step(X))
    assert stats(step).misses == 3  # the first one's went when it was replaced the first time
    assert stats(step).hits == 7


def test_a_part_that_each_call_replaces_is_not_captured_for_ever():
    world = World("def step(x): return model(x).sum()", model=net(depth=2))
    step = capture(world.step, backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2 * captured_module.MAX_SEGMENTS + 4):
            world.model[2] = nn.Linear(3, 3)
            same(step(X), world.step(X))
    assert captured_of(step).given_up
    assert any("runs natively now" in str(w.message) for w in warned)


def test_a_model_under_two_names_and_then_under_one():
    model = net()
    source = "def step(x):\n  first.train(False)\n  return first(x).sum() + (second(x).sum() if second.training else 0)"
    world = World(source, first=model, second=model)
    step = capture(world.step, backend="eager")
    for _ in range(2):
        same(step(X), torch.as_tensor(model(X).sum()))
    world.second = other = net(1)
    for _ in range(2):
        same(step(X), model(X).sum() + other(X).sum())
    assert not model.training and other.training


def test_a_global_that_the_step_itself_gives_to_another():
    source = "def step(x):\n  global model\n  y = model(x).sum()\n  model = other\n  return y"
    mine, plain = (World(source, model=net(), other=net(1)) for _ in range(2))
    step, first = capture(mine.step, backend="eager"), weakref.ref(mine.model)
    for _ in range(3):
        same(step(X), plain.step(X))
        assert (mine.model is mine.other) == (plain.model is plain.other)
    assert dies(first)


def test_a_tensor_that_each_call_gives_the_name_of_another():
    source = "def step(x):\n  global mean\n  mean = mean * 0.5 + x.mean()\n  return mean"
    mine, plain = (World(source, mean=torch.zeros(())) for _ in range(2))
    step = capture(mine.step, backend="eager")
    for number in range(5):
        same(step(X * number), plain.step(X * number))
        assert torch.equal(mine.mean, plain.mean)
    assert stats(step).misses == 1


def test_a_class_attribute_a_default_and_a_bound_method():
    class Trainer:
        model = net()

        def __init__(self):
            self.own = net(3)

        def step(self, x, other=net(2)):  # noqa: B008
            return self.model(x).sum() + other(x).sum() + self.own(x).sum()

    trainer = Trainer()
    step = capture(trainer.step, backend="eager")
    for _ in range(2):
        same(step(X), trainer.step(X))
    Trainer.model = net(1)
    same(step(X), trainer.step(X))
    Trainer.step.__defaults__ = (net(4),)
    same(step(X), trainer.step(X))
    first, trainer.own = weakref.ref(trainer.own), net(5)
    same(step(X), trainer.step(X))
    assert dies(first)


def test_many_models_one_after_the_other_are_few_captures():
    world = World("def step(x): return model(x).sum()", model=net())
    step = capture(world.step, backend="eager")
    for seed in range(40):
        world.model = net(seed)
        for _ in range(2):
            same(step(X), world.step(X))
        assert stats(step).entries == 1
    assert not captured_of(step).given_up


def test_the_check_of_who_it_is_is_needed(monkeypatch):
    check = GuardRecorder.check

    def forgetful(self, kind, source, *operands, text):
        if not (kind == "is" and isinstance(source, Part) and source.operation == "dict_item"):
            check(self, kind, source, *operands, text=text)

    monkeypatch.setattr(GuardRecorder, "check", forgetful)
    world = World("def step(x): return model(x)", model=Scaled(1.0))
    step, first = capture(world.step, backend="eager"), world.model
    step(X)
    namespace, world.model = vars(first), Scaled(5.0)
    world.model.__dict__ = namespace  # (all else that is looked at is the same)
    assert first is not world.model
    program = captured_of(step).segments[0].guards
    assert program.hold((X,), {})
    monkeypatch.undo()
    step = capture(world.step, backend="eager")
    step(X)
    program, world.model = captured_of(step).segments[0].guards, first
    assert not program.hold((X,), {})


def test_a_call_checks_no_more_for_a_deeper_model():
    counts = []
    for depth in (4, 64):
        world = World("def step(x): return model(x).sum()", model=net(depth=depth))
        step = capture(world.step, backend="eager")
        step(X)
        guards = captured_of(step).segments[0].guards
        ways = [s for s in guards.slots if s[0] != "arg"]
        counts.append((len(ways), sum(f.check[0] in ("is", "is_weak", "type", "tensor") for f in guards.facts)))
    assert counts[0] == counts[1]


def test_a_modules_own_getattr_is_not_asked_by_capture():
    """For the words of a guard."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.asked = nn.Linear(3, 3), []

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                self.asked.append(name)
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return self.inner(x) * self.in_features

    torch.manual_seed(0)
    model, step = Outer(), capture(lambda m, x: m(x).sum(), backend="eager")
    for number in range(3):
        step(model, X)
        assert model.asked == ["in_features"] * (number + 1)
    assert objects.can_die(model)


def test_what_goes_with_its_model_while_it_is_superseded(monkeypatch):
    """The collector runs whenever it likes: also between the look at a capture and its removal."""
    first, world = net(1), World("def step(x, logs): return model(x).sum() + len(logs.items)", model=net(1))
    held = [first]
    world.model, logs = first, types.SimpleNamespace(items=[X])
    reference, captured = weakref.ref(first), capture(world.step, backend="eager")
    captured(X, logs)
    del first
    opening = captured_module.open_place

    def collecting(*args: Any) -> bool:
        opening(*args)
        held.clear()
        assert dies(reference)
        return True

    monkeypatch.setattr(captured_module, "open_place", collecting)
    world.model = net(2)
    assert torch.equal(captured(X, logs), world.step(X, logs)) and not captured_of(captured).given_up
