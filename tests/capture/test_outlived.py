"""What outlives its place, as guards hold it: a helper's cell, a default, a key. The next call lets it go."""

from __future__ import annotations

import collections
import contextvars
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of
from moebius.cache import captured
from moebius.cache.stale_captures import StaleCapture

from .test_names_given_anew import Holder, World, X, dies, net, same

MAKE = "def make(m):\n  def helper(x): return m(x).sum()\n  return helper\n"
DEFAULT = "def helper(x, {}m=model): return m(x).sum()\ndel model\ndef step(x): return helper(x)"
Pair = collections.namedtuple("Pair", "model factor")


def in_cell(function: Any) -> nn.Module:
    return function.__closure__[0].cell_contents


def helper_of(world: World, seed: int) -> Any:
    return world.make(net(seed))


class Going(Holder):
    def go(self, x):
        return self.model(x).sum()


class Slotted:
    __slots__ = ("model",)

    def __init__(self, seed=0):
        self.model = net(seed)


def by_keys(world: World, seed: int) -> None:
    world.kept.clear()
    world.kept[torch.full((2,), float(seed))] = torch.ones(3)


def by_models(world: World, seed: int) -> None:
    world.kept.clear()
    world.kept[net(seed)] = torch.ones(3)


def by_set(world: World, seed: int) -> None:
    world.kept.clear()
    world.kept.add(net(seed))


def in_module(seed: int) -> types.ModuleType:
    module = types.ModuleType("settings")
    module.model = net(seed)  # type: ignore[attr-defined]
    return module


# name -> (the program, its names, what gives the place to the object of a seed, what must be gone once another has it)
CASES: dict[str, tuple[str, Callable[[], dict[str, Any]], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "a replaced function's cell": (
        MAKE + "def step(x): return helper(x)",
        dict,
        lambda w, seed: setattr(w, "helper", helper_of(w, seed)),
        lambda w: in_cell(w.helper),
    ),
    "that of an item of a dict": (
        MAKE + "def step(x): return helpers['a'](x)",
        lambda: {"helpers": {}},
        lambda w, seed: w.helpers.update(a=helper_of(w, seed)),
        lambda w: in_cell(w.helpers["a"]),
    ),
    "that of an item of a tuple": (
        MAKE + "def step(x): return helpers[0](x)",
        dict,
        lambda w, seed: setattr(w, "helpers", (helper_of(w, seed), 1)),
        lambda w: in_cell(w.helpers[0]),
    ),
    "that of a closure of the step's": (
        MAKE + "def outer(h=None):\n  def step(x): return h(x)\n  return step\nstep = outer()",
        dict,
        lambda w, seed: setattr(w.step.__closure__[0], "cell_contents", helper_of(w, seed)),
        lambda w: in_cell(in_cell(w.step)),
    ),
    "that of a model's attribute": (
        MAKE + "def step(x): return model.helper(x)",
        lambda: {"model": net(5)},
        lambda w, seed: setattr(w.model, "helper", helper_of(w, seed)),
        lambda w: in_cell(w.model.helper),
    ),
    "that of a static method": (
        MAKE + "class Kept: pass\ndef step(x): return Kept.helper(x)",
        dict,
        lambda w, seed: setattr(w.Kept, "helper", staticmethod(helper_of(w, seed))),
        lambda w: in_cell(w.Kept.helper),
    ),
    "a partial": (
        "def run(m, x): return m(x).sum()\ndef step(x): return helper(x)",
        dict,
        lambda w, seed: setattr(w, "helper", functools.partial(w.run, net(seed))),
        lambda w: w.helper.args[0],
    ),
    "a bound method": (
        "def step(x): return helper(x)",
        dict,
        lambda w, seed: setattr(w, "helper", Going(seed).go),
        lambda w: w.helper.__self__.model,
    ),
    "a named tuple": (
        "def step(x): return pair.model(x).sum() * pair.factor",
        dict,
        lambda w, seed: setattr(w, "pair", Pair(net(seed), 2)),
        lambda w: w.pair.model,
    ),
    "an object with slots": (
        "def step(x): return kept.model(x).sum()",
        dict,
        lambda w, seed: setattr(w, "kept", Slotted(seed)),
        lambda w: w.kept.model,
    ),
    "a Python module": (
        "def step(x): return settings.model(x).sum()",
        dict,
        lambda w, seed: setattr(w, "settings", in_module(seed)),
        lambda w: w.settings.model,
    ),
    "a dict of keyword defaults": (
        DEFAULT.format("*, "),
        lambda: {"model": net()},
        lambda w, seed: setattr(w.helper, "__kwdefaults__", {"m": net(seed)}),
        lambda w: w.helper.__kwdefaults__["m"],
    ),
    "a default that is an object": (
        DEFAULT.format("").replace("m(x)", "m.model(x)"),
        lambda: {"model": Holder()},
        lambda w, seed: setattr(w.helper, "__defaults__", (Holder(seed),)),
        lambda w: w.helper.__defaults__[0].model,
    ),
    "an object in a context variable": (
        "def step(x): return kept.get().model(x).sum()",
        lambda: {"kept": contextvars.ContextVar("kept")},
        lambda w, seed: w.kept.set(Holder(seed)),
        lambda w: w.kept.get().model,
    ),
    "a tensor that is a key": (
        "def step(x):\n  s = x.sum()\n  for k, v in kept.items(): s = s + k.sum() * v.sum()\n  return s",
        lambda: {"kept": {}},
        by_keys,
        lambda w: next(iter(w.kept)),
    ),
    "a model that is a key": (
        "def step(x):\n  s = x.sum()\n  for k, v in kept.items(): s = s + k(x).sum() * v.sum()\n  return s",
        lambda: {"kept": {}},
        by_models,
        lambda w: next(iter(w.kept)),
    ),
    "a model in a set": (
        "def step(x):\n  s = x.sum()\n  for m in kept: s = s + m(x).sum()\n  return s",
        lambda: {"kept": set()},
        by_set,
        lambda w: next(iter(w.kept)),
    ),
    "a cached answer": (
        "import functools\n@functools.lru_cache\ndef cached(): return net(seed)\ndef step(x): return cached()(x).sum()",
        lambda: {"net": net},
        lambda w, seed: (setattr(w, "seed", seed), w.cached.cache_clear(), w.cached()),
        lambda w: w.cached(),
    ),
    "a default": (
        DEFAULT.format(""),
        lambda: {"model": net()},
        lambda w, seed: setattr(w.helper, "__defaults__", (net(seed),)),
        lambda w: w.helper.__defaults__[0],
    ),
    "the step's own default": (
        "def step(x, m=model): return m(x).sum()\ndel model",
        lambda: {"model": net()},
        lambda w, seed: setattr(w.step, "__defaults__", (net(seed),)),
        lambda w: w.step.__defaults__[0],
    ),
    "a keyword's default": (
        DEFAULT.format("*, "),
        lambda: {"model": net()},
        lambda w, seed: w.helper.__kwdefaults__.update(m=net(seed)),
        lambda w: w.helper.__kwdefaults__["m"],
    ),
}
# the same, where what is named dies at once
AT_ONCE: dict[str, tuple[str, Callable[[], dict[str, Any]], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "a context variable": (
        "def step(x): return kept.get()(x).sum()",
        lambda: {"kept": contextvars.ContextVar("kept")},
        lambda w, seed: w.kept.set(net(seed)),
        lambda w: w.kept.get(),
    ),
    "a tensor in a context variable": (
        "def step(x): return (kept.get() * x).sum()",
        lambda: {"kept": contextvars.ContextVar("kept")},
        lambda w, seed: w.kept.set(torch.full((3,), float(seed))),
        lambda w: w.kept.get(),
    ),
    "a slot": (
        "def step(x): return kept.model(x).sum()",
        lambda: {"kept": Slotted()},
        lambda w, seed: setattr(w.kept, "model", net(seed)),
        lambda w: w.kept.model,
    ),
}


def begun(case: Any) -> tuple[World, Any, World, weakref.ref]:
    """A program after three captured calls, the same one plain, and what must die."""
    source, names, give, mortal = case
    mine, plain = World(source, **names()), World(source, **names())
    for world in (mine, plain):
        give(world, 1)
    step = capture(mine.step, backend="eager")
    for _ in range(3):
        same(step(X), plain.step(X))
    return mine, step, plain, weakref.ref(mortal(mine))


# ----------------------------------------------------------------------------------------------------------------------
# One object after the other
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("name", CASES)
def test_it_dies_with_the_next_call(name):
    case = CASES[name]
    mine, step, plain, reference = begun(case)
    for seed in (2, 3, 4):
        for world in (mine, plain):
            case[2](world, seed)
        same(step(X), plain.step(X))
        assert dies(reference)
        same(step(X), plain.step(X))
        reference = weakref.ref(case[3](mine))
    assert stats(step).entries - stats(step).breaks <= 1 and not captured_of(step).given_up


@pytest.mark.share(7)
@pytest.mark.parametrize("name", CASES)
def test_without_letting_go_it_lives(monkeypatch, name):
    monkeypatch.setattr(StaleCapture, "goes", lambda *_: False)
    monkeypatch.setattr("moebius.cache.captured.MAX_SEGMENTS", 2)
    monkeypatch.setattr("moebius.cache.captured.open_place", lambda *_: False)
    case = CASES[name]
    mine, step, plain, reference = begun(case)
    for world in (mine, plain):
        case[2](world, 2)
    same(step(X), plain.step(X))
    assert not dies(reference)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", AT_ONCE)
def test_it_dies_at_once(name):
    case = AT_ONCE[name]
    mine, step, plain, reference = begun(case)
    for seed in (2, 3, 4):
        for world in (mine, plain):
            case[2](world, seed)
        assert dies(reference)
        for _ in range(2):
            same(step(X), plain.step(X))
        reference = weakref.ref(case[3](mine))
    assert not captured_of(step).given_up


def test_a_helper_of_each_epoch_is_captured_for_ever():
    source, names, give, _ = CASES["a replaced function's cell"]
    world = World(source, **names())
    step = capture(world.step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2 * captured.MAX_SEGMENTS + 4):
            give(world, seed)
            for _ in range(captured.RARE + 1):
                step(X)
            assert stats(step).entries == 1
    same(step(X), world.step(X))


def test_a_helper_of_each_call_is_not():
    source, names, give, _ = CASES["a replaced function's cell"]
    world = World(source, **names())
    step = capture(world.step, backend="eager")
    with pytest.warns(UserWarning, match="from now on the graph ends where"):
        for seed in range(2 * captured.MAX_SEGMENTS + 4):
            give(world, seed)
            same(step(X), world.step(X))


PUT_BACK = {
    **{name: "helper" for name in ("a replaced function's cell", "a partial", "a bound method")},
    "that of an item of a tuple": "helpers",
    "a named tuple": "pair",
    "an object with slots": "kept",
    "a Python module": "settings",
}


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_comes_back_is_kept(name):
    """A call for each is a hit from then on."""
    source, names, give, _ = CASES[name]
    world, place, held = World(source, **names()), PUT_BACK[name], []
    for seed in (1, 2):
        give(world, seed)
        held.append(vars(world)[place])
    step = capture(world.step, backend="eager")
    counts = []
    for number in range(12):
        setattr(world, place, held[number % 2])
        same(step(X), world.step(X))
        counts.append(stats(step).misses)
    assert counts[-1] == counts[5] and not captured_of(step).given_up


# ----------------------------------------------------------------------------------------------------------------------
# Defaults and context variables as inputs
# ----------------------------------------------------------------------------------------------------------------------


def test_a_tensor_as_a_default_is_an_input():
    source = """
def scaled(x, by=weight, *, bias=other):
    by.add_(1)
    return x * by + bias

def step(x, own=third):
    return scaled(x).sum() + scaled(x, bias=own).sum() + (scaled.__defaults__[0] * own).sum()
"""
    worlds = [World(source, weight=torch.ones(3), other=torch.ones(3), third=torch.arange(3.0)) for _ in range(2)]
    mine, plain = worlds
    step = capture(mine.step, backend="eager")
    for number in range(5):
        same(step(X * number), plain.step(X * number))
        assert torch.equal(mine.weight, plain.weight)
        if number == 2:
            for world in worlds:
                world.scaled.__defaults__ = (torch.full((3,), 3.0),)
                world.scaled.__kwdefaults__["bias"] = torch.zeros(3)
                world.step.__defaults__ = (torch.ones(3),)
    assert stats(step).breaks == 0 and stats(step).misses <= 3


def test_a_default_that_trains():
    source = "def step(x, w=weight):\n  loss = (x * w).square().sum()\n  loss.backward()\n  return loss.detach()"
    mine, plain = (World(source, weight=nn.Parameter(torch.arange(3.0))) for _ in range(2))
    step = capture(mine.step, backend="eager")
    for _ in range(3):
        same(step(X), plain.step(X))
        assert torch.equal(mine.weight.grad, plain.weight.grad)
    assert stats(step).breaks == 0


def test_a_default_that_the_caller_holds_too():
    source = "def add(x, w=weight): return x + w\ndef step(x):\n  weight.mul_(2)\n  return add(x), add(x, weight)"
    mine, plain = (World(source, weight=torch.arange(3.0)) for _ in range(2))
    step = capture(mine.step, backend="eager")
    for _ in range(3):
        same(step(X), plain.step(X))
    for world in (mine, plain):
        world.weight = torch.ones(3)
    for _ in range(3):
        same(step(X), plain.step(X))


def test_a_number_in_a_context_variable_that_changes():
    source = "def step(x): return x * scale.get()"
    world = World(source, scale=contextvars.ContextVar("scale"))
    step = capture(world.step, backend="eager")
    for number in (1, 1, True, 1.0, 2.0, 3.0, 4.0, 5, 6, 7):
        world.scale.set(number)
        ours, plain = step(X.long()), world.step(X.long())
        assert torch.equal(ours, plain) and ours.dtype == plain.dtype
    world.scale = contextvars.ContextVar("scale")
    with pytest.raises(LookupError):
        step(X)


def test_a_tensor_in_a_context_variable_that_the_step_sets():
    source = "def step(x):\n  kept.set(kept.get() * 0.5 + x)\n  return kept.get().sum()"
    mine, plain = (World(source, kept=contextvars.ContextVar("kept")) for _ in range(2))
    for world in (mine, plain):
        world.kept.set(torch.zeros(2, 3))
    step = capture(mine.step, backend="eager")
    for number in range(4):
        same(step(X * number), plain.step(X * number))
        assert torch.equal(mine.kept.get(), plain.kept.get())
    assert stats(step).misses == 1


# ----------------------------------------------------------------------------------------------------------------------
# What does something as it goes: a guard does not keep it, whatever its class is made of
# ----------------------------------------------------------------------------------------------------------------------


class Says:
    def __init__(self, factor: int, log: list[int]):
        self.factor, self.log = factor, log

    def __del__(self) -> None:
        self.log.append(self.factor)


class SaysInSlots:
    __slots__ = ("factor", "log", "__weakref__")
    __init__, __del__ = Says.__init__, Says.__del__


SAY = [Says, SaysInSlots, *(type(f"SaysAs{base.__name__}", (Says, base), {}) for base in (list, set, RuntimeError))]
SAID_FROM: dict[str, tuple[str, Callable[[World, Any], Any]]] = {
    "global": ("kept", lambda w, one: setattr(w, "kept", one)),
    "item": ("table['a']", lambda w, one: w.table.update(a=one)),
    "attribute": ("holder.model", lambda w, one: setattr(w.holder, "model", one)),
    "slot": ("slotted.model", lambda w, one: setattr(w.slotted, "model", one)),
}


@pytest.mark.parametrize("place", SAID_FROM)
@pytest.mark.parametrize("kind", SAY, ids=lambda kind: kind.__name__)
def test_what_says_that_it_goes(kind: Any, place: str) -> None:
    read, give = SAID_FROM[place]
    said: list[list[int]] = []
    for how in (lambda step: step, functools.partial(capture, backend="eager")):
        log: list[int] = []
        world = World(f"def step(x): return x * {read}.factor", table={}, holder=Holder(), slotted=Slotted())
        step = how(world.step)
        for factor in (1, 2, 3):
            give(world, kind(factor, log))
            said.append([*log])
            for _ in range(2):
                assert torch.equal(step(X), X * factor)
    assert said[:3] == said[3:] == [[], [1], [1, 2]]


# ----------------------------------------------------------------------------------------------------------------------
# What answers for attributes that it has not: nobody asks it, to hold it weakly or once it stands where another was
# ----------------------------------------------------------------------------------------------------------------------

ASKED: list[str] = []


def answers(self: Any, name: str) -> str:
    ASKED.append(name)
    return "ab"


class Asked:
    factor = 2
    __getattr__ = answers


AskedOfClass = type("Answering", (type,), {"__getattr__": answers})("AskedOfClass", (), {"factor": 2})


@pytest.mark.parametrize("place", SAID_FROM)
@pytest.mark.parametrize("kind", [Asked, AskedOfClass], ids=lambda kind: kind.__name__)
def test_nobody_asks_whether_it_dies(kind: Any, place: str) -> None:
    read, give = SAID_FROM[place]
    world = World(f"def step(x): return x * {read}.factor", table={}, holder=Holder(), slotted=Slotted())
    step = capture(world.step, backend="eager")
    for _ in range(3):
        give(world, kind())
        ASKED.clear()
        assert torch.equal(step(X), X * 2) and ASKED == []


BEFORE = {
    "function": lambda: helper_of(World(MAKE), 1), "class": lambda: Holder, "slots": Slotted, "object": Holder,
    "partial": lambda: functools.partial(net, 1), "method": lambda: Holder().__init__, "tensor": lambda: torch.ones(2),
}  # fmt: skip


@pytest.mark.parametrize("name", ["__name__", "__qualname__", "__self__", "func", "model", "grad", "__closure__"])
@pytest.mark.parametrize("before", BEFORE)
def test_nobody_asks_what_took_its_place(before: str, name: str) -> None:
    first = BEFORE[before]()
    if not hasattr(first, name):
        return
    step = capture(lambda x, what: (x * 2, getattr(what, name)), backend="eager")
    for what in (first, first, Asked(), Asked()):
        ASKED.clear()
        step(X, what)
        assert ASKED == [name] * (type(what) is Asked)
