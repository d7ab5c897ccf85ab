"""Slots and what C code keeps for an object: read under guards, and set when the graph has run."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import GuardRecorder
from ..guards.sources import Source, Static, part
from ..hook import ABSENT
from ..values.values import ATOMS, Break
from .heap import OWN, Heap
from .lifetimes import named
from .objects import Objects
from .records import CONTAINERS, HEAP_TYPE, UNREAD, Record, derived_from, raw_dict, slot_of

POSITIONS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
FIXED = (str, types.CodeType)  # what does not change in them as they run: their names and code


class Slots:
    """Part of ``Attributes``."""

    objects: Objects
    guards: GuardRecorder
    heap: Heap
    on_type: Callable[[type, str], Any]
    type_guard: Callable[[Any], None]

    def c_attribute(self, descriptor: Any, obj: Any, kind: type, name: str) -> Any:
        if name == "__class__":
            self.type_guard(obj)
            return kind
        if name == "__dict__":
            if self.objects.is_new(obj):
                return self.own_part(obj, raw_dict(obj))
            record = self.objects.instance_dict(self.objects.need(obj))
            assert record is not None
            return record.obj
        if (name == "__doc__" and not issubclass(kind, type)) or self.objects.is_new(obj):
            self.heap.read(OWN, obj, name, None)
            return self.own_part(obj, descriptor.__get__(obj, kind))
        if is_kind(obj, types.FunctionType | types.MethodType | functools.partial):
            return self.c_value(obj, descriptor.__get__(obj, kind), name)
        record = self.objects.need(obj)
        if (written := in_slots(record).get(name, UNREAD)) is not UNREAD:
            self.heap.read("value", obj, name, written)
            return written
        by_user = is_kind(self.on_type(kind, "__getattribute__"), types.FunctionType)
        if by_user or kind.__flags__ & HEAP_TYPE and self.on_type(kind, name) is not descriptor:
            raise Break(  # guards and the step read it by its name, which leads elsewhere
                "hidden slot",
                f"{kind.__qualname__}.{name} is read past a __getattribute__ or another descriptor of that name",
                "read the attribute by its name, without a __getattribute__ of the class's own",
            )
        if kind is types.FrameType or kind in POSITIONS and type(descriptor.__get__(obj, kind)) not in FIXED:
            where = f"{kind.__name__}.{name} says where code stands that goes on"
            raise Break("frame object", where, "it runs natively")
        if "saved" in name and issubclass(kind, torch.autograd.graph.Node):  # to read it may run the user's hooks
            raise Break("autograd node", f"{kind.__name__}.{name} unpacks what was saved", "it runs natively")
        try:
            value = descriptor.__get__(obj, kind)
        except AttributeError:  # an empty slot
            empty = functools.partial(is_empty, descriptor)
            self.guards.holds(f"{record.source.name}.{name}", "is not set", empty, record.source)
            self.heap.read("value", obj, name, ABSENT)
            raise
        known = type(value) in ATOMS or type(value) is kind or is_kind(value, torch.Tensor)  # (an array's .T)
        if not known and descriptor.__get__(obj, kind) is not value:
            return self.made_at_each_read(descriptor, obj, record.source, name, value)
        return self.c_value(obj, value, name)

    def own_part(self, obj: Any, value: Any) -> Any:
        """What an object that the trace made keeps in C. A container that only it has led to is as old as it is."""
        if type(value) in CONTAINERS:
            self.heap.read(OWN, obj, None, None)
            if not self.objects.is_known(value):
                self.heap.part_of[id(value)] = obj
        return value if self.objects.record_of(value) else self.objects.made(value)

    def takes_as_own(self, obj: Any, namespace: Any) -> bool:
        """``copy.__dict__ = obj.__dict__.copy()``: a dict that the trace made, and no other object has, becomes what
        a new object made for itself."""
        made = self.objects.is_new(namespace) and type(namespace) is dict and not self.objects.inside
        if made := made and self.heap.owner_of(namespace) is namespace:
            self.heap.part_of[id(namespace)] = obj
        return made

    def made_at_each_read(self, descriptor: Any, obj: Any, source: Source, name: str, value: Any) -> Any:
        """What C code makes anew whenever it is asked, as the shape of an array: it is guarded by what it holds."""
        items = value.values() if is_kind(value, dict) else value
        held = type(value) in CONTAINERS or type(value) is tuple
        if not held or not all(type(item) in ATOMS for item in items):
            raise Break("C attribute", f"{source.name}.{name} is another object at each read", "it runs natively")
        as_before = functools.partial(is_equal, descriptor, copy.copy(value))
        self.guards.holds(f"{source.name}.{name}", f"== {value!r}"[:60], as_before, source)
        self.heap.read("value", obj, name, value)
        return self.objects.made(value)

    def c_value(self, obj: Any, value: Any, name: str) -> Any:
        """A value that C code keeps for an object: guarded by reading it again."""
        if self.objects.is_new(obj):
            return value
        entered = self.enter_c_value(obj, value, name)
        self.heap.read("value", obj, name, entered)
        return entered

    def value_now(self, obj: Any, name: str, then: Any) -> Any:
        """What a slot or C attribute that was read is by now."""
        return in_slots(self.objects.need(obj)).get(name, then)

    def enter_c_value(self, obj: Any, value: Any, name: str) -> Any:
        place = part(self.objects.need(obj).source, "attr", name)
        by_its_way = issubclass(type(value), torch.Tensor) or place.name in self.objects.symbolic_places or named(value)
        if place.parent.static and not by_its_way:
            if type(value) in ATOMS:
                self.guards.equals(place, value)
                return value
            self.guards.check("is", place, value, text="unchanged")
            return self.objects.enter(value, Static(place.name, value))
        return self.objects.enter(value, place)

    def set_slot(self, obj: Any, name: str, slot: Any, value: Any) -> None:
        """A slot of an object that existed before."""
        kind = type(obj)
        by_class = type(slot) is types.MemberDescriptorType and slot.__objclass__.__flags__ & HEAP_TYPE
        if not by_class or slot.__name__ != name or derived_from(kind, (*CONTAINERS, BaseException)):
            hint = "keep state that changes in ordinary attributes"
            raise Break("slot or C attribute is set", f"{kind.__qualname__}.{name}", hint)
        record = self.objects.need(obj)
        self.objects.touch(obj, name)
        record.writes[name] = value


def in_slots(record: Record) -> dict[str, Any]:
    """What the step has set in an object's slots. (What it has set in a container are items.)"""
    return {} if derived_from(type(record.obj), CONTAINERS) else record.writes


def is_equal(descriptor: Any, value: Any, obj: Any) -> bool:
    """A guard: reading it again gives an equal one."""
    now = descriptor.__get__(obj, type(obj))
    return type(now) is type(value) and now == value and repr(now) == repr(value)


def is_empty(slot: Any, obj: Any) -> bool:
    """A guard: nothing is in an object's slot."""
    return slot_of(slot, obj) is ABSENT
