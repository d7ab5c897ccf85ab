"""Keys that Python code of their class hashes or compares: of dicts, of sets, of functions that keep their answers.

Python's own tables ask that code, while tracing and in guards. So it is followed once, as any call is: it must change
nothing, look at nothing that the step has changed, and say what it says natively. A key is this very object in each
call, an equal one (a guard), or a new one of plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..bytecode.reported import uncounted
from ..guards.recorder import can_die
from ..guards.sources import Static
from ..heap.heap import Heap
from ..heap.identities import has_own_hash, refuse_own_hash
from ..heap.objects import Objects
from ..heap.records import (
    CONTAINERS,
    SIMPLE,
    Record,
    derived_from,
    members,
    python_method,
    raw_dict,
    raw_items,
    slot_of,
    with_items,
)
from ..hook import ABSENT
from ..values.values import SYMBOLIC, SymbolicObject, TensorProxy
from . import natives
from .parts import Parts

NOT_ASKED = (*SYMBOLIC, SymbolicObject, TensorProxy, torch.Tensor)  # their stand-ins are told apart, or refused as keys


def new_key(domain: Parts, key: Any, container: Any, is_new: bool = False) -> Any:
    """The key as a dict or set has it that the step made (is_new), or a shadow."""
    in_new = is_new or domain.objects.is_new(container)
    if type(key) not in SIMPLE:
        ask_class(domain, key, container, in_new)
    return domain.objects.made_key(key, in_new=in_new)


def own_key(domain: Parts, key: Any, container: Any) -> Any:
    """A key by which a dict of the user's is asked: itself, once its class was followed."""
    if type(key) not in SIMPLE:
        ask_class(domain, key, container, False)
    return key


def ask_class(domain: Parts, key: Any, container: Any, in_new: bool) -> None:
    """Follows what the key's class does when a container is asked for the key, and those of a tuple's items."""
    if is_kind(key, tuple) and not has_own_hash(key):
        for item in raw_items(key):
            if type(item) not in SIMPLE:
                ask_class(domain, item, container, in_new)
        return
    kind, objects = type(key), domain.objects
    if is_kind(key, NOT_ASKED) or not (objects.is_known(key) and has_own_hash(key)):
        return
    if not python_method(kind, "__hash__"):
        refuse_own_hash(key)
    if in_new and kind.__eq__ is object.__eq__ and domain.calls.known(key):
        followed = has_number(domain, key, container)
    else:
        followed = (id(key) in objects.hashed or is_key(domain, key)) and follows(domain, key, container)
    if not followed:
        refuse_own_hash(key)
    objects.hashed[id(key)] = key


def has_number(domain: Parts, key: Any, container: Any) -> bool:
    """Whether an object that is told apart has a hash: its number plays no part, as long as nothing that it looks at
    changes while the container is there."""
    heap, begin, nodes = domain.objects.heap, domain.objects.heap.mark(), domain.tensors.writer.count
    since = heap.age(container) if domain.objects.is_new(container) else begin
    number = asked(domain, key)
    changed = heap.changes_older(begin) or any(heap.was_written(event, since, begin) for event in heap.reads(begin))
    quiet = not changed and domain.tensors.writer.count == nodes
    return type(number) is int and quiet and native_hash(key) is not None


def asked(domain: Parts, key: Any) -> Any:
    """What ``__hash__`` gives, followed as any call is."""
    domain.objects.heap.listening += 1
    try:
        return domain.call(type(key).__hash__, [key], {})
    finally:
        domain.objects.heap.listening -= 1


def follows(domain: Parts, key: Any, container: Any) -> bool:
    """Whether what the key's class does was followed, and a table gets the same of it natively."""
    objects, heap = domain.objects, domain.objects.heap
    begin, nodes = heap.mark(), domain.tensors.writer.count

    def quiet() -> bool:
        return looks_unchanged(heap, begin) and domain.tensors.writer.count == nodes  # (prints and draws are)

    number = asked(domain, key)
    if type(number) is not int or not quiet() or number != native_hash(key):
        return False
    heap.listening += 1
    found = False
    try:
        with domain.counter.counted_before():  # (no table asks that)
            if not compares(domain, key) or not quiet() or has_lost(objects.record_of(container), type(key)):
                return False
        for other in keys_in(objects, container):
            found = found or other is key
            if other is key or native_hash(other) != number:
                continue
            simple = type(other) in SIMPLE or objects.is_known(other)
            entered = other if simple else objects.enter(other, Static("a key", other))
            with domain.counter.counted_before() if found else nullcontext():  # (a table asks up to the one it finds)
                same = domain.truth(domain.compare("==", entered, key))
            if not quiet() or same is not bool(other == key):
                return False
            found = found or same
    finally:
        heap.listening -= 1
    objects.looked_at += heap.reads(begin)  # (to change it from here on is a graph break)
    return True


def compares(domain: Parts, key: Any) -> bool:
    """Whether ``==`` can be followed, and raises nothing: a table may ask for it at any time."""
    try:
        return type(domain.truth(domain.compare("==", key, key))) is bool
    except Exception:
        return False


def has_lost(record: Record | None, kind: type) -> bool:
    """Whether a key of the user's table has changed since it became one, so that no copy of the table has it where it
    is. That is asked of keys of this class alone: others may do something as they are compared."""
    table = None if record is None else record.obj
    keys = [key for key in raw_items(table) if type(key) not in SIMPLE and has_own_hash(key)] if record else []
    contains: Any = dict.__contains__ if issubclass(type(table), dict) else set.__contains__
    return any(type(key) is not kind or not contains(table, key) for key in keys)


def looks_unchanged(heap: Heap, begin: int) -> bool:
    """Whether what was followed has changed nothing, and looked at nothing from before the step that has changed."""
    reads = [event for event in heap.reads(begin) if heap.age(event[1]) < 0]
    return not (heap.changes_older(begin) or any(heap.was_written(event, 0, begin) for event in reads))


def native_hash(key: Any) -> int | None:
    """As the object is before the step: containers ask that while the step is captured."""
    try:
        return hash(key)
    except Exception:
        return None


def keys_in(objects: Objects, container: Any) -> Iterable[Any]:
    """What a key may be compared with."""
    record = objects.record_of(container)
    if record is None:
        return [*raw_items(container)] if derived_from(type(container), (*CONTAINERS, frozenset)) else []
    if record.shadow is not None:
        return [*record.shadow]
    return [*raw_items(record.obj), *record.writes]


def is_key(domain: Parts, value: Any) -> bool:
    """Whether a table may be asked with the object while tracing, and again by a guard: it is this very object in
    each call, or a new one of plain values, which its class hashes and compares. One that may die is not to be kept
    in a guard."""
    objects, known = domain.objects, domain.calls.known
    if is_kind(value, TensorProxy) or not known(value):
        return objects.is_new(value) and is_value(value, known)
    kind = type(value)
    by_identity = kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__
    record = objects.record_of(value)
    unchanged = record is not None and not record.changed
    if can_die(value) or not (by_identity or (python_method(kind, "__hash__") and unchanged)):
        return False
    if by_identity or record is None:
        return objects.pinned(True, value)
    if not record.source.static:
        objects.guards.holds(record.source.name, f"equals this {kind.__qualname__}", Equal(value), record.source)
    return True


@dataclass(frozen=True, eq=False)
class Equal:
    """A guard: an object is what a table takes for this one."""

    key: Any

    def __call__(self, found: Any) -> bool:
        with uncounted():  # (it is no part of what the call does)
            return found is self.key or (type(found) is type(self.key) and bool(found == self.key))


def is_value(value: Any, known: Callable[[Any], bool]) -> bool:
    """Whether the step made an object, of plain values alone, and its class hashes it by them."""
    kind = type(value)
    if natives.is_plain(value, known):
        return True
    if known(value) or not (python_method(kind, "__hash__") or kind.__hash__ in (tuple.__hash__, frozenset.__hash__)):
        return False
    items = [*dict.values(value), *dict.keys(value)] if issubclass(kind, dict) else raw_items(value)
    slots = [held for slot in members(kind) if (held := slot_of(slot, value)) is not ABSENT]
    held = [*(items if with_items(kind) else ()), *(raw_dict(value) or {}).values(), *slots]
    return all(is_value(part, known) for part in held)
