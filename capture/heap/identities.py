"""Which object it is: two names of one object, objects that are compared, hashed and looked up by identity.

An object that the arguments lead to may be another one in the next call. That two places hold one object, or two, is
noted where tracing meets an object again, changes one of two, or asks: ``is``, ``==`` in C, a key of a dict or set.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import same_constant
from ..guards.sources import Source
from ..python.enums import hashes_by_name
from ..regions.autograd_joins import refuse_outcome
from ..torch_facts import torch_private
from ..values.values import ATOMS, SYMBOLIC, Break, RuntimeNumber, SymbolicObject, TensorProxy
from .records import CONTAINERS, DICTS, SIMPLE, Record, python_method, raw_dict, raw_items
from .store import Store


class Identities(Store):
    """Part of ``Objects``."""

    def guard_tuples(self, left: tuple, right: tuple) -> None:
        """``left is right`` of two tuples. For all other guards a place that holds another tuple of the same items has
        not changed."""
        mine, other = raw_items(left), raw_items(right)
        if len(mine) != len(other) or not mine or not all(map(may_be_one, mine, other)):
            return
        places = list(dict.fromkeys([*self.places_of(left), *self.places_of(right)]))
        for value in (left, right):
            for place in self.places_of(value):
                if place.static and len(places) > 1:
                    original = self.tuples[id(value)].original
                    path = self.paths.get((id(original), place.name))
                    if path is None:
                        raise Break("identity of a tuple", f"``is`` of {place.name}", "compare with ==")
                    self.guards.check("is", path, original, text="is this very tuple")
        if left is right and len(places) > 1:
            first, *others = sorted(places, key=lambda place: place.static)
            for place in others:
                if not first.static:
                    self.guards.same_or_distinct("same", first, place)

    def is_one_tuple(self, left: Any, right: Any) -> bool:
        """Whether one tuple was found at two places that have inputs of their own for its tensors (``Aliases``)."""
        met = [self.tuples.get(id(value)) for value in (left, right)]
        if not (met[0] and met[1] and met[0].original is met[1].original):
            return False
        first, second = sorted((one.places[0] for one in met if one), key=lambda place: place.static)
        if not first.static:
            self.alias(first, second, met[0].original)
        return True

    def places_of(self, value: tuple) -> list[Source]:
        """Where a tuple was found; nowhere, if the step made it."""
        met = self.tuples.get(id(value))
        return [] if met is None else met.places

    def alias(self, source: Source, known: Source, value: Any) -> None:
        """The object was met before under another source: that they are one object is a fact too."""
        if known.static:
            self.guards.check("is", source, value, text=f"is {known.name}")
        else:
            self.guards.same_or_distinct("same", source, known)

    def met_again(self, record: Record, source: Source, value: Any) -> None:
        if not source.static and record.source is not source:
            self.alias(source, record.source, value)
        elif source.static and not record.source.static:
            self.pin(record, f"is {source.name}")

    def pin(self, record: Record, text: str) -> None:
        """The object that arguments lead to is this very one: a fact, once."""
        self.pin_at(record.source, record.obj, text)

    def pinned(self, stand_in: Any, obj: Any) -> Any:
        """What stands for this very object."""
        if (record := self.record_of(obj)) is not None:
            self.pin(record, f"is this {type(obj).__name__}")
        return stand_in

    def pin_at(self, source: Source, obj: Any, text: str) -> None:
        key = ("pinned", id(obj))
        if not source.static and key not in self.guards.seen:
            self.guards.seen.add(key)
            try:
                check: tuple[str, Any] = ("is_weak", weakref.ref(obj))  # a guard keeps nobody's key alive
            except TypeError:
                check = ("is", obj)
            self.guards.check(check[0], source, check[1], text=text)

    def guard_distinct(self, left: Any, right: Any) -> None:
        """Two objects that are not one today: a fact, where a path from the arguments leads to one of them."""
        for value in (left, right):
            if is_kind(value, TensorProxy):
                value.is_asked = True
        first, second = self.source_of(left), self.source_of(right)
        if first is None or second is None or (first.static and second.static):
            return
        self.guards.same_or_distinct("distinct", first, second)

    def source_of(self, value: Any) -> Source | None:
        if is_kind(value, TensorProxy):
            return value.source
        if is_kind(value, tuple) and (met := self.tuples.get(id(value))) is not None:
            return met.places[0]
        record = self.records.get(id(value))
        return None if record is None else record.source

    def distinct_when_changed(self) -> None:
        """What was changed under one name must not turn out to be what has another name at a later call."""
        changed: dict[type, list[Record]] = {}
        for record in self.changed_records():
            if type(record.obj) in CONTAINERS or record.writes:
                changed.setdefault(type(record.obj), []).append(record)
        alike: dict[type, list[Record]] = {kind: [] for kind in changed}
        for record in self.every_record():
            if type(record.obj) in alike:
                alike[type(record.obj)].append(record)
        for kind, written in changed.items():
            if all(record.source.static for record in written):
                others = [record for record in alike[kind] if not record.source.static]
                alike[kind] = [*written, *others] if others else []
            self.guards.all_distinct([record.source for record in alike[kind]])
        told_apart: dict[type, list[Source]] = {}
        for record in self.told_apart.values():
            told_apart.setdefault(type(record.obj), []).append(record.source)
        for sources in told_apart.values():
            self.guards.all_distinct(sources)

    def misses(self, record: Record, key: Any) -> bool:
        """Whether an object that arguments lead to is no key of an unchanged dict: a guard on that, which does not
        keep the object alive and holds for the next one."""
        source = self.source_of(key)
        if source is None or source.static or is_kind(key, tuple) or record.shadow is not None:
            return False
        real = key.real if is_kind(key, TensorProxy) else key
        if record.writes or type(record.obj) not in DICTS or not hashed_by_identity(real):
            return False
        if dict.__contains__(record.obj, real):
            return False
        self.heap.read("keys", record.obj, None, None)
        text = f"is no key of {record.source.name}"
        self.guards.holds(source.name, text, is_no_key, record.source, source)
        return True

    def real_key(self, key: Any) -> Any:
        """The key as the user's own dict has it: a tensor that existed before is itself there, the same each time."""
        if is_kind(key, TensorProxy):
            refuse_outcome(key, self.outcomes)
            if key.real is None or key.source is None:
                return key
            self.pin_at(key.source, key.real, "the same key")
            return key.real
        if is_kind(key, tuple):
            keys = tuple(self.real_key(k) if type(k) not in SIMPLE else k for k in key)
            return key if all(a is b for a, b in zip(keys, key, strict=True)) else keys
        return self.made_key(key)

    def made_key(self, key: Any, in_new: bool = False) -> Any:
        """The key as a dict or set has it that the step made (``in_new``), or a shadow: tensors are their proxies
        there. Which tensor each is need not be said: a guard tells the inputs apart."""
        if type(key) is str:
            return key
        if is_kind(key, TensorProxy | torch.Tensor):
            refuse_outcome(key, self.outcomes)
            return key
        if is_kind(key, tuple):
            refuse_own_hash(key)
            items = raw_items(key)
            keys = [self.made_key(item) if type(item) not in SIMPLE else item for item in items]
            if all(a is b for a, b in zip(keys, items, strict=True)):
                return key
            # (a class of its own may make its tuples otherwise)
            return tuple.__new__(type(key), keys) if hasattr(key, "_fields") else tuple(keys)
        if is_kind(key, SymbolicObject):
            key.refuse("the hash")
        if is_kind(key, RuntimeNumber):
            return key.numbers.constant(key)  # type: ignore[attr-defined]
        if is_kind(key, SYMBOLIC):
            if type(found := self.few_sizes(key)) is int:
                return found
            raise Break(
                "hash of a number that varies",
                "a dict, a set or hash() needs the value of a number that is another one in each call",
                "index a list or a tensor by it, use a key that stays, or do it behind the step",
            )
        if not self.is_followed(key):
            refuse_own_hash(key)  # (before it is pinned: that would be a guard on what Python goes on with alone)
        elif type(key).__eq__ is not object.__eq__:
            return key  # (an equal one will do, and a guard says so)
        if (record := self.records.get(id(key))) is not None:  # hashed by what it is: another object is another key
            if in_new and (record.source.static or hashed_by_identity(key)):
                self.told_apart[id(key)] = record  # which one it is need not be said, either
            else:
                self.pin(record, "the same key")
        if issubclass(type(key), METHODS):  # hashed by the object that it belongs to and by its function
            for part in (key.__self__, getattr(key, "__func__", None)):
                if (record := self.records.get(id(part))) is not None:
                    self.pin(record, "the object of the same key")
        return key


    def is_followed(self, key: Any) -> bool:
        """Whether its class was followed as it hashes and compares a key, or an item of one."""
        return bool(self.hashed) and (
            any(map(self.is_followed, raw_items(key))) if is_kind(key, tuple) else id(key) in self.hashed
        )

    def settle_order(self, items: Any) -> None:
        """The items of a set are asked for one by one. Objects stand there in the order of their addresses: they are
        these very ones then. Tensors have others than their proxies."""
        items = raw_items(items)
        if len(items) > 1 and any(is_kind(item, TensorProxy) for item in items):
            hint = "keep them in a list or a dict"
            raise Break("order of a set of tensors", "its items are asked for one by one", hint)
        for item in items:
            if (record := self.told_apart.get(id(item))) is not None:
                self.pin(record, "the same item of a set")


def has_own_hash(key: Any) -> bool:
    """Whether Python code of its class hashes or compares a key. (A str subclass may have its own.)"""
    kind = type(key)
    if kind.__hash__ is object.__hash__ or kind in ATOMS or hashes_by_name(kind):
        return False
    own = python_method(kind, "__hash__") or python_method(kind, "__eq__")
    return own and kind not in torch_private.OPERATOR_OBJECTS


def refuse_own_hash(key: Any) -> None:
    """A key that is hashed and compared by Python code of its class, which was not followed."""
    if has_own_hash(key):
        raise Break(
            "key with its own hash",
            f"a {type(key).__name__} is used as a dict key",
            "use a plain key (str, int, a tuple of them)",
        )


METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


@dataclass(frozen=True, eq=False)
class SameItems:
    """A guard: a deque or frozenset gives these very objects, or equal constants, in this order."""

    items: tuple[Any, ...]

    def __call__(self, found: Iterable[Any]) -> bool:
        return same_constant(tuple(found), self.items)


@dataclass(frozen=True, eq=False)
class HasItems:
    """A guard: a frozenset has these very objects among its items."""

    objects: tuple[Any, ...]

    def __call__(self, found: frozenset[Any]) -> bool:
        known = set(map(id, found))
        return all(id(one) in known for one in self.objects)


def may_be_one(a: Any, b: Any) -> bool:
    """Whether two items of tuples are one, or could be: constants of one value are not told apart."""
    return a is b or (type(a) is type(b) and (is_kind(a, tuple) or (type(a) in ATOMS and (a == b or a != a))))


def hashed_by_identity(key: Any) -> bool:
    return type(key).__hash__ in (object.__hash__, torch.Tensor.__hash__) or is_kind(key, types.FunctionType)


def is_no_key(the_dict: dict, key: Any) -> bool:
    """A guard."""
    return not dict.__contains__(the_dict, key)


def is_bare(value: Any) -> bool:
    """Whether it is a module without parameters, buffers and modules, as ``nn.CrossEntropyLoss()``: one that each call
    makes anew is known by what is read in it."""
    if not issubclass(type(value), torch.nn.Module):  # (``__class__`` may be the user's)
        return False
    held = raw_dict(value) or {}
    return not held.get("_modules") and all(
        item is None for name in ("_parameters", "_buffers") for item in (held.get(name) or {}).values()
    )
