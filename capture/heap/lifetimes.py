"""What may die while the captured function lives: a model, optimizer or tensor whose name is given to another one.

The global, closure cell or dict item that names it is walked at each call, as the way from an argument is, and what was
captured refers to the object weakly: when it dies, its captures go too. What hangs from a model goes with it, and is
watched where it is: a call costs no more for each module in the model.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moebius.interpreter.domain.core import MISSING, lookup

from ..guards.recorder import can_die
from ..values.values import ATOMS, Break, TensorProxy, type_of
from .heap import WHOLE
from .identities import is_bare
from .records import CONTAINERS, PLAIN_KEYS, Record, raw_dict
from .store import Store


class Lifetimes(Store):
    """Part of ``Objects``. model_owned: ids of models and optimizers, and of what was reached from one of them.
    namespaces: ids of the dicts of globals."""

    def by_its_way(self, record: Record, value: Any) -> bool:
        """Whether an entry of a dict that is always the same one is walked to at each call."""
        if id(record.obj) in self.model_owned:
            return False
        if issubclass(type(value), torch.Tensor):
            return id(record.obj) in self.namespaces
        return named(value)

    def hangs(self, parent: Any, child: Any) -> None:
        """``child`` was read in ``parent``."""
        if id(parent) in self.model_owned and type(child) not in ATOMS:
            self.model_owned.add(id(child))

    def lives_by_itself(self, value: Any, place: str) -> None:
        """A model or optimizer was met."""
        if can_die(value):
            self.guards.model(value, place)
            self.model_owned.add(id(value))
            if (namespace := raw_dict(value)) is not None:
                self.model_owned.add(id(namespace))

    def touch(self, obj: Any, key: Any = WHOLE, lets_go: bool = True, place: Any = None) -> None:
        """A write waits for the graph, and so does the death of what it lets go: a break where that runs code."""
        record = self.records.get(id(obj))
        owner = obj if record is None else record.obj
        lets_go = lets_go and (key is not WHOLE or type(owner) in HOLDERS)
        if lets_go and (record is not None or not self.is_new(obj)) and (id(owner), key) not in self.let_go:
            self.let_go.add((id(owner), key))
            seen = next(filter(death_is_seen, parts := [*led_to(held_at(owner, key))]), None)
            if seen is not None:
                self.dying = parts
                where = f"a {type_of(seen).__name__}, whose death runs code, may go with what is written over"
                raise Break("object dies in the step", where, "let go of it outside of the step", OBSERVED)
        super().touch(obj, key, lets_go, place)

    def may_be_gone(self, found: Any) -> bool:
        """Whether a write of the step, still to be done, may let go of an object that existed before it."""
        if issubclass(type(found), SHARED):
            return False
        writes = [event for event in self.heap.writes_between() if event[3] < 0]
        parts = [*led_to(held for _, owner, key, _ in writes for held in held_at(owner, key))]
        if len(parts) < MOST and not any(part is found for part in parts):
            return False
        self.dying = parts
        return True


def named(value: Any) -> bool:
    """Whether it is a model or optimizer: not a criterion, which each call may make anew, nor a class or function."""
    return not issubclass(type(value), type | types.FunctionType) and can_die(value) and not is_bare(value)


# Why a frame runs natively as a whole: the rest after a break would hold what it is given.
OBSERVED = "it is seen when its locals let go of an object"
HOLDERS = (*CONTAINERS, types.CellType)  # of others (an iterator, a generator) a write is a step on
SHARED = (type, types.ModuleType, types.CodeType)  # they live on anyway
MOST = 1_000  # objects that are looked at
OURS = (__name__.partition(".")[0], "torch")


def held_at(owner: Any, key: Any) -> list[Any]:
    """What a place that is written to held before the call, or may have held."""
    if issubclass(type(owner), TensorProxy):
        return []  # (a gradient; a tensor's attributes are in its ``__dict__``)
    held = owner if issubclass(type(owner), dict) else raw_dict(owner)
    if type(key) in PLAIN_KEYS and held is not None:
        return [dict.get(held, key)]
    return parts_of(owner)


def led_to(parts: Iterable[Any]) -> Iterator[Any]:
    """These objects and what they lead to, the first ``MOST``."""
    waiting = [part for part in parts if type(part) not in ATOMS]
    met: dict[int, Any] = {}
    while waiting and len(met) < MOST:
        part = waiting.pop()
        if id(part) not in met:
            met[id(part)] = part
            yield part
            waiting += [held for held in parts_of(part) if type(held) not in ATOMS]


def classes_in(value: Any) -> Iterator[type]:
    return (part for part in led_to([value]) if issubclass(type(part), type))


def parts_of(obj: Any) -> list[Any]:
    """What an object holds, without what lives on anyway."""
    kind = type(obj)
    if issubclass(kind, SHARED):
        return []
    if issubclass(kind, types.FunctionType):
        return [obj.__defaults__, obj.__kwdefaults__, obj.__closure__, obj.__dict__]
    return [part for part in gc.get_referents(obj) if part is not kind]


def death_is_seen(obj: Any) -> bool:
    """Whether code that is not ours runs when an object dies."""
    kind = type(obj)
    if issubclass(kind, SHARED):
        return False
    if lookup(kind, "__del__") is not MISSING:
        return True
    if kind is types.GeneratorType:
        return obj.gi_suspended
    if issubclass(kind, torch.Tensor):  # (torch's own tables know tensors weakly)
        return False
    # (a proxy has its object's attributes, not its own)
    references = (each for each in weakref.getweakrefs(obj) if issubclass(type(each), weakref.ref))
    called = [reference.__callback__ for reference in references]
    return any(callback is not None and not is_ours(callback) for callback in called)


def is_ours(callback: Any) -> bool:
    """Whether a weak reference tells our own code, or torch's: tables that are looked into by who has the object."""
    while type(callback) in (types.MethodType, functools.partial):
        callback = callback.__func__ if type(callback) is types.MethodType else callback.func
    is_function = type(callback) in (types.FunctionType, types.BuiltinFunctionType)
    return is_function and (callback.__module__ or "").partition(".")[0] in OURS
