"""The effects of a trace, written into the residual function: what the frame did to objects that existed before."""

from __future__ import annotations

import contextvars
import types
from typing import Any

from moebius.interpreter import is_kind

from ..guards.program import look_up
from ..heap.conditional_writes import APPENDED, Write
from ..heap.records import CONTAINERS, DICTS, UNREAD, Record, derived_from
from ..hook import ABSENT
from ..python.attributes import SET_ON_CLASS
from ..values.values import ATOMS, CannotRebuild
from .interfaces import Builder


class EffectReplay:
    """Writes into an emitter's function. Objects are written to by their base class's methods, so that no code of the
    user's runs once more."""

    def __init__(self, emitter: Builder):
        self.emitter, self.objects, self.lines = emitter, emitter.objects, emitter.lines
        self.heap, self.output_names = emitter.heap, emitter.output_names
        self.value, self.constant = emitter.value, emitter.constant
        self.noted: dict[Any, str] = {}  # by side of a branch: what holds what was noted of it

    def effects(self) -> None:
        """Replay what tracing changed."""
        plan = [(record, self.emitter.load(record.source)) for record in self.objects.changed_records()]
        for begin in self.objects.before_effects:
            begin(self.emitter)
        for record, name in plan:
            self.replay(record, name)
        for leave in self.objects.after_effects:
            leave(self.emitter)

    def replay(self, record: Record, name: str) -> None:
        kind = type(record.obj)
        cls = self.objects.class_of(record)
        if cls is not None or not issubclass(kind, tuple(CONTAINERS)):
            for key, item in record.writes.items():
                if record.reads.get(key, UNREAD) is item:
                    continue
                if type(record.obj) is contextvars.ContextVar:
                    self.set_variable(record.obj, item)
                else:
                    self.lines.append(self.write_part(record.obj if cls is None else cls, name, key, item))
            return
        base = self.constant(derived_from(kind, CONTAINERS) or kind)
        self.replay_known(record, name, base)
        for write in record.late or ():
            if not write.path:
                self.write_late(base, name, write)
            elif write.path[-1].is_over:
                self.write_if_noted(base, name, write)

    def write_part(self, owner: Any, name: str, key: Any, item: Any) -> str:
        """Sets what is no entry of a container: an attribute of a class, a cell, a slot."""
        if issubclass(type(owner), type):
            return f"{self.constant(SET_ON_CLASS)}({self.constant(owner)}, {key!r}, {self.value(item)})"
        if type(owner) is types.CellType:
            return f"del {name}.cell_contents" if item is ABSENT else f"{name}.cell_contents = {self.value(item)}"
        return f"{self.constant(look_up(type(owner), key))}.__set__({name}, {self.value(item)})"

    def set_variable(self, variable: contextvars.ContextVar, value: Any) -> None:
        if value is ABSENT:
            raise CannotRebuild(f"context variable {variable.name} is unset again")
        self.emitter.set_variable(variable, value)

    def replay_known(self, record: Record, name: str, base: str) -> None:
        """What was done to a container under keys and at places that tracing knows."""
        kind = type(record.obj)
        if record.shadow is None:
            for key, item in record.writes.items():
                if key in record.moved and item is not ABSENT:
                    self.write_item(base, name, key, ABSENT)
                self.write_item(base, name, key, item)
            if record.appends:
                appended = ", ".join(self.value(v) for v in record.appends)
                own = kind in CONTAINERS  # (a derived class may have an ``extend`` of its own, which did not run)
                self.lines.append(f"{name}.extend(({appended},))" if own else f"{base}.extend({name}, ({appended},))")
            return
        shadow, original = record.shadow, record.original
        if kind in DICTS:
            kept = [k for k in original if k in shadow]
            if list(shadow)[: len(kept)] == kept:
                for key in original:
                    if key not in shadow:
                        self.write_item(base, name, key, ABSENT)
                for key, item in shadow.items():
                    if key not in original or original[key] is not item:
                        self.write_item(base, name, key, item)
                return
            items = [(self.value(k), self.value(v)) for k, v in shadow.items()]
            self.lines.append(f"{base}.clear({name})")
            self.lines.extend(f"{base}.__setitem__({name}, {k}, {v})" for k, v in items)
            return
        if kind is set:
            self.replay_set(record, name)
            return
        text = f"({', '.join(self.value(v) for v in shadow)}{',' if shadow else ''})"
        if kind is list:
            self.lines.append(f"{name}[:] = {text}")
        else:
            held = self.emitter.fresh() + "c"
            self.lines.append(f"{held} = {text}")
            self.lines.append(f"{name}.clear()")
            self.lines.append(f"{name}.extend({held})")

    def replay_set(self, record: Record, name: str) -> None:
        """The same operations again: the order of a set's items depends on what was there before, and on when."""
        for method, argument in record.operations:
            if argument is ABSENT:
                text = ""
            elif method in ("add", "discard", "remove"):
                text = self.value(argument)
            elif is_kind(argument, set | frozenset) and is_ordered(argument):
                text = self.constant(argument)
            else:
                text = f"({''.join(f'{self.value(v)}, ' for v in argument)})"
            self.lines.append(f"{name}.{method}({text})")

    def write_late(self, base: str, name: str, write: Write) -> None:
        if write.key is APPENDED:
            self.lines.append(f"{base}.append({name}, {self.value(write.value)})")
        else:
            self.write_item(base, name, write.key, write.value)

    def write_if_noted(self, base: str, name: str, write: Write) -> None:
        """A write on one side of a branch. What the side has made is made there."""
        objects, lines = self.objects, self.lines
        for part in objects.parts_in([write.value]):
            if objects.is_new(part) and self.heap.age(part) < write.path[-1].since:
                self.value(part)
        for side in write.path:
            if side not in self.noted:
                self.noted[side] = noted = f"m_side{side.number}"
                lines.append(f"{noted} = {self.value(objects.notes)}.get({side.number})")
                for place, value in enumerate(side.values):
                    self.output_names[id(value)] = f"{noted}[{place}]"
        begun = len(lines)
        self.write_late(base, name, write)
        lines[begun:] = [f"if {self.noted[write.path[0]]} is not None:", *(f"    {line}" for line in lines[begun:])]

    def write_item(self, base: str, name: str, key: Any, item: Any) -> None:
        if item is ABSENT:
            self.lines.append(f"{base}.pop({name}, {self.value(key)}, None)")
        else:
            self.lines.append(f"{base}.__setitem__({name}, {self.value(key)}, {self.value(item)})")


def is_ordered(items: set | frozenset) -> bool:
    """Whether the order of a set's items depends on them alone and on what was done: no item hashes by its address."""
    return all(type(v) in ATOMS for v in items)
