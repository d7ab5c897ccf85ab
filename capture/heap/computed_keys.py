"""Items at keys that are other numbers or texts in each call: ``self.buffer[step % 10]``, ``table.get(f"w{i}")``.

Such an item is found anew at each call, by the formula of its key: what the step has to know of it is guarded there, as
of an item at any other place. So which key it is need not be guarded.
"""

from __future__ import annotations

import collections
import operator
from typing import Any

from moebius.interpreter import is_kind

from ..guards.sources import Computed, Source, part
from ..hook import ABSENT
from ..values.formulas import AtSource, Computation, Formula, Unchanged, in_order, in_words
from ..values.numbers import Number
from .late_writes import Key, LateWrites, is_plain
from .records import DICTS, UNREAD, Record

SHORT = 64  # items of a slice at most, each of which is an input


def item_at(container: Source, key: Key) -> Computed:
    """The item of a container, or the slice of a list, at the key that a formula has at each call."""
    sources = tuple(dict.fromkeys((container, *key.sources)))
    item = Formula(operator.getitem, (AtSource(container), key.formula))
    found = Computation(in_order(Formula(found_at, item.operands)), sources)
    return Computed(in_words(in_order(item)), sources, found)


class ComputedKeys(LateWrites):
    """Part of ``Objects``."""

    def at_computed_key(self, record: Record, key: Any) -> Any:
        """What stands in a list or dict at a key that another call may have otherwise, ABSENT if nothing does; UNREAD
        where the key is plain, or has to be a constant for it."""
        kind = type(record.obj)
        if kind not in (list, collections.deque, *DICTS) or id(record) in self.owners:
            return UNREAD
        if (known := self.known_key(key)) is None:
            return UNREAD
        today = known.today
        if kind not in DICTS and type(today) not in (int, bool):  # (equals a place, and is none)
            return UNREAD
        self.tell_reader(record)
        for write in reversed(record.late or ()):
            if write.path or (not is_plain(write.key) and self.known_key(write.key) is None):
                return UNREAD
            if self.holds_today(operator.eq, key, write.key):
                return write.value
        if record.changed_at_plain_keys:
            return UNREAD
        if kind not in DICTS:
            present = -len(record.obj) <= today < len(record.obj)
            if not present or (record.late and today < 0):  # (late places are counted from the start)
                return UNREAD
        elif not dict.__contains__(record.obj, today):
            return self.absent_at(record, known)
        value = found_at(record.obj, today)
        self.heap.read("item", record.obj, None, value)
        self.hangs(record.obj, value)
        place = item_at(record.source, known)
        self.symbolic_places |= {place.name}
        return self.enter(value, place)

    def at_computed_slice(self, record: Record, key: slice) -> Any:
        """The items of a list between places of which one is another in each call, a few: each is found anew, and how
        many there are is guarded. UNREAD where that is not so."""
        found = self.numbers.found_again((key.start, key.stop, key.step))
        if found is None or type(record.obj) is not list or record.late or record.changed_at_plain_keys:
            return UNREAD
        known = Key(slice(*found[0]), found[1], Formula(slice, found[2]))
        if not all(part is None or type(part) in (int, bool) for part in found[0]) or known.today.step == 0:
            return UNREAD
        items = record.obj[known.today]
        if len(items) > SHORT:
            return UNREAD
        self.tell_reader(record)
        self.heap.read("item", record.obj, None, None)
        place = item_at(record.source, known)
        self.guards.check("type", place, list, text="type is list")
        self.guards.check("length", place, len(items), text=f"has {len(items)} items")
        for value in items:
            self.hangs(record.obj, value)
        places = [part(place, "list_item", number) for number in range(len(items))]
        self.symbolic_places |= {one.name for one in places}
        return self.made([self.enter(value, one) for value, one in zip(items, places, strict=True)])

    def tell_reader(self, record: Record) -> None:
        """Before a part is read: see ``told``."""
        if id(record.obj) in self.told:
            self.told[id(record.obj)]()
        self.refuse_recorder(record)

    def absent_at(self, record: Record, key: Key) -> Any:
        """ABSENT, under the guard that the dict has no such key."""
        self.heap.read("item", record.obj, None, ABSENT)
        sources = (*key.sources, record.source)
        guard = Unchanged(Formula(operator.contains, (AtSource(record.source), key.formula)), sources, False)
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
