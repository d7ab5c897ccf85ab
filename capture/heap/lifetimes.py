"""What may die while the captured function lives: a model, optimizer or tensor whose name is given to another one;
and in the step itself: what hangs from what it takes out of older objects.

The global, closure cell or dict item that names it is walked at each call, as the way from an argument is, and what was
captured refers to the object weakly: when it dies, its captures go too. What hangs from a model goes with it, and is
watched where it is: a call costs no more for each module in the model.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..guards.recorder import can_die
from ..values.values import ATOMS
from .heap import WHOLE, WRITE
from .identities import is_bare
from .records import CONTAINERS, DICTS, PLAIN_KEYS, Record, raw_dict
from .store import Store

MANY = 20_000  # objects that are looked at; of more nobody says what they lead to
SHARED = (type, types.ModuleType, types.CodeType)  # they outlive a step, and lead to everything


class Lifetimes(Store):
    """Part of ``Objects``. hanging: ids of models and optimizers, and of what was reached from one of them.
    namespaces: ids of the dicts of globals."""

    def by_its_way(self, record: Record, value: Any) -> bool:
        """Whether an entry of a dict that is always the same one is walked to at each call."""
        if id(record.obj) in self.hanging:
            return False
        if issubclass(type(value), torch.Tensor):
            return id(record.obj) in self.namespaces
        return named(value)

    def hangs(self, parent: Any, child: Any) -> None:
        """``child`` was read in ``parent``."""
        if id(parent) in self.hanging and type(child) not in ATOMS:
            self.hanging.add(id(child))

    def lives_by_itself(self, value: Any) -> None:
        """A model or optimizer was met."""
        if can_die(value):
            self.hanging.add(id(value))
            if (namespace := raw_dict(value)) is not None:
                self.hanging.add(id(namespace))


    def may_be_dead(self, obj: Any) -> bool:
        """Whether an older object hung from what the step has taken out of its place by now: Python may have freed it,
        and tracing takes nothing out."""
        return not issubclass(type(obj), SHARED) and any(leads_to(part, obj) for part in self.taken_out())

    def taken_out(self) -> Iterator[Any]:
        """What stood where the step has written to older objects."""
        for kind, owner, key, _ in self.heap.events:
            if kind is WRITE and self.is_entered(owner):
                yield from held_at(owner, key)


def held_at(owner: Any, key: Any) -> Iterable[Any]:
    """What an object holds at a place, which may be a part of it that nobody knows."""
    held = owner if type(owner) in DICTS else raw_dict(owner)
    if type(key) in PLAIN_KEYS and held is not None and key in held:
        return (dict.__getitem__(held, key),)
    return gc.get_referents(owner) if key is WHOLE or type(owner) in CONTAINERS or held is None else ()


def leads_to(start: Any, wanted: Any) -> bool:
    """Whether one object keeps another one alive, as far as Python's garbage collection sees it."""
    seen: set[int] = set()
    pending = [start]
    while pending and len(seen) < MANY:
        value = pending.pop()
        if value is wanted:
            return True
        if id(value) not in seen and gc.is_tracked(value) and not issubclass(type(value), SHARED):
            seen.add(id(value))
            shared = value.__globals__ if type(value) is types.FunctionType else None
            pending += (part for part in gc.get_referents(value) if part is not shared)
    return bool(pending)


def named(value: Any) -> bool:
    """Whether it is a model or optimizer: not a criterion, which each call may make anew, nor a class or function."""
    return not issubclass(type(value), type | types.FunctionType) and can_die(value) and not is_bare(value)
