"""Objects as arguments of functions that keep their answers: told apart by identity, or as their class compares."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moebius import capture, stats
from moebius.heap.identities import Identities
from moebius.python import own_hashes


@dataclass(frozen=True)
class Frozen:
    number: int
    name: str = "a"


@dataclass(frozen=True)
class Nested:
    inner: Frozen
    sizes: tuple = (1, 2)

    @property
    def number(self):
        return self.inner.number


class ByIdentity:
    def __init__(self, number):
        self.number = number


class ByNumber(ByIdentity):
    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return type(other) is ByNumber and self.number == other.number


class OneHash(ByIdentity):
    """All are in one place of the cache."""

    __slots__ = ()

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return type(other) is OneHash and self.number == other.number


class OfAnother(ByNumber):
    def __init__(self, number):
        self.inner = ByIdentity(number)

    number = property(lambda self: self.inner.number, lambda self, number: setattr(self.inner, "number", number))

    def __eq__(self, other):
        return type(other) is OfAnother and self.number == other.number

    __hash__ = ByNumber.__hash__


class Frozendict(dict):
    def __hash__(self):
        return hash(tuple(sorted(self.items())))

    @property
    def number(self):
        return self["number"]


KEYS = {
    "frozen": Frozen,
    "nested": lambda number: Nested(Frozen(number)),
    "by identity": ByIdentity,
    "by number": ByNumber,
    "one hash": OneHash,
    "of another": OfAnother,
    "frozen dict": lambda number: Frozendict(number=number),
}


@functools.lru_cache(None)
def doubled(key):
    return key.number * 2


@functools.lru_cache(None)
def doubled_in(keys, more=()):
    return sum(key.number * 2 for key in keys if not isinstance(key, str)) + len(more)


class Layer(torch.nn.Module):
    def __init__(self, key):
        super().__init__()
        self.key = key
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x_D):
        return x_D * self.weight + doubled(self.key)


class Held:
    key = None


def outcomes(step, make, changed):
    doubled.cache_clear()
    doubled_in.cache_clear()
    held, kept, found = Held(), {}, []
    layers = torch.nn.ModuleList([Layer(make(number)) for number in (1, 2, 3)])
    for call, number in enumerate((1, 1, 2, 2, 1, 1, 3, 2)):
        held.key = kept.setdefault(number, make(number)) if changed != "made anew" else make(number)
        if changed == "other keys" and call == 3:
            layers[0].key, layers[2].key = layers[2].key, layers[0].key
        if changed == "in place" and call in (3, 5) and isinstance(layers[1].key, ByIdentity):
            layers[1].key.number += 5
        found.append(step(torch.ones(3), held, layers, make).item())
    return found


def held_by_an_object(x_D, held, layers, make):
    return (x_D * doubled(held.key)).sum()


def held_by_layers(x_D, held, layers, make):
    for layer in layers:
        x_D = layer(x_D)
    return x_D.sum()


def held_by_checkpointed_layers(x_D, held, layers, make):
    for layer in layers:
        x_D = checkpoint(layer, x_D, use_reentrant=False)
    return x_D.sum()


def made_in_the_step(x_D, held, layers, make):
    return (x_D * doubled(make(3))).sum() + doubled(make(2))


def in_a_tuple(x_D, held, layers, make):
    keys = ("a", held.key, layers[1].key)
    return (x_D * doubled_in(keys)).sum() + doubled_in((), more=((make(1), 2), held.key))


def changed_in_the_step(x_D, held, layers, make):
    if type(held.key) is OfAnother:
        held.key.number = 5
    return (x_D * doubled(held.key)).sum()


STEPS = (
    changed_in_the_step, held_by_an_object, held_by_layers, held_by_checkpointed_layers, made_in_the_step, in_a_tuple,
)  # fmt: skip


@pytest.mark.share(20)
@pytest.mark.filterwarnings("ignore::moebius.MoebiusWarning")
@pytest.mark.parametrize("changed", ("nothing", "made anew", "other keys", "in place"))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key", KEYS)
def test_as_in_python(key, step, changed):
    captured = capture(step, backend="eager")
    assert outcomes(captured, KEYS[key], changed) == outcomes(step, KEYS[key], changed)
    if key != "by identity" and step is not changed_in_the_step:
        assert stats(captured).breaks == 0 and stats(captured).hits >= 3


@pytest.mark.parametrize("key, off", [("by identity", "pinned"), ("one hash", "equal")])
def test_where_nobody_asks_which_key_it_is(key, off, monkeypatch):
    if off == "pinned":
        monkeypatch.setattr(Identities, "pinned", lambda self, stand_in, obj: stand_in)
    else:
        monkeypatch.setattr(own_hashes.Equal, "__call__", lambda self, found: True)
    captured = capture(held_by_an_object, backend="eager")
    assert outcomes(captured, KEYS[key], "nothing") != outcomes(held_by_an_object, KEYS[key], "nothing")


def test_a_function_that_gives_its_key_back():
    @functools.lru_cache(None)
    def interned(key):
        return key

    def step(x_D):
        key = interned(Frozen(2))
        return x_D * key.number, key

    captured = capture(step, backend="eager")
    keys = [captured(torch.ones(2))[1] for _ in range(4)]
    assert all(key is keys[0] for key in keys)
