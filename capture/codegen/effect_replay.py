"""The effects of a trace, written into the residual function: what the frame did to objects that existed before."""

from __future__ import annotations

import contextvars
import types
from typing import Any

from moebius.interpreter import is_kind

from ..guards.program import look_up
from ..heap.conditional_writes import APPENDED
from ..heap.conditional_writes import Write as LateWrite
from ..heap.records import CONTAINERS, DICTS, UNREAD, Record, derived_from
from ..hook import ABSENT
from ..python.attributes import SET_ON_CLASS
from ..values.residual_program import Attribute, Call, Expression, If, Item, Literal, Statement, Write, method, tuple_of
from ..values.values import ATOMS, CannotRebuild
from .interfaces import Builder


class EffectReplay:
    """Writes into an emitter's function. Objects are written to by their base class's methods, so that no code of the
    user's runs once more."""

    def __init__(self, emitter: Builder):
        self.emitter, self.objects, self.lines = emitter, emitter.objects, emitter.lines
        self.heap, self.output_names = emitter.heap, emitter.output_names
        self.value, self.constant = emitter.value, emitter.constant
        self.noted: dict[Any, Expression] = {}  # by side of a branch: what holds what was noted of it

    def effects(self) -> None:
        """Replay what tracing changed."""
        plan = [(record, self.emitter.load(record.source)) for record in self.objects.changed_records()]
        for begin in self.objects.before_effects:
            begin(self.emitter)
        for record, name in plan:
            self.replay(record, name)
        for leave in self.objects.after_effects:
            leave(self.emitter)

    def replay(self, record: Record, name: Expression) -> None:
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

    def write_part(self, owner: Any, name: Expression, key: Any, item: Any) -> Statement:
        """Sets what is no entry of a container: an attribute of a class, a cell, a slot."""
        if issubclass(type(owner), type):
            return Call(self.constant(SET_ON_CLASS), (self.constant(owner), Literal(key), self.value(item)))
        if type(owner) is types.CellType:
            return Write(Attribute(name, "cell_contents"), None if item is ABSENT else self.value(item))
        return method(self.constant(look_up(type(owner), key)), "__set__", name, self.value(item))

    def set_variable(self, variable: contextvars.ContextVar, value: Any) -> None:
        if value is ABSENT:
            raise CannotRebuild(f"context variable {variable.name} is unset again")
        self.emitter.set_variable(variable, value)

    def replay_known(self, record: Record, name: Expression, base: str) -> None:
        """What was done to a container under keys and at places that tracing knows."""
        kind = type(record.obj)
        if record.shadow is None:
            for key, item in record.writes.items():
                if key in record.moved and item is not ABSENT:
                    self.write_item(base, name, key, ABSENT)
                self.write_item(base, name, key, item)
            if record.appends:
                appended = tuple_of(map(self.value, record.appends))
                own = kind in CONTAINERS  # (a derived class may have an ``extend`` of its own, which did not run)
                self.lines.append(method(name, "extend", appended) if own else method(base, "extend", name, appended))
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
            entries = [(self.value(k), self.value(v)) for k, v in shadow.items()]
            self.lines.append(method(base, "clear", name))
            self.lines.extend(method(base, "__setitem__", name, k, v) for k, v in entries)
            return
        if kind is set:
            self.replay_set(record, name)
            return
        items = tuple_of(map(self.value, shadow))
        if kind is list:
            self.lines.append(Write(Item(name, ":"), items))
        else:
            held = self.emitter.fresh() + "c"
            self.lines += [Write(held, items), method(name, "clear"), method(name, "extend", held)]

    def replay_set(self, record: Record, name: Expression) -> None:
        """The same operations again: the order of a set's items depends on what was there before, and on when."""
        for operation, argument in record.operations:
            args: tuple[Expression, ...]
            if argument is ABSENT:
                args = ()
            elif operation in ("add", "discard", "remove"):
                args = (self.value(argument),)
            elif is_kind(argument, set | frozenset) and is_ordered(argument):
                args = (self.constant(argument),)
            else:
                args = (tuple_of(map(self.value, argument)),)
            self.lines.append(method(name, operation, *args))

    def write_late(self, base: str, name: Expression, write: LateWrite) -> None:
        if write.key is APPENDED:
            self.lines.append(method(base, "append", name, self.value(write.value)))
        else:
            self.write_item(base, name, write.key, write.value)

    def write_if_noted(self, base: str, name: Expression, write: LateWrite) -> None:
        """A write on one side of a branch. What the side has made is made there."""
        objects, lines = self.objects, self.lines
        for part in objects.parts_in([write.value]):
            if objects.is_new(part) and self.heap.age(part) < write.path[-1].since:
                self.value(part)
        for side in write.path:
            if side not in self.noted:
                self.noted[side] = noted = f"m_side{side.number}"
                lines.append(Write(noted, method(self.value(objects.notes), "get", Literal(side.number))))
                for place, value in enumerate(side.values):
                    self.output_names[id(value)] = Item(noted, place)
        begun = len(lines)
        self.write_late(base, name, write)
        lines[begun:] = [If(self.noted[write.path[0]], tuple(lines[begun:]))]

    def write_item(self, base: str, name: Expression, key: Any, item: Any) -> None:
        if item is ABSENT:
            self.lines.append(method(base, "pop", name, self.value(key), Literal(None)))
        else:
            self.lines.append(method(base, "__setitem__", name, self.value(key), self.value(item)))


def is_ordered(items: set | frozenset) -> bool:
    """Whether the order of a set's items depends on them alone and on what was done: no item hashes by its address."""
    return all(type(v) in ATOMS for v in items)
