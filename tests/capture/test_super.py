"""``super()``: what it finds, its own attributes, and the words of its errors, also where no graph holds them."""

from __future__ import annotations

import pytest
import torch

from moebius import capture
from moebius.codegen.resume import Continuation


class Base:
    number = 1

    def found(self):
        return 1


class Derived(Base):
    def own_attributes(self):
        return super().__thisclass__.__name__, super().__self__ is self, super().__self_class__.__name__

    def missing(self):
        return super().nope

    def has(self):
        return hasattr(super(), "found"), hasattr(super(), "nope"), getattr(super(), "nope", 5)

    def the_error(self):
        try:
            return super().nope
        except AttributeError as error:
            return error.name, str(error)

    def of_another_type(self):
        return super(int, self)

    def three_arguments(self):
        return super(Derived, self, 3)

    def by_keyword(self):
        return super(type=Derived, obj=self)

    def unbound(self):
        return super(Derived).found

    def unbound_self(self):
        return super(Derived).__self__

    def without_self(self):
        del self
        return super().found()

    def another_self(self):
        self = 3  # noqa: F841, PLW0642
        return super().found()

    def set_in_the_class(self):
        super().number = 3

    @staticmethod
    def no_arguments():
        return super().found()

    @classmethod
    def of_a_class(cls):
        return super().found is Base.found, super().number


METHODS = [name for name in vars(Derived) if not name.startswith("__")]


def outcome(step):
    try:
        y, found = step(torch.ones(2))
        return y.tolist(), found
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_it_says_what_plain_python_says(name, handled):
    def step(x):
        y = x * 2
        try:
            found = getattr(Derived(), name)()
        except Exception as error:
            if not handled:
                raise
            found = type(error).__name__, str(error)
        return y, found

    captured = capture(step, backend="eager")
    for _ in range(3):
        assert outcome(captured) == outcome(step)


def test_without_the_first_argument_the_native_call_says_something_else(monkeypatch):
    state_at = Continuation.state_at

    def forgetful(self, *args, **kwargs):
        self.calls_super = set()
        return state_at(self, *args, **kwargs)

    monkeypatch.setattr(Continuation, "state_at", forgetful)
    monkeypatch.setattr("moebius.codegen.resume.first_argument", lambda code: set())

    def step(x):
        return x * 2, Derived.no_arguments()

    assert outcome(capture(step, backend="eager")) != outcome(step)
