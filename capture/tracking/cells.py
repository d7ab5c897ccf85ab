"""Closure cells and context variables that existed before the call: what they hold, and what is put into them."""

from __future__ import annotations

import contextvars
import types
from typing import TYPE_CHECKING, Any

import torch

from ..hook import ABSENT
from ..sources import Part, Source, Static, part
from .lifetimes import named
from .records import Record, contents_of
from .values import ATOMS

if TYPE_CHECKING:
    from ..guards.recorder import GuardRecorder


class Cells:
    """Part of ``Objects``."""

    guards: GuardRecorder
    records: dict[int, Record]
    new: dict[int, Any]
    born: dict[int, int]
    log: list[tuple[Any, ...]] | None
    cells_read: list[tuple[types.CellType, Any]] | None
    volatile: frozenset[str]
    cells: dict[int, Record]
    context: dict[contextvars.ContextVar, tuple[Any, Any]]

    def enter(self, value: Any, source: Source) -> Any:
        raise NotImplementedError

    def touch(self, obj: Any) -> None:
        raise NotImplementedError

    def note(self, what: str) -> None:
        raise NotImplementedError

    def cell_get(self, cell: types.CellType, name: str) -> Any:
        """Contents of a cell, ABSENT if it is empty."""
        if id(cell) in self.new:
            if self.log is not None and type(contents_of(cell)) not in ATOMS:
                self.log.append(("changed", self.born.get(id(cell), -1)))  # an older one is not to be read in a block
            if self.cells_read is not None:
                self.cells_read.append((cell, contents_of(cell)))
            return contents_of(cell)
        record = self.cells.get(id(cell))
        if record is None:
            record = self.cells[id(cell)] = Record(
                cell, self.records[id(cell)].source if id(cell) in self.records else Static(f"closure {name}", cell)
            )
        if "value" not in record.writes and "value" not in record.reads:
            record.reads["value"] = self.read_cell(record, cell)
        value = record.writes["value"] if "value" in record.writes else record.reads["value"]
        if self.log is not None:
            self.log.append(("cell", record, value))
        return value

    def read_cell(self, record: Record, cell: types.CellType) -> Any:
        value = contents_of(cell)
        place = part(record.source, "cell")
        if value is ABSENT:
            self.guards.holds(place.name, "is unset", lambda c: contents_of(c) is ABSENT, record.source)
            return ABSENT
        by_its_way = isinstance(value, torch.Tensor) or place.name in self.volatile or named(value)
        if record.source.static and not by_its_way:
            kind = "equal" if type(value) in ATOMS else "is"
            self.guards.check(kind, place, value, text="unchanged")
            return self.enter(value, Static(record.source.name.removeprefix("closure "), value))
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
        self.cells[id(cell)].writes["value"] = value

    def context_get(self, variable: contextvars.ContextVar) -> Any:
        """Current value of a context variable, ABSENT if it has none."""
        self.note("context")
        if variable not in self.context:
            entered = self.read_context(variable)
            self.context[variable] = (entered, entered)
        return self.context[variable][1]

    def read_context(self, variable: contextvars.ContextVar) -> Any:
        value, name = variable.get(ABSENT), f"ContextVar({variable.name!r})"
        source = Static(name, variable)
        if value is ABSENT:
            self.guards.holds(name, "is unset", lambda v: v.get(ABSENT) is ABSENT, source)
            return ABSENT
        place = Part(name, source, "python", value_of)
        if issubclass(type(value), torch.Tensor) or name in self.volatile or named(value):
            return self.enter(value, place)
        self.guards.check("equal" if type(value) in ATOMS else "is", place, value, text="unchanged")
        return self.enter(value, Static(name, value))

    def context_set(self, variable: contextvars.ContextVar, value: Any) -> Any:
        """Set it; returns the value before, for the token."""
        before = self.context_get(variable)
        self.touch(variable)
        self.context[variable] = (self.context[variable][0], value)
        return before

    def changed_cells(self) -> list[Record]:
        return [r for r in self.cells.values() if "value" in r.writes]

    def changed_context(self) -> list[tuple[contextvars.ContextVar, Any]]:
        return [(v, now) for v, (before, now) in self.context.items() if now is not before]


def value_of(variable: contextvars.ContextVar) -> Any:
    return variable.get(ABSENT)
