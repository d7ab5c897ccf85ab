"""isinstance and issubclass of abstract classes whose metaclass is the user's: its own checks run, inherited ones are
answered, and a class that is registered later is seen."""

from __future__ import annotations

import abc
import itertools

import pytest
import torch

from moebius import capture, stats


class Leaves(abc.ABCMeta):
    """Answers calls alone, as that of pyro's distributions does."""

    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class LeavesAgain(Leaves):
    pass


class OwnInstances(abc.ABCMeta):
    def __instancecheck__(cls, value):
        return type(value) is int


class OwnSubclasses(abc.ABCMeta):
    def __subclasscheck__(cls, other):
        return other is str


class Proxy:
    """Says that it is a text."""

    @property
    def __class__(self):
        return str


METACLASSES = (abc.ABCMeta, Leaves, LeavesAgain, OwnInstances, OwnSubclasses)
VALUES = (1, "a", 2.5, None, Proxy(), torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.nn.Linear(1, 1))


def classes_of(metaclass):
    base = metaclass("Base", (), {})
    hooked = classmethod(lambda cls, other: True if other is float else NotImplemented)
    registered, hook = metaclass("Registered", (), {}), metaclass("Hook", (), {"__subclasshook__": hooked})
    registered.register(str)
    registered.register(torch.nn.Parameter)
    return base, metaclass("Sub", (base,), {}), registered, hook


@pytest.mark.parametrize("metaclass", METACLASSES, ids=lambda m: m.__name__)
def test_all_values_of_all_classes(metaclass):
    base, sub, registered, hook = classes = classes_of(metaclass)
    values = (*VALUES, sub())

    def step(x):
        asked = [isinstance(v, c) for v, c in itertools.product((x, *values), classes)]
        below = [issubclass(c, other) for c, other in itertools.product((int, str, float, *classes), classes)]
        return x + 1, asked, below

    captured = capture(step, backend="eager")
    for _ in range(3):
        assert captured(torch.ones(2))[1:] == step(torch.ones(2))[1:]
    if metaclass not in (OwnInstances, OwnSubclasses):
        assert (stats(captured).breaks, stats(captured).hits) == (0, 2)
    base.register(int)
    for _ in range(2):
        assert captured(torch.ones(2))[1:] == step(torch.ones(2))[1:]
