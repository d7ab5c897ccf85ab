"""What existed before the step and dies in it: a write of the step waits for the graph, and so would the death."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch

from moebius import capture
from moebius.heap import lifetimes


class Plain:
    def __init__(self, v):
        self.v = v


class Logs(Plain):
    log: list

    def __del__(self):
        self.log.append(1)


def made(kind=Plain):
    one = types.SimpleNamespace(log=[], other=Plain(5))
    one.held = one.box = one.table = one.reference = None
    one.kept = kind(3)
    return one


def with_reference():
    one = made()
    one.reference = weakref.ref(one.kept)
    return one


def with_finalizer():
    one = made(Logs)
    one.kept.log = one.log
    return one


def with_callback():
    one = made()
    one.reference = weakref.ref(one.kept, lambda _, log=one.log: log.append(1))
    return one


def with_finalize():
    one = made()
    one.reference = weakref.finalize(one.kept, one.log.append, 1).peek
    return one


def with_generator():
    one = made()

    def waits(log=one.log):
        try:
            yield 1
        finally:
            log.append(1)

    one.kept.waits = waits()
    next(one.kept.waits)
    return one


def with_weak(kind):
    one = made()
    one.log = kind()
    one.log.add(one.kept) if kind is weakref.WeakSet else one.log.update(
        {one.kept: 1} if kind is weakref.WeakKeyDictionary else {1: one.kept}
    )
    return one


WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
SEEN = {f.__name__: f for f in (with_reference, with_finalizer, with_callback, with_finalize, with_generator)}
SEEN |= {kind.__name__: functools.partial(with_weak, kind) for kind in WEAK}


def ask(one):
    gone = type(one.reference) is weakref.ref and one.reference() is None
    return len(one.log) + (2 if gone else 3)


def attribute(one, x):
    y = x * one.kept.v
    one.kept = None
    return y * ask(one)


def deleted(one, x):
    before = ask(one)
    del one.kept
    return x * before * ask(one)


def popped(one, x):
    k = one.__dict__.pop("kept")
    y = x * k.v
    del k
    return y * ask(one)


def local(one, x):
    for _ in range(2):
        k = one.kept
        one.kept = Plain(5)
        x = x * ask(one)
        del k
        x = x * ask(one)
    return x


def in_a_function(one, x):
    def inner():
        one.kept = one.other
        return x * ask(one)

    return inner() * ask(one)


def in_a_try(one, x):
    try:
        one.kept = None
    finally:
        x = x * ask(one)
    return x


def on_data(one, x):
    y = x * ask(one)
    one.kept = None
    if y.sum() > 1:
        y = y * ask(one)
    return y


def cleared(one, x):
    one.box, one.kept = [one.kept], None
    one.box.clear()
    return x * ask(one)


STEPS = (attribute, deleted, popped, local, in_a_function, in_a_try, on_data, cleared)
HELD: list = []


def differs(make, step, named):
    """Whether three calls, each with an object of its own, say something else than plain Python's."""

    def run(one, x):
        return step(HELD[0] if named else one, x)

    found = []
    for function in (run, capture(run)):
        said = []
        for _ in range(3):
            one = make()
            HELD[:] = [one]
            given = None if named else one
            del one
            said.append((function(given, torch.ones(2)).tolist(), len(HELD[0].log)))
        found.append(said)
    HELD.clear()
    return found[0] != found[1]


@pytest.mark.share(22)
@pytest.mark.parametrize("named", (False, True))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", SEEN.values(), ids=SEEN)
def test_it_dies_where_it_does_in_plain_python(make, step, named) -> None:
    assert not differs(make, step, named)


def test_the_death_is_looked_for(monkeypatch) -> None:
    monkeypatch.setattr(lifetimes, "held_at", lambda owner, key: [])
    assert differs(with_reference, attribute, False) and differs(with_finalizer, attribute, False)


@functools.lru_cache
def collects(iteration):
    return gc.isenabled()


def test_a_cached_function_finds_the_collector_as_it_was() -> None:
    def step(x):
        y = x * (2 if collects(1) else 3)
        gc.disable()
        y = y * (5 if collects(2) else 7)
        gc.enable()
        return y

    for _ in range(2):
        collects.cache_clear()
        assert capture(step)(torch.ones(1)).item() == 14
        assert gc.isenabled()
