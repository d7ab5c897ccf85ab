"""Writes of which the running step knows whether they are done: ``if step % 10 == 0: losses.append(loss.item())``.

Where a number of the call decides, both sides are in the graph, and a node notes that one was come to. What a side
writes to objects from before the call is written down here, and replayed in its order if the side was noted. What
stands there from then on nobody knows while tracing: where it is read, the call is traced again, for each way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from moebius.interpreter import is_kind

from ..guards.sources import part_name
from ..hook import ABSENT
from ..values.numbers import NUMBERS, Number
from ..values.values import SYMBOLIC, Break, RuntimeNumber, SymbolicObject, TensorProxy
from .places import entry_of
from .records import HEAP_TYPE, UNREAD, Record, raw_dict, whole_items
from .varying import VaryingPlaces

UNSHARED = 3  # references to a shadow that nothing else holds: the record's, the registry's, and the question's
PLAIN_CONTAINERS = (list, dict, tuple)
JOINED = (torch.Tensor, TensorProxy, RuntimeNumber, SymbolicObject)
APPENDED = object()  # in the place of a key: of what goes to the end


@dataclass(eq=False)
class Side:
    """One side of a branch on a number of the call. number: by which it is noted. since: the heap's mark where it
    began. outer: those that it stands in, innermost first. values: of its graph, which are noted with it. is_over:
    whether it is in the graph with all that it stands in."""

    number: int
    since: int
    outer: tuple[Side, ...]
    refuse: Callable[[], None]
    values: list[Any] = field(default_factory=list)
    is_over: bool = False


@dataclass(eq=False)
class Write:
    """Of an item, or of what is appended. path: the sides on which it is done, innermost first; empty for whichever way
    the step goes."""

    key: Any
    value: Any
    path: tuple[Side, ...] = ()

    def parts(self) -> tuple[Any, ...]:
        return (self.value,) if self.key is APPENDED else (self.key, self.value)


class Notes(Number):
    """The dict in which the graph notes the sides that it has come to."""

    __slots__ = ()


class ConditionalWrites(VaryingPlaces):
    """Part of ``Objects``. side: gives the one that the trace is in, or None where a write cannot wait for it."""

    side: Callable[[Record, Any], Side | None]
    open_sides: Callable[[], set[Side]]  # those that the trace is on

    def side_of(self, obj: Any, key: Any = APPENDED) -> Side | None:
        """On which side of a branch an object from before is written to, if such a write can wait."""
        record = self.records.get(id(obj)) if self.inside else None
        return None if record is None or self.inside[-1][0].lenient else self.side(record, key)

    def place_in_branch(self, record: Record, key: Any) -> Any:
        """What a branch sets in a dict: a place whose value is joined, or its side, which reads nothing there."""
        held = record.writes.get(key, dict.get(record.obj, key, ABSENT)) if type(key) is str else ABSENT
        joined = type(held) in (*NUMBERS, *SYMBOLIC) or is_kind(held, JOINED)
        side = self.side_of(record.obj, key)
        if side is not None and type(held) in (int, float):  # which is another one in each call
            self.symbolic_places |= {part_name(record.source, "dict_item", key)}
        return (None if joined else side) or entry_of(self, record, key) or side

    def write_late(self, record: Record, key: Any, value: Any, side: Side | None = None) -> None:
        """What the running step sets at a place that it alone knows, or on a side that it may not come to."""
        self.refuse_held(record)
        self.write_on(side, record, key, value)

    def write_on(self, side: Side | None, record: Record, key: Any, value: Any) -> None:
        write = Write(key, value, () if side is None else (side, *side.outer))
        record.late = [*(record.late or ()), write]
        if side is not None:
            self.conditional.append((record, write))

    def written_on(self, side: Side) -> list[tuple[Record, Write]]:
        return [(record, write) for record, write in self.conditional if side in write.path]

    def drop_written(self, side: Side) -> None:
        """What was written on a side is not: it is recorded once more."""
        for pair in self.written_on(side):
            self.conditional.remove(pair)
            record, write = pair
            record.late = [one for one in record.late or () if one is not write] or None

    def parts_in(self, values: Iterable[Any]) -> list[Any]:
        """The values, and all that is in those lists, dicts, tuples and objects among them that the trace has made."""
        waiting, met = list(values), {}
        while waiting:
            value = waiting.pop()
            if id(value) not in met:
                met[id(value)] = value
                waiting += self.items_of(value)
        return list(met.values())

    def items_of(self, value: Any) -> tuple[Any, ...]:
        if id(value) in self.tuples or id(value) in self.records or not self.is_made_of_items(value):
            return ()
        return whole_items(value if type(value) in PLAIN_CONTAINERS else raw_dict(value))

    def is_made_of_items(self, value: Any) -> bool:
        """Whether an object is known by the items in it, or by those in its ``__dict__``."""
        kind = type(value)
        if kind in PLAIN_CONTAINERS or not self.is_new(value) or issubclass(kind, type):
            return kind in PLAIN_CONTAINERS
        in_python = all(base is object or base.__flags__ & HEAP_TYPE for base in kind.__mro__)
        slots = any("__slots__" in vars(base) for base in kind.__mro__)
        return in_python and not slots and raw_dict(value) is not None

    def adds(self, record: Record, items: list[Any], side: Side | None) -> bool:
        """``append`` and ``extend`` where nobody has to know what stands before the items."""
        if side is not None or record.late and any(one.key is APPENDED for one in record.late):
            for item in items:
                self.write_late(record, APPENDED, item, side)
        elif record.shadow is None:
            record.appends = [*(record.appends or ()), *items]
        else:
            return False
        return True

    def added(self, record: Record) -> list[Any] | None:
        """See ``VaryingPlaces``."""
        path, late = self.open_sides(), record.late or ()
        if any(one.key is not APPENDED or not path.issuperset(one.path) for one in late):
            return None
        return [*(record.appends or ()), *(one.value for one in late)]

    def refuse_held(self, record: Record) -> None:
        """A graph break where a view or an iterator may be asked for what is written late."""
        if record.shadow is not None and sys.getrefcount(record.shadow) > UNSHARED:
            raise Break(
                "container written at a number while it is iterated over",
                f"the step holds a view or an iterator of {record.source.name}",
                "make a list of it, or write after the last use of the view",
            )

    def is_apart(self, record: Record, key: Any) -> bool:
        """Whether an entry is another one than those that are written late."""
        return type(key) is str and all(type(one.key) is str and one.key != key for one in record.late or ())

    def refuse_conditional(self, record: Record, key: Any = UNREAD) -> None:
        """A graph break where one of them has written what is read: the branches are taken for each way then."""
        if sides := [side for one in record.late or () for side in one.path]:
            for side in sides:
                side.refuse()
            where = record.source.name if key is UNREAD or is_kind(key, Number) else f"{record.source.name}[{key!r}]"
            refuse_place(where)


def refuse_place(place: str) -> NoReturn:
    raise Break("data-dependent branch", f"what {place} is afterwards depends on a condition on values",
                "use torch.where, or move the branch out of the captured step")  # fmt: skip
