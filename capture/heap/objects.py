"""Objects that existed before the call: how tracing reads them under guards and writes to them without touching them.

Every object that tracing meets is either an atom, *new* (made while tracing: a real object that nobody else has seen,
free to be changed), or *known*: it has a ``Record`` with its source. A known container is read through an overlay. A
single key of a dict is guarded alone; as soon as the whole is read, a *shadow* (a real container of the same type with
the entered contents) takes its place. At the end the shadow differs from the original, or it does not: the difference
is the effect that the residual code replays.
"""

from __future__ import annotations

import collections
import contextvars
import gc
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import can_die, describe
from ..guards.sources import Part, Source, Static, is_item, part, part_name
from ..hook import ABSENT, Entry, copy_set
from ..python.natives import asks_metaclass, is_bound_builtin
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.values import ATOMS, IDENTITIES, Break, SymbolicObject, TensorMethod, TensorProxy, type_of
from ..values.views import View
from .cells import Cells
from .compounds import Compounds
from .computed_keys import ComputedKeys
from .conditional_writes import Side
from .heap import ANYTHING, OWN, WHOLE
from .identities import SameItems
from .lifetimes import Lifetimes
from .records import (
    CONTAINERS,
    DICTS,
    HEAP_TYPE,
    PLAIN_KEYS,
    SIMPLE,
    UNREAD,
    VIEWS,
    Record,
    raw_dict,
    whole_items,
)


class Objects(Compounds, Cells, ComputedKeys, Lifetimes):
    """All objects of one trace. ``symbolic_places``: names of places whose value differs from call to call."""

    def what_is_now(self) -> dict[str, Callable[[Any, Any, Any], Any]]:
        return {
            "entry": self.current,
            "whole": self.whole_now,
            "cell": self.cell_now,
            "context": self.current,
            "defaults": self.is_changed,
        }

    # ------------------------------------------------------------------------------------------------------------------
    # Entering: a value found at a guarded place becomes a value of the trace
    # ------------------------------------------------------------------------------------------------------------------

    def enter(self, value: Any, source: Source) -> Any:
        """The trace's value for ``value``, found at ``source``. Records what has to hold when the source is dynamic."""
        kind = type(value)
        if kind in ATOMS:
            return self.enter_atom(value, source)
        if self.varying and self.varies(value, source):
            return self.as_varying(value, source)
        if kind in CONTAINERS:
            if id(value) in self.new:
                return value
        elif issubclass(kind, torch.Tensor):
            return self.tensor_input(value, source)
        elif (id(value) in self.new and id(value) not in self.tuples) or kind is TensorProxy:
            return value
        elif kind in VIEWS:  # what is in it changes with its container, which it does not show
            if not source.static:
                self.guards.check("type", source, kind, text=f"type is {kind.__qualname__}")
            return self.made(View(kind, lambda emitter: emitter.load(source)))
        elif issubclass(kind, tuple) or kind is frozenset:
            return self.enter_tuple(value, source)
        elif kind is slice and id(value) not in self.records:
            return self.enter_slice(value, source)
        record = self.records.get(id(value))
        if record is not None:
            self.met_again(record, source, value)
            return self.slices[id(value)] if kind is slice else value
        if kind in CONTAINERS:
            if not source.static:
                self.guards.check("type", source, kind, text=f"type is {kind.__qualname__}")
        elif issubclass(kind, types.FunctionType) and not source.static and is_made_anew(value):
            self.enter_closure(value, source)
        elif issubclass(kind, types.MethodType):
            self.enter_method(value, source)
        elif is_bound_builtin(value) and not source.static:
            if is_kind(owner := self.enter_builtin(value, source), TensorProxy):
                return self.made(TensorMethod(owner, value.__name__))
        elif issubclass(kind, IDENTITIES) or (
            identified(value) and not (source.name in self.symbolic_places and can_die(value))
        ):
            if not source.static:
                self.guards.check("is", source, value, text=f"is {describe(value).removeprefix('the same ')}")
                if can_die(value):
                    self.guards.root(value)
                source = Static(source.name, value, source)
            self.lives_by_itself(value, source.name)
        elif not source.static:
            self.guards.check("type", source, kind, text=f"type is {kind.__qualname__}")
        if source.static and kind.__flags__ & HEAP_TYPE:  # ``value.__class__ = Other`` leaves no trace anywhere else
            if not issubclass(kind, type):
                self.guards.instance(source, value, None)
            elif asks_metaclass(value):
                self.guards.check("type", source, kind, text=f"type is {kind.__qualname__}")
        self.records[id(value)] = Record(value, source)
        return value

    def seen_through(self, obj: Any) -> Any:
        """What a mapping proxy shows, if that is known or a dict that the proxy was found to show; anything else as
        itself. (A class's own ``__dict__`` has a ``__doc__``, always: what it shows is the class's attributes.)"""
        shown = super().seen_through(obj)
        record = self.records.get(id(obj)) if shown is obj and type(obj) is types.MappingProxyType else None
        if record is None or type(mapping := shown_by(obj)) not in DICTS or "__doc__" in mapping:
            return shown
        name, source = f"{record.source.name}'s mapping", record.source
        held = Static(name, mapping) if source.static else Part(name, source, "python", shown_by)
        self.behind[id(obj)] = shown = self.enter(mapping, held)
        return shown

    def enter_atom(self, value: Any, source: Source) -> Any:
        if source.static:
            return value
        if (type(value) in (int, float, complex, str) or type(value) in NUMPY_NUMBERS) and (
            source.name in self.symbolic_places or (type(value) is not str and is_counted(source))
        ):
            return self.symbolic(value, source)
        if self.varying and self.varies(value, source):
            return self.as_varying(value, source)
        if type(value) is bool and source.name in self.symbolic_places and is_item(source):  # which transitions ended
            return self.symbolic(value, source)
        if type(value) is torch.Size and source.name in self.symbolic_places:
            return self.enter_tuple(value, source)
        self.guards.equals(source, value)
        return value

    # ------------------------------------------------------------------------------------------------------------------
    # Dicts
    # ------------------------------------------------------------------------------------------------------------------

    def instance_dict(self, record: Record) -> Record | None:
        """The record of a known object's ``__dict__``, or None if its type has none."""
        if record.instance_dict is None:
            obj, source = record.obj, record.source
            namespace = raw_dict(obj)
            if namespace is None:
                return None
            if source.static:
                if not issubclass(type(obj), type):
                    self.guards.instance(source, obj, namespace)
                place: Source = Static(part_name(source, "instance_dict"), namespace)
            else:
                place = part(source, "instance_dict")
            inner = record.instance_dict = self.found(namespace, place)
            if issubclass(type(obj), torch.optim.lr_scheduler.LRScheduler):
                self.schedules.add(id(inner))
            self.owners[id(inner)] = record
            self.hangs(obj, namespace)
        return record.instance_dict

    def dict_get(self, record: Record, key: Any) -> Any:
        """The value at ``key``, or ABSENT."""
        if type(key) is not str and (found := self.at_computed_key(record, key)) is not UNREAD:
            return found
        self.refuse_late(record, key)
        if self.misses(record, key):
            return ABSENT
        value = self.entry_now(record, self.key_in(record, key))
        if is_kind(key, PLAIN_KEYS):
            self.heap.read("entry", record.obj, key, value)
        else:
            self.heap.read("item", record.obj, None, value)
        return value

    def entries(self, record: Record, keys: Sequence[Any]) -> list[Any]:
        """``dict_get`` for several plain keys of a dict."""
        source, reads, heap = record.source, record.reads, self.heap
        if record.shadow is not None or record.writes or record.late or not source.static or self.symbolic_places:
            return [self.dict_get(record, key) for key in keys]
        if id(record) in self.schedules:
            return [self.dict_get(record, key) for key in keys]
        values, relied_on = [], self.guards.watched(source.name, record.obj).entries
        attributes = source.name.removesuffix(".__dict__") if source.name.endswith(".__dict__") else None
        for key in keys:
            value = reads.get(key, UNREAD)
            if value is UNREAD:
                value = dict.get(record.obj, key, ABSENT)
                if type(value) is float:
                    value = self.read_entry(record, key)
                else:
                    relied_on.setdefault(key, value)
                    if type(value) not in SIMPLE and value is not ABSENT:
                        self.hangs(record.obj, value)
                        name = part_name(source, "dict_item", key) if attributes is None else f"{attributes}.{key}"
                        value = self.enter(value, Static(name, value))
                reads[key] = value
            heap.read("entry", record.obj, key, value)
            values.append(value)
        return values

    def is_empty(self, record: Record) -> bool:
        """Whether an unchanged dict holds nothing, which is guarded and written down as ``contents`` does."""
        if record.obj or record.shadow is not None or record.writes or type(record.obj) not in DICTS:
            return False
        self.refuse_late(record)
        self.guard_keys(record)
        self.heap.read("whole", record.obj, None, ())
        return True

    def entry_now(self, record: Record, key: Any) -> Any:
        if record.shadow is not None:
            return record.shadow.get(key, ABSENT)
        if key in record.writes:
            return record.writes[key]
        if key not in record.reads:
            record.reads[key] = self.read_entry(record, key)
        return record.reads[key]

    def current(self, obj: Any, key: Any, then: Any) -> Any:
        """What an entry of a dict that was read is by now."""
        record = self.records[id(obj)]
        return ANYTHING if record.late and not self.is_apart(record, key) else self.entry_now(record, key)

    def is_changed(self, obj: Any, key: Any, then: Any) -> bool:
        record = self.records.get(id(obj))
        return record is not None and record.changed

    def whole_now(self, obj: Any, key: Any, then: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a container that was read holds by now. (One without a shadow is as it was.)"""
        record = self.records[id(obj)]
        if record.shadow is None or record.late:
            return (*then, ANYTHING) if record.writes or record.appends or record.late else then
        return whole_items(record.shadow)

    def read_entry(self, record: Record, key: Any) -> Any:
        if type(record.obj) is types.CellType:
            return self.read_cell(record)
        if type(record.obj) is contextvars.ContextVar:
            return self.read_context(record.obj)
        value = dict.get(record.obj, key, ABSENT)
        source = record.source
        if source.static:
            name = part_name(source, "dict_item", key)
            if value is not ABSENT and (
                name in self.symbolic_places
                or (id(record) in self.schedules and key in COUNTERS)  # each step writes it
                or (type(value) is float and is_schedule(name, key))
                or self.by_its_way(record, value)
            ):
                return self.enter(value, Part(name, source, "dict_item", key))
            self.guards.dict_entry(source.name, record.obj, key, value)
            self.hangs(record.obj, value)
            if issubclass(type(value), tuple):
                self.paths[id(value), name] = Part(name, source, "dict_item", key)
            return ABSENT if value is ABSENT else self.enter(value, Static(name, value))
        if value is ABSENT:
            self.guards.check("absent", source, key, text=f"has no {describe(key)}")
            return ABSENT
        return self.enter(value, part(source, "dict_item", key))

    def counted(self) -> set[str]:
        """Names of the places whose int the step read and wrote another over: what a step counts in."""
        found = set()
        for record in self.every_record():
            if not issubclass(type(record.obj), dict):
                continue
            whole = record.shadow is not None and type(record.obj) in DICTS
            before_of = record.original if whole else record.reads
            for key, value in (record.shadow if whole else record.writes).items():
                before = before_of.get(key)
                counts = type(before) is int and not is_kind(value, SymbolicObject) and type_of(value) is int
                if counts and value is not before:
                    found.add(part_name(record.source, "dict_item", key))
        return found

    def dict_set(self, record: Record, key: Any, value: Any) -> None:
        if self.inside and type(key) is str and record.shadow is None and not record.late:
            if type(value) in ATOMS and key not in record.writes and dict.get(record.obj, key, ABSENT) is value:
                self.dict_get(record, key)
            if record.writes.get(key, record.reads.get(key, ABSENT)) is value:
                return  # an optimizer puts its state back where it has read it, or sets a flag again: nothing changes
        place = self.place_in_branch(record, key) if self.inside else None
        self.touch(record.obj, key if is_kind(key, PLAIN_KEYS) else WHOLE, place=place)
        if is_kind(place, Side) or self.writes_late(record, key):
            self.write_late(record, key, value, place if is_kind(place, Side) else None)
            return
        key = self.key_in(record, key)
        if record.shadow is not None:
            record.shadow[key] = value
        else:
            known = type(value) in ATOMS and key not in record.writes and id(record) not in self.drawn
            if known and dict.get(record.obj, key, ABSENT) is value:
                self.dict_get(record, key)  # a flag that is set already: a guard on that, and nothing to replay
            if record.writes.get(key, UNREAD) is ABSENT:  # deleted before
                del record.writes[key]
                if dict.__contains__(record.obj, key):
                    record.moved |= {key}
            record.writes[key] = value

    def dict_delete(self, record: Record, key: Any) -> bool:
        """Remove the key; False if it was not there."""
        if self.dict_get(record, key) is ABSENT:
            return False
        self.touch(record.obj, key if is_kind(key, PLAIN_KEYS) else WHOLE)
        if self.writes_late(record, key):
            self.write_late(record, key, ABSENT)
            return True
        key = self.key_in(record, key)
        if record.shadow is not None:
            del record.shadow[key]
        else:
            record.writes[key] = ABSENT
        return True

    # ------------------------------------------------------------------------------------------------------------------
    # Whole containers
    # ------------------------------------------------------------------------------------------------------------------

    def contents(self, obj: Any, iterated: bool = False) -> Any:
        """A real container that stands for ``obj`` in natively run code: itself if new, else its shadow.

        iterated: whether a loop goes through it.
        """
        record = self.records.get(id(obj))
        if record is None:
            if type(obj) not in FIXED:
                self.heap.read(OWN, obj, None, None)
            return obj
        self.refuse_growing(record, iterated)
        shadow = self.shadow(record)
        self.heap.read("whole", record.obj, None, whole_items(shadow))
        return shadow

    def shadow(self, record: Record) -> Any:
        self.refuse_late(record)
        self.refuse_recorder(record)
        if record.shadow is None:
            kind = type(record.obj)
            if kind not in CONTAINERS:
                raise Break(
                    "container of an unknown type",
                    f"a {kind.__name__} is read as a whole",
                    "use dict, list, set, OrderedDict, defaultdict or deque",
                )
            if kind in DICTS:
                record.original = self.whole_dict(record)
            else:
                record.original = self.whole_sequence(record)
            shadow: Any = record.original.copy() if kind is not set else copy_set(record.original)
            for written, value in record.writes.items():
                key = self.entered_key(record, written)
                if value is ABSENT or written in record.moved:
                    shadow.pop(key, None)
                if value is not ABSENT:
                    shadow[key] = value
            if record.appends:
                shadow.extend(record.appends)
            record.shadow = self.made(shadow)
            self.records[id(shadow)] = record  # met again as an object (``list(d) is``...), it is the original
        return record.shadow

    def key_in(self, record: Record, key: Any) -> Any:
        return self.real_key(key) if record.shadow is None else self.made_key(key)

    def entered_key(self, record: Record, key: Any) -> Any:
        """What stands in a shadow for a key of the user's dict, of which a guard says that it is the same object."""
        return key if type(key) in ATOMS else self.enter(key, Static(f"a key of {record.source.name}", key))

    def guard_keys(self, record: Record) -> None:
        """The dict has these keys, in this order."""
        self.refuse_late(record)
        source = record.source
        if source.static:
            self.guards.dict_keys(source.name, record.obj)
        else:
            keys = ", ".join(map(describe, record.obj))
            self.guards.check("keys", source, tuple(record.obj), text=f"keys are [{keys}]"[:80])
            for key in record.obj:
                self.real_key(key)

    def whole_dict(self, record: Record) -> Any:
        self.guard_keys(record)
        kind = type(record.obj)
        whole = kind() if kind is not collections.defaultdict else kind(record.obj.default_factory)
        for key in record.obj:
            overwritten = type(key) in ATOMS and record.writes.get(key, ABSENT) is not ABSENT
            if key not in record.reads and not overwritten:  # (what stood there before the step, nobody asks)
                record.reads[key] = self.read_entry(record, key)
            whole[self.entered_key(record, key)] = record.reads.get(key, UNREAD)
        return whole

    def whole_sequence(self, record: Record) -> Any:
        source, items = record.source, list(record.obj)
        if source.static and not (type(record.obj) is list and source.name in self.symbolic_places):
            self.same_items(record, items)
            for item in items:
                self.hangs(record.obj, item)
            entered = [self.enter(x, Static(f"{source.name}[{i}]", x)) for i, x in enumerate(items)]
        elif type(record.obj) is list:
            self.guards.check("length", source, len(items), text=f"has {len(items)} items")
            entered = [self.enter(x, part(source, "list_item", i)) for i, x in enumerate(items)]
        else:
            if not all(type(x) in ATOMS for x in items):
                raise Break(
                    "container of an unknown type", f"a {type(record.obj).__name__} argument is read", "pass a list"
                )
            self.same_items(record, items)
            entered = items
        if type(record.obj) is collections.deque:
            return collections.deque(entered, record.obj.maxlen)
        if type(record.obj) is set and all(a is b for a, b in zip(entered, items, strict=True)):
            return copy_set(record.obj)  # its hash table too, which decides in which order the next ones stand
        return type(record.obj)(entered)

    def same_items(self, record: Record, items: list) -> None:
        """The sequence or set still holds these very objects (or equal constants)."""
        text = f"the same {len(items)} items"
        if type(record.obj) is collections.deque:
            self.guards.holds(record.source.name, text, SameItems(tuple(items)), record.source)
        else:
            self.guards.check("contents", record.source, tuple(items), text=text)


def is_made_anew(function: types.FunctionType) -> bool:
    """Whether a function may be another one in each call, with the same code: an inner function or a lambda."""
    inner = function.__code__.co_flags & inspect.CO_NESTED
    return bool(function.__closure__ or inner or function.__code__.co_name == "<lambda>")


def identified(value: Any) -> bool:
    """Objects of long life that are guarded as a whole by identity, wherever they are found."""
    return issubclass(type(value), LONG_LIVED)


def may_be_replaced(value: Any) -> bool:
    """Whether what was read in an object may be read in another one that comes in its place: it is not known by its
    identity alone."""
    return type(value) in CONTAINERS or not (
        is_kind(value, (*IDENTITIES, tuple, torch.Tensor)) or identified(value) or type(value) in ATOMS
    )


LONG_LIVED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    contextvars.ContextVar,
    logging.Logger,
    types.CellType,
    weakref.ref,
    Entry,
)
FIXED = ATOMS | {tuple, frozenset}  # of new objects: those that nobody can change
COUNTERS = frozenset({"last_epoch", "_step_count"})


def is_schedule(name: str, key: Any) -> bool:
    """Whether an entry of a dict holds a hyperparameter that schedules change from step to step."""
    return ".param_groups[" in name and type(key) is str and key == "lr"


def is_counted(source: Source) -> bool:
    """Whether a place holds a scheduler's count, or what schedules set."""
    return is_kind(source, Part) and (source.operand in COUNTERS or is_schedule(source.name, source.operand))


def shown_by(proxy: types.MappingProxyType) -> Any:
    """What it shows, which it always does; nothing else gives it."""
    (mapping,) = gc.get_referents(proxy)
    return mapping
