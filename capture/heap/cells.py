"""Closure cells and context variables that existed before the call: what they hold, and what is put into them.

Their ``Record`` has one entry, at the key None."""

from __future__ import annotations

import contextvars
import types
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.sources import Part, Static, part
from ..hook import ABSENT
from ..values.values import ATOMS
from .lifetimes import named
from .records import Record, contents_of
from .store import Store


class Cells(Store):
    """Part of ``Objects``."""

    def cell_get(self, cell: types.CellType, name: str) -> Any:
        """Contents of a cell, ABSENT if it is empty."""
        if id(cell) not in self.new:
            self.found(cell, f"closure {name}")
        value = self.cell_now(cell)
        self.heap.read("cell", cell, None, value)
        return value

    def cell_now(self, cell: types.CellType, key: Any = None, then: Any = None) -> Any:
        """What a cell that was read holds by now."""
        return contents_of(cell) if id(cell) in self.new else self.entry_now(self.records[id(cell)], None)

    def seen_in_cell(self, cell: types.CellType) -> Any:
        """What a cell holds by now, for somebody who looks on: it is no read, and nothing of the trace if there was
        none."""
        record = self.record_of(cell)
        entered = {} if record is None else {**record.reads, **record.writes}
        return entered.get(None, contents_of(cell))

    def read_cell(self, record: Record) -> Any:
        value = contents_of(record.obj)
        name = record.source.name
        place = part(record.source, "cell") if not name.startswith("cell ") else of_cell(record, "cell ")
        if value is ABSENT:
            self.guards.holds(place.name, "is unset", lambda c: contents_of(c) is ABSENT, record.source)
            return ABSENT
        by_its_way = is_kind(value, torch.Tensor) or place.name in self.symbolic_places or named(value)
        if record.source.static and not by_its_way:
            kind = "equal" if type(value) in ATOMS else "is"
            self.guards.check(kind, place, value, text="unchanged")
            return self.enter(value, Static(name.removeprefix("closure "), value))
        if not by_its_way and name.startswith("closure ") and type(value) not in ATOMS:
            place = of_cell(record, "closure ")
        return self.enter(value, place)

    def cell_set(self, cell: types.CellType, name: str, value: Any) -> None:
        self.touch(cell)
        if id(cell) in self.new:
            if value is ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = value
            return
        self.cell_get(cell, name)
        self.records[id(cell)].writes[None] = value

    def context_get(self, variable: contextvars.ContextVar) -> Any:
        """Current value of a context variable, ABSENT if it has none."""
        value = self.entry_now(self.found(variable, f"ContextVar({variable.name!r})"), None)
        self.heap.read("context", variable, None, value)
        return value

    def read_context(self, variable: contextvars.ContextVar) -> Any:
        value, name = variable.get(ABSENT), f"ContextVar({variable.name!r})"
        source = Static(name, variable)
        if value is ABSENT:
            self.guards.holds(name, "is unset", lambda v: v.get(ABSENT) is ABSENT, source)
            return ABSENT
        place = Part(name, source, "python", value_of)
        if issubclass(type(value), torch.Tensor) or name in self.symbolic_places or named(value):
            return self.enter(value, place)
        self.guards.check("equal" if type(value) in ATOMS else "is", place, value, text="unchanged")
        return self.enter(value, Static(name, value))

    def context_set(self, variable: contextvars.ContextVar, value: Any) -> Any:
        """Set it; returns the value before, for the token."""
        before = self.context_get(variable)
        self.touch(variable)
        self.records[id(variable)].writes[None] = value
        return before


def value_of(variable: contextvars.ContextVar) -> Any:
    return variable.get(ABSENT)


def of_cell(record: Record, prefix: str) -> Part:
    """Where the contents of a cell are that the step takes as an argument: called as in the frame that has the cell."""
    return Part(record.source.name.removeprefix(prefix), record.source, "cell")
