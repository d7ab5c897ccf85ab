"""``dict[str, int](…)``: an alias with parameters that is called gives what its class does, and is told to it."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from answers import same, told

from moebius import capture, explain

T = TypeVar("T")


class Own:
    __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, items: Any = ()) -> None:
        self.items = list(items)

    def __iter__(self) -> Any:
        return iter(self.items)


class Typed(Own, Generic[T]):
    pass


class Slots(Own):
    __slots__ = ()


class Told(Own):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name == "items" else str(value))


class Words(dict[str, int]):
    pass


class HasSlot:
    __slots__ = ("__orig_class__", "items")
    __class_getitem__ = classmethod(types.GenericAlias)

    def __init__(self, items: Any = ()) -> None:
        self.items = list(items)

    def __iter__(self) -> Any:
        return iter(self.items)


PAIRS = [("a", 1), ("b", 2)]
MADE: dict[str, tuple[Callable[[], Any], str]] = {  # with the alias from outside, or made in the step
    "dict": (lambda: dict[str, int], "mapping"),
    "list": (lambda: list[tuple[str, int]], "items"),
    "set": (lambda: set[tuple[str, int]], "set"),
    "frozenset": (lambda: frozenset[tuple[str, int]], "set"),
    "tuple": (lambda: tuple[tuple[str, int], ...], "items"),
    "deque": (lambda: collections.deque[tuple[str, int]], "items"),
    "OrderedDict": (lambda: collections.OrderedDict[str, int], "mapping"),
    "Counter": (lambda: collections.Counter[str], "mapping"),
    "derived": (lambda: Words, "mapping"),
    "own": (lambda: Own[int], "items"),
    "typed": (lambda: Typed[int], "items"),
    "slots": (lambda: Slots[int], "items"),
    "told": (lambda: Told[int], "items"),
    "a slot of that name": (lambda: HasSlot[int], "items"),
    "an error": (lambda: dict[int, int], "wrong"),
}


def what(made: Any, how: str, x: torch.Tensor) -> Any:
    given = PAIRS if how != "wrong" else [1]
    found = made(given)
    items = list(found.items()) if how == "mapping" else sorted(found) if how == "set" else list(found)
    alias = getattr(found, "__orig_class__", None)
    return x * dict(items).get("b", 3), items, type(found), str(alias), alias == made


@pytest.mark.parametrize("inside", [False, True], ids=["from outside", "made in the step"])
@pytest.mark.parametrize("name", MADE)
def test_what_an_alias_makes(name: str, inside: bool) -> None:
    make, how = MADE[name]
    alias = make()

    def step(x: torch.Tensor) -> Any:
        return what(make() if inside else alias, how, x)

    captured = capture(step, backend="eager")
    for n in (2, 3, 2, 4):
        assert same(told(captured, torch.ones(n)), told(step, torch.ones(n)))
    if name not in ("told", "a slot of that name", "an error"):  # (a graph break, or an error that is the user's)
        assert [each for each in explain(step)(torch.ones(2)).breaks if "is called" in each.detail] == []
