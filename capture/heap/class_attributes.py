"""Attributes of classes that a step sets or that differ from call to call: ``type(self).calls += 1``.

A class keeps its attributes in a dict of its own, which only ``type.__setattr__`` may write to. Tracing treats that
dict as it does an instance's: what is read in it is guarded entry by entry, what is written waits for the residual
code. Other attributes of classes are guarded along the method resolution order, all at once (``Attributes.on_type``).
"""

from __future__ import annotations

import gc
from typing import Any

from ..values.values import Break, type_of
from .objects import Objects
from .records import HEAP_TYPE, UNREAD, Record

HINT = "set it outside of the step, or keep it in an object"
LIBRARIES = ("torch", "moebius")  # their own code, and torch's in C, looks at its classes without asking the trace


class ClassAttributes:
    """Those of one trace. moving: names that the step has written on some class, or that differ from call to call.

    shown: classes whose whole ``__dict__`` the step has seen. changes: how often one was written.
    """

    def __init__(self, objects: Objects):
        self.objects, self.guards, self.records = objects, objects.guards, objects.class_dicts
        self.moving = {place.rpartition(".")[2] for place in objects.symbolic_places}
        self.written: set[str] = set()
        self.shown: dict[int, type] = {}
        self.changes = 0

    def record_of(self, cls: type) -> Record:
        """The record of a class's own dict."""
        record = self.records.get(cls)
        if record is None:
            (namespace,) = gc.get_referents(cls.__dict__)  # (a proxy, of which nothing else gives it)
            record = self.records[cls] = self.objects.found(namespace, f"{cls.__qualname__}.__dict__")
        return record

    def find(self, cls: type, name: str) -> Any:
        """What the look-up gives, read in the dict of the class that has it; UNREAD for an attribute that stays."""
        if name not in self.moving:
            return UNREAD
        owner = next((base for base in cls.__mro__ if self.has(base, name)), None)
        if owner is None or not owner.__flags__ & HEAP_TYPE:
            return UNREAD
        if name not in self.written and f"{owner.__qualname__}.{name}" not in self.objects.symbolic_places:
            return UNREAD
        self.guards.class_order(cls)
        for base in cls.__mro__[: cls.__mro__.index(owner)]:
            self.objects.dict_get(self.record_of(base), name)  # not there: a guard
        return self.objects.dict_get(self.record_of(owner), name)

    def has(self, cls: type, name: str) -> bool:
        """Whether the class itself has the attribute by now."""
        record = self.records.get(cls)
        return (record is not None and name in record.writes) or name in cls.__dict__

    def refuse_set(self, cls: type, name: str, before: Any, value: Any, by_meta: bool) -> None:
        """A graph break where setting it does more than put a value into the class's dict.

        before: what is there now, None if nothing. by_meta: whether the metaclass has a say.
        """
        method = "__get__"
        if by_meta:
            why = "its metaclass has a say"
        elif not cls.__flags__ & HEAP_TYPE or (cls.__module__ or "").split(".")[0] in LIBRARIES:
            why = "a class of a library"
        elif name.startswith("__") and name.endswith("__"):
            why = "a name that Python gives a meaning"
        elif hasattr(type_of(before), method) or hasattr(type_of(value), method):
            why = "a method or a descriptor"
        elif id(cls) in self.shown:
            why = "the step holds the class's __dict__"
        else:
            return
        raise Break("attribute of a class is set", f"{cls.__qualname__}.{name} = …: {why}", HINT)

    def set(self, cls: type, name: str, value: Any, was_read: bool) -> None:
        """``type.__setattr__(cls, name, value)``. was_read: whether the step has looked it up before."""
        record = self.record_of(cls)
        if was_read:
            self.objects.dict_get(record, name)  # what it counts in becomes an input
        self.moving.add(name)
        self.written.add(name)
        self.changes += 1
        self.objects.dict_set(record, name, value)

    def show(self, cls: type) -> None:
        """The class's whole ``__dict__`` is asked for: a graph break if the step has changed it."""
        for base in cls.__mro__:
            record = self.records.get(base)
            if record is not None and record.writes:
                raise Break("__dict__ of a class that the step changed", base.__qualname__, "read it by its name")
        self.shown[id(cls)] = cls
