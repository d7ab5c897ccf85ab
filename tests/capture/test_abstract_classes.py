"""Classes with abstract methods: which ones cannot be made, the words of the error, and what changes that."""

from __future__ import annotations

import abc

import torch

from moebius import capture
from moebius.python.attributes import Attributes


class Abstract(abc.ABC):
    @abc.abstractmethod
    def first(self):
        """None here."""

    @property
    @abc.abstractmethod
    def second(self):
        """None here."""


class Plain(Abstract):
    def __init__(self, value):
        self.value = value


class Dict(dict, Abstract):
    pass


class List(list, Abstract):
    pass


class Tuple(tuple, Abstract):
    pass


class Error(Exception, Abstract):
    pass


class WithNew(Abstract):
    def __new__(cls, value):
        return super().__new__(cls)


class Module(torch.nn.Module, Abstract):
    pass


CLASSES = ((Abstract, ()), (Plain, (1,)), (Dict, ()), (List, ([1],)), (Error, ("e",)), (WithNew, (1,)), (Module, ()))


def made(x):
    found = []
    for cls, args in (*CLASSES, (Tuple, ([1, 2],))):
        try:
            found.append(type(cls(*args)).__name__)
        except TypeError as error:
            found.append(str(error))
    return found, x + 1


def test_which_are_made_and_the_words_where_not():
    step = capture(made, backend="eager")
    for _ in range(3):
        assert step(torch.ones(2))[0] == made(torch.ones(2))[0]


def concrete():
    class Base(abc.ABC):
        @abc.abstractmethod
        def method(self):
            """None here."""

    class Given(Base):
        def method(self):
            return 2

    def step(x):
        try:
            return x * Given().method()
        except TypeError as error:
            return str(error)

    return Given, step


def outcome(step):
    found = step(torch.ones(2))
    return found.tolist() if isinstance(found, torch.Tensor) else found


def test_one_that_becomes_abstract():
    cls, step = concrete()
    captured = capture(step, backend="eager")
    assert outcome(captured) == outcome(captured) == [2.0, 2.0]
    cls.__abstractmethods__ = frozenset({"other"})
    assert outcome(captured) == outcome(step) and "other" in outcome(captured)
    cls.__abstractmethods__ = frozenset()
    assert outcome(captured) == [2.0, 2.0]


def test_without_the_guard_that_is_not_seen(monkeypatch):
    on_type = Attributes.on_type
    skip = "__abstractmethods__"
    monkeypatch.setattr(Attributes, "on_type", lambda self, c, name: None if name == skip else on_type(self, c, name))
    cls, step = concrete()
    captured = capture(step, backend="eager")
    outcome(captured)
    cls.__abstractmethods__ = frozenset({"other"})
    assert outcome(captured) == [2.0, 2.0] != outcome(step)
