"""Items at keys that are other numbers or texts in each call: ``self.buffer[step % 10]``, ``table.get(f"w{i}")``.

Such an item is found anew at each call, by the formula of its key: what the step has to know of it is guarded there, as
of an item at any other place. So which key it is need not be guarded.
"""

from __future__ import annotations

import collections
import operator
from typing import Any, Protocol

from moebius.interpreter import is_kind

from ..guards.sources import Computed, Source
from ..hook import ABSENT
from ..values.formulas import AtSource, Formula, Unchanged, computed, in_order, in_words
from ..values.numbers import NUMBERS, Number
from .late_writes import LateWrites
from .records import DICTS, UNREAD, Record

KEYS = (*NUMBERS, str)


class KnownNumbers(Protocol):
    """What is asked of the trace's numbers (``tensors.numbers.Numbers``)."""

    def known(self, value: Any) -> Number | None: ...

    def look_up(self, function: Any, *operands: Any) -> Any: ...

    def constant(self, number: Number) -> Any: ...


class ItemAt:
    """Gives the item of a container at the key that a formula has for what is found at ``sources``."""

    def __init__(self, container: Source, number: Number):
        assert number.evaluate is not None
        self.sources = tuple(dict.fromkeys((container, *(number.sources or ()))))
        self.order = in_order(Formula(operator.getitem, (AtSource(container), number.evaluate)))
        self.name = in_words(self.order)
        self.order[-1] = Formula(found_at, self.order[-1].operands)  # type: ignore[union-attr]

    def __call__(self, *found: Any) -> Any:
        return computed(self.order, dict(zip(self.sources, found, strict=True)))


class ComputedKeys(LateWrites):
    """Part of ``Objects``."""

    numbers: KnownNumbers

    def at_computed_key(self, record: Record, key: Any) -> Any:
        """What stands in a list or dict at a key that another call may have otherwise, ABSENT if nothing does; UNREAD
        where the key is plain, or has to be a constant for it."""
        kind = type(record.obj)
        if kind not in (list, collections.deque, *DICTS) or id(record) in self.owners:
            return UNREAD
        number = self.known_key(key)
        if number is None:
            return UNREAD
        if id(record.obj) in self.told:
            self.told[id(record.obj)]()
        self.refuse_recorder(record)
        for place, value in reversed(record.late or ()):
            if type(place) not in KEYS and self.known_key(place) is None:
                return UNREAD
            if self.holds_today(operator.eq, number, place):
                return value
        if record.changed_at_plain_keys:
            return UNREAD
        today = number.representative
        if kind not in DICTS:
            if kind is list and record.late and today < 0:
                return UNREAD  # (where a place is counted from is not among what the places are compared by)
            present = type(today) in (int, bool) and -len(record.obj) <= today < len(record.obj)
        elif not (present := dict.__contains__(record.obj, today)):
            return self.absent_at(record, number)
        if not present:
            return UNREAD  # (an error of Python's)
        item = ItemAt(record.source, number)
        value = found_at(record.obj, today)
        self.heap.read("item", record.obj, None, value)
        self.symbolic_places |= {item.name}
        return self.enter(value, Computed(item.name, item.sources, item))

    def known_key(self, key: Any) -> Number | None:
        """The key as a number or text whose value of today is known, None for any other."""
        number = key if is_kind(key, Number) and key.known else self.numbers.known(key)
        return number if number is not None and number.kind in KEYS else None

    def absent_at(self, record: Record, number: Number) -> Any:
        """ABSENT, under the guard that the dict has no such key."""
        self.heap.read("item", record.obj, None, ABSENT)
        sources = (*(number.sources or ()), record.source)
        found = Formula(operator.contains, (AtSource(record.source), number.evaluate))
        guard = Unchanged(found, sources, False)
        self.guards.holds(record.source.name, str(guard), guard, *sources)
        return ABSENT

    def holds_today(self, question: Any, *operands: Any) -> bool:
        """What a question of known numbers and plain values is answered, under a guard."""
        found = self.numbers.look_up(question, *operands)
        return self.numbers.constant(found) if is_kind(found, Number) else found


def found_at(container: Any, key: Any) -> Any:
    """The item of a list, deque or dict; a default is not made for it. Raises LookupError where there is none."""
    if is_kind(container, dict):
        found = dict.get(container, key, ABSENT)
        if found is ABSENT:
            raise KeyError(key)
        return found
    return type(container).__getitem__(container, key)
