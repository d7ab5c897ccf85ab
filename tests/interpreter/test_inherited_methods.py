"""An error of a method in C names the class that has it where it is called by name, the object's where it is bound."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest

from moebius.interpreter import interpret


class Items(list):
    pass


class Table(dict):
    pass


class Asked(list):
    """Not read as object reads: its methods are bound first."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Own(list):
    """Has a method of another list's in its own dict, and one that is its own in all but the place."""

    def __init__(self) -> None:
        self.append, self.extend = [].append, super().extend  # type: ignore[method-assign]


class Text(str):
    __slots__ = ()


MADE = (
    Items, Table, Asked, Own, Text, collections.OrderedDict, collections.Counter, ValueError, collections.deque, int,
    lambda: True, lambda: collections.defaultdict(int), lambda: type("Row", (tuple,), {})((1, 2)), lambda: Items,
)  # fmt: skip
CALLS = ("v.{0}(*many)", "v.{0}(1, 2, 3, 4, 5, 6)", "v.{0}(x=1)", "v.{0}()", "(m := v.{0})(*many)", "bound(v.{0})")


def methods(kind: type) -> list[str]:
    found = [(name, getattr(kind, name, None)) for name in dir(kind)]
    return [name for name, m in found if type(m) is types.MethodDescriptorType and m.__objclass__ is not kind]


def answer(function: Any, *args: Any) -> str:
    try:
        return type(function(*args)).__name__
    except (TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    except (KeyError, IndexError, ValueError) as error:
        return type(error).__name__


def bound(method: Any) -> Any:
    return method(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("make", MADE)
def test_the_class_in_an_error(make: Any) -> None:
    named = 0
    for name in methods(type(make())):
        for call in CALLS:
            world: dict[str, Any] = {"bound": bound, "many": (1, 2, 3, 4, 5, 6)}
            exec(f"def f(v):\n    return {call.format(name)}", world)
            plain = answer(world["f"], make())
            assert answer(interpret(world["f"]), make()) == plain, (name, call)
            named += "takes" in plain
    assert named
