"""Sets of numbers that vary: ``len({x.shape[0] for x in inputs}) == 1``, ``set(map(len, batches))``.

Which of the items are equal is decided while tracing, by a guard for each comparison; so many there are then. In which
order they stand nobody knows, and a number has no hash: what asks for these is a graph break, and Python makes the set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from moebius.interpreter import is_kind

from ..values.numbers import Number
from ..values.residual_program import Call, Expression, Residual
from ..values.values import ATOMS, BoundMethod, Break, CannotRebuild, SymbolicObject, type_of
from .own_hashes import new_key
from .parts import Parts

MOST = 16  # items; each is compared with each


class OpenSet(SymbolicObject, named="set"):
    """A set or frozenset of them. items: without those that are equal to an earlier one, as they came."""

    __slots__ = ("domain", "items", "kind", "objects")
    kind: type

    def __init__(self, domain: Parts, kind: type, items: Iterable[Any]):
        self.domain, self.objects, self.kind = domain, domain.objects, kind
        self.items: list[Any] = []
        for item in items:
            self.put(item)

    def put(self, item: Any) -> None:
        """What a display or a comprehension does; nobody else has the set yet."""
        if not self.contains(item):
            self.items.append(item)

    def contains(self, item: Any) -> bool:
        domain = self.domain
        if not is_item(domain, item) or len(self.items) >= MOST:
            self.refuse("this item")
        return any(domain.is_or_equals(one, item) for one in self.items)

    def refuse(self, what: str) -> NoReturn:
        raise Break(
            "hash of a number that varies",
            f"{what} of a {self.kind.__name__} of numbers that vary",
            "ask for its length, or for what is in it; or make it behind the step",
        )

    def attribute(self, name: str) -> Any:
        if name not in ("add", "pop") or self.kind is not set:
            self.refuse(name)
        return self.objects.made(BoundMethod(self, name))

    def call_method(self, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != (name == "add"):
            self.refuse(name)
        return self.add(*args) if args else self.pop()

    def pop(self) -> Any:
        """Its only item; an empty one raises what Python does."""
        if len(self.items) > 1:
            self.refuse("the order")
        self.objects.touch(self, lets_go=False)
        return self.items.pop() if self.items else set().pop()

    def add(self, item: Any) -> None:
        self.objects.touch(self, lets_go=False)
        self.put(item)

    def iterate(self) -> Any:
        if len(self.items) > 1:
            self.refuse("the order")
        return self.objects.made(iter(self.items))

    def length(self) -> int:
        return len(self.items)

    def truth(self) -> bool:
        return bool(self.items)

    def compare(self, op: str, left: Any, right: Any) -> Any:
        other = right if left is self else left
        if op not in ("==", "!="):
            self.refuse(op)
        if not issubclass(type_of(other), (set, frozenset)):
            return op == "!="
        held = other.items if type(other) is OpenSet else self.objects.contents(other)
        return (len(held) == len(self.items) and all(map(self.contains, held))) is (op == "==")

    def expression(self, emitter: Residual) -> Expression:
        if any(type(item) is Number and item.node is None for item in self.items):
            raise CannotRebuild(f"a {self.kind.__name__} of numbers that vary")
        return Call(emitter.constant(self.kind), (emitter.values(self.items),))


def varies(domain: Parts, item: Any) -> bool:
    """Whether the item is a number that another call may find to be another one, or a tuple with one."""
    if is_kind(item, tuple) and type(item) in (tuple, torch.Size):
        return any(varies(domain, part) for part in item)
    return type(item) not in ATOMS - OPEN and domain.numbers.known(item) is not None


def is_item(domain: Parts, item: Any) -> bool:
    """Whether it can be told whether it is equal to another one."""
    if is_kind(item, tuple) and type(item) in (tuple, torch.Size):
        return all(is_item(domain, part) for part in item)
    return type(item) in ATOMS - OPEN or domain.numbers.known(item) is not None


OPEN = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size})


def open_set(domain: Parts, cls: type, items: list[Any]) -> OpenSet | None:
    """The set of the items, if one of them varies and nothing else is in the way."""
    if len(items) > MOST or not any(varies(domain, item) for item in items):
        return None
    return domain.objects.made(OpenSet(domain, cls, items)) if all(is_item(domain, item) for item in items) else None


class Sets(Parts):
    """How displays and comprehensions make sets."""

    def build_set(self, items: list[Any]) -> Any:
        if (found := open_set(self, set, items)) is not None:
            return found
        made: set[Any] = set()
        for item in items:
            made.add(new_key(self, item, made, True))
        return self.objects.made(made)

    def set_add(self, target: Any, value: Any) -> None:
        if type(target) is OpenSet:
            target.add(value)
            return
        if self.objects.is_new(target) and len(target) <= 1 and (found := open_set(self, set, [*target, value])):
            self.objects.touch(target, lets_go=False)
            stack = self.frame.stack if self.frame else []  # (a comprehension's set is there, and nowhere else)
            for place in (i for i, held in enumerate(stack) if held is target):
                stack[place] = found
                return
        self.calls.container_method(target, set, "add", [value], {})

    def set_update(self, target: Any, values: Any) -> None:
        self.calls.container_method(target, set, "update", [values], {})
