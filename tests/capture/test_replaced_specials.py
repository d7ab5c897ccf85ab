"""Special methods that are no functions: C's under another name, static methods, properties, those of a metaclass."""

from __future__ import annotations

import functools

import pytest
import torch
from answers import same

from moebius import capture
from moebius.python import containers


class Options(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class Lenient(dict):
    __getattr__ = dict.get
    __getitem__ = dict.get
    __contains__ = staticmethod(lambda key: key == "only")
    __setitem__ = dict.setdefault


class Backwards(list):
    __iter__ = list.__reversed__
    __len__ = property(lambda self: lambda: 7)
    __getitem__ = list.count


class Parts:
    __call__ = functools.partialmethod(lambda self, a, b: (a, b), 1)
    __getitem__ = classmethod(lambda cls, key: (cls.__name__, key))
    __setattr__ = functools.partialmethod(lambda self, name, value: self.__dict__.__setitem__(name, [value]))
    __len__ = staticmethod(lambda: 3)


class Meta(type):
    def __eq__(cls, other):
        return False

    def __instancecheck__(cls, obj):
        return obj == 3

    __hash__ = type.__hash__


class Never(metaclass=Meta):
    pass


def options():
    held = Options(a=1, inner=Options(b=[1]))

    def step(x, n):
        held.a += n
        held.inner.b.append(n)
        held.late = held.inner.b
        own = Options(q=n)
        own.w = own.q + 1
        if n == 6:
            del held.late
        return x * held.a, own, vars(own), "late" in held

    return step, held


def lenient():
    held = Lenient(a=1)

    def step(x, n):
        try:
            found = held["missing"], held.missing, held["a"]
        except KeyError:
            found = "an error"
        held["a"] = n
        held["b"] = n
        return x * 2, found, "a" in held, "only" in held, Lenient(q=n)["w"]

    return step, held


def backwards():
    held = Backwards([1, 2, 1])

    def step(x, n):
        return x + 1, [*held], len(held), held[1], list(Backwards([n, 3])), len(Backwards())

    return step, held


def parts():
    held = Parts()

    def step(x, n):
        held.a = n
        return x * 2, held.a, held(n), held["k"], len(held)

    return step, vars(held)


def of_a_metaclass():
    def step(x, n):
        return x * n, Never == Never, Never != Never, isinstance(3, Never), isinstance(Never(), Never)  # noqa: PLR0124

    return step, []


PROGRAMS = [options, lenient, backwards, parts, of_a_metaclass]


def calls(program, wrap):
    step, held = program()
    step = wrap(step)
    for n in (5, 5, 6, 7, 5):
        yield step(torch.ones(2), n), repr(held)


@pytest.mark.parametrize("program", PROGRAMS)
def test_replaced(program):
    for ours, plain in zip(calls(program, capture), calls(program, lambda step: step), strict=True):
        assert same(ours, plain)


@pytest.mark.faults
def test_taken_for_those_of_the_base(monkeypatch):
    monkeypatch.setattr(containers, "is_replaced", lambda method, name: False)
    pairs = zip(calls(lenient, capture), calls(lenient, lambda step: step), strict=True)
    assert not all(same(ours, plain) for ours, plain in pairs)


@pytest.mark.faults
def test_taken_for_generic(monkeypatch):
    monkeypatch.setattr("moebius.python.attributes.is_generic", lambda found, name: True)
    pairs = calls(options, capture), calls(options, lambda step: step)
    with pytest.raises((AssertionError, KeyError)):
        assert all(same(ours, plain) for ours, plain in zip(*pairs, strict=True))
