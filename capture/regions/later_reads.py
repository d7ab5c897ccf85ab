"""What a backward that the function's caller runs reads of older state: it is asked for once more when it runs.

The graph runs what backward was interpreted as at the call. Each place that was read then is guarded for the call; the
same guards, those of these places alone, are asked again before the backward. Where one does not hold any more, that is
an error: the graph would give the gradient of before. A place is left out where the call's guards do not say what it
holds: what is an input of the graph, or hangs from an argument that is another one in each call.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.interpreter.domain.core import lookup

from ..errors import StateChangedError
from ..guards.program import CompiledGuards, changed_in_class, changed_key
from ..guards.recorder import Fact, GuardRecorder
from ..guards.sources import Part, Static, as_written, part_name
from ..heap.heap import LAYOUTS, Event
from ..heap.objects import Objects, SameItems
from ..heap.records import Record, contents_of, raw_dict, slot_of
from ..heap.tensor_attributes import SWITCHED
from ..hook import ABSENT
from ..python.switches import as_tuple
from ..values.values import ATOMS, SYMBOLIC, RuntimeNumber, TensorProxy

CURE = "It runs natively from the next call on. To keep it in the graph, capture the call of backward as well"


class AskedLater:
    """The guards of what one backward has read. what: that backward, for an error; name: the same for
    ``Assumptions.natively``; changed: told of them, and of the place, where one does not hold.

    Copies of a graph share it: it knows a user's objects.
    """

    def __init__(self, what: str, name: str, guards: CompiledGuards):
        self.what, self.name, self.guards, self.program = what, name, guards, guards.program
        self.changed: Callable[[str, str, str], None] = lambda what, name, place: None

    def __deepcopy__(self, memo: Any) -> AskedLater:
        return self

    def __call__(self) -> None:
        """Raises StateChangedError where one of the places holds something else now."""
        if self.program.check(()):
            return
        index = self.program.explain(())
        if index is not None:
            place = as_written(place_of(self.guards.facts[index]))
            self.changed(self.what, self.name, place)
            raise StateChangedError(f"{place}, which {self.what} reads, was changed after the captured call. {CURE}")


def place_of(fact: Fact) -> str:
    """The place whose guard does not hold."""
    kind, owner, *rest = fact.check
    if kind == "dict" and (key := changed_key(owner, rest[0])) is not None:
        return part_name(Static(fact.record.source, owner), "dict_item", key)
    if kind == "class" and (name := changed_in_class(owner, rest[0])) is not None:
        return f"{owner.__qualname__}.{name}"
    return fact.record.source


class LaterReads:
    """Collects the guards of some reads."""

    def __init__(self, objects: Objects):
        self.objects, self.heap, known = objects, objects.heap, objects.guards
        self.dicts, self.classes, self.instances, self.later = known.dicts, known.classes, known.instances, known.later
        self.moved = id(LAYOUTS) in objects.heap.written
        self.layouts = known.layouts
        here = known.where()
        self.found = GuardRecorder(lambda: here)
        self.met: set[Any] = set()
        self.kinds: dict[str, Callable[[Any, Any, Any], None]] = {
            "entry": self.entry,
            "item": self.whole,
            "whole": self.whole,
            "keys": self.keys,
            "class": self.on_class,
            "cell": self.cell,
            "context": self.context,
            "value": self.kept_by_c,
            "tensor": self.of_tensor,
            "meta": self.of_tensor,
            "function": self.function,
            "switch": self.switch,
            "answer": self.answer,
        }

    def ask(self, what: str, name: str, reads: Iterable[Event]) -> AskedLater:
        for kind, owner, key, value in reads:
            if (add := self.kinds.get(kind)) is not None:
                add(owner, key, value)
            self.type_of(value)
            self.layout_of(value)
        asked = AskedLater(what, name, CompiledGuards(self.found, 0, ()))
        self.later.append(asked)
        return asked

    def static(self, obj: Any) -> Record | None:
        """What is known of an older object that is this one in each call, or of what such a tensor keeps by name."""
        record = self.objects.record_of(obj)
        if record is None:
            return None
        place = record.source
        if is_kind(place, Part) and place.operation == "instance_dict":
            place = place.parent
        return record if place.static else None

    def is_certain(self, value: Any) -> bool:
        """Whether the call's guards say that a place holds this: a constant, or one and the same object."""
        kind = type(value)
        if kind in ATOMS or value is ABSENT:
            return kind not in SYMBOLIC
        if issubclass(kind, tuple):
            return all(map(self.is_certain, value))
        return not is_kind(value, TensorProxy | RuntimeNumber) and self.static(value) is not None

    def is_written(self, owner: Any, key: Any) -> bool:
        """Whether the step has set it: backward then finds what the step has left."""
        return self.heap.was_written(("entry", owner, key, None))

    def holds(self, name: str, predicate: Callable[[], bool]) -> None:
        self.found.holds(name, "unchanged", predicate)

    def layout_of(self, value: Any) -> None:
        """A tensor that was read still has the sizes, the dtype, … that the call's guards want. (What the step gives to
        another layout itself, is not known here.)"""
        real: Any = value.real if is_kind(value, TensorProxy) else None
        if id(real) in self.layouts and id(real) not in self.met:
            self.met.add(id(real))
            if not self.moved:
                self.found.static_tensor(value.source.name, real, self.layouts[id(real)])

    # ------------------------------------------------------------------------------------------------------------------
    # By kind of read
    # ------------------------------------------------------------------------------------------------------------------

    def type_of(self, value: Any) -> None:
        """An object that was read is still of its class."""
        record = self.static(value)
        if record is None or id(value) in self.met:
            return
        self.met.add(id(value))
        instance = self.instances.get(id(value))
        if instance is not None:
            self.found.instance(record.source, value, instance.namespace)
        elif is_kind(record.source, Static) and record.source.via is not None and not is_kind(value, type):
            held = functools.partial(is_still, as_weak(value), type(value))
            self.holds(f"type({record.source.name})", held)

    def entry(self, the_dict: Any, key: Any, value: Any) -> None:
        record = self.static(the_dict)
        if record is None or not issubclass(type(the_dict), dict):
            return
        if (owner := self.objects.owner_of(the_dict)) is not None:
            self.type_of(owner.obj)
        _, known = self.dicts.get(id(the_dict), (None, None))
        if self.is_written(the_dict, key) or is_kind(record.source, Part):
            if self.is_certain(value):
                held = functools.partial(dict.get, the_dict, key, ABSENT)
                self.holds(part_name(record.source, "dict_item", key), functools.partial(same_in, held, value))
        elif known is not None and key in known.entries:
            self.found.dict_entry(record.source.name, the_dict, key, known.entries[key])

    def keys(self, container: Any, key: Any, value: Any) -> None:
        if not issubclass(type(container), dict):
            return self.whole(container, key, value)
        record = self.static(container)
        if record is not None and not self.is_written(container, None):
            self.found.dict_keys(record.source.name, container)

    def whole(self, container: Any, key: Any, value: Any) -> None:
        record = self.static(container)
        if record is None or self.is_written(container, None):
            return
        name, kind = record.source.name, type(container)
        if issubclass(kind, dict):
            self.found.dict_keys(name, container)
            for one in container if is_kind(record.source, Part) else ():
                self.entry(container, one, self.objects.entry_now(record, one))
            _, known = self.dicts.get(id(container), (None, None))
            for one, held in (known.entries if known is not None else {}).items():
                self.found.dict_entry(name, container, one, held)
        elif kind is deque:
            self.holds(name, functools.partial(SameItems(tuple(container)), container))
        elif kind in (list, set) and name not in self.objects.symbolic_places:
            self.found.check("contents", Static(name, container), tuple(container), text="unchanged")

    def on_class(self, _: Any, key: tuple[type, str], value: Any) -> None:
        """(An attribute that the step sets is an entry of the class's dict.)"""
        cls, name = key
        known = self.classes.get(id(cls))
        if known is not None and name in known.entries:
            self.found.class_entry(cls, name, known.entries[name])

    def cell(self, cell: types.CellType, key: Any, value: Any) -> None:
        if self.static(cell) is not None and self.is_certain(value):
            name = self.objects.need(cell).source.name
            self.holds(name, functools.partial(same_in, functools.partial(contents_of, cell), value))

    def context(self, variable: Any, key: Any, value: Any) -> None:
        if self.is_certain(value):
            name = f"ContextVar({variable.name!r})"
            self.holds(name, functools.partial(same_in, functools.partial(variable.get, ABSENT), value))

    def kept_by_c(self, obj: Any, name: str, value: Any) -> None:
        record = self.static(obj)
        if record is None or not self.is_certain(value) or is_kind(obj, TensorProxy):
            return
        held = functools.partial(slot_of, lookup(type(obj), name))
        by_weak = functools.partial(same_in_slot, held, as_weak(obj), value)
        self.holds(f"{record.source.name}.{name}", by_weak)

    def of_tensor(self, proxy: TensorProxy, name: str, value: Any) -> None:
        """An attribute that the program has given to a tensor, or has not, and what a step may switch."""
        real, source = proxy.real, proxy.source
        if is_kind(real, torch.Tensor) and source is not None and source.static and self.is_certain(value):
            now = functools.partial(attribute_of, name)
            self.holds(f"{source.name}.{name}", functools.partial(same_in_slot, now, weakref.ref(real), value))

    def function(self, function: types.FunctionType, key: Any, code: Any) -> None:
        if (record := self.static(function)) is not None and (id(function), "code") not in self.met:
            self.met.add((id(function), "code"))
            self.found.function(record.source.name, function)

    def switch(self, reader: Any, key: Any, value: Any) -> None:
        """(Autocast is another one in backward, and is known, ``Applied.casts``: what asks for it is a partial.)"""
        if not is_kind(reader, functools.partial):
            asked = functools.partial(as_tuple, reader) if type(value) is tuple else reader
            self.found.answers(f"torch's {reader.__name__}()", "unchanged", (asked, value))

    def answer(self, ask: Callable[[], Any], key: Any, value: Any) -> None:
        """Of a cached function, or of what chooses one: it is asked for it natively, as the call's guards do."""
        self.holds("a cached answer", functools.partial(same_in, ask, value))


def as_weak(obj: Any) -> Callable[[], Any]:
    """What gives the object, and does not keep it alive where that can be helped."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def is_still(held: Callable[[], Any], kind: type) -> bool:
    return (obj := held()) is None or type(obj) is kind


def same_in(ask: Callable[[], Any], then: Any) -> bool:
    """Whether it gives the same object, an equal constant or a tuple of such."""
    return is_same(ask(), then)


def is_same(now: Any, then: Any) -> bool:
    if now is then or type(now) is not type(then):
        return now is then
    if issubclass(type(now), tuple):
        return len(now) == len(then) and all(map(is_same, now, then))
    return type(now) in ATOMS and now == then


def same_in_slot(held: Callable[[Any], Any], obj: Callable[[], Any], then: Any) -> bool:
    owner = obj()
    return owner is None or same_in(functools.partial(held, owner), then)


def attribute_of(name: str, tensor: torch.Tensor) -> Any:
    if name in SWITCHED:
        return getattr(tensor, name)
    return (raw_dict(tensor) or {}).get(name, ABSENT)
