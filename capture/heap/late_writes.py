"""Writes at a key or place that only the running step knows: ``log[self.step] = loss``, ``ring[step % 100] = loss``.

They are replayed in their order, after what was written at keys and places that tracing knows. Nobody can say any more
what stands where, so a read of that dict or list later in the step is a graph break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.sources import Source
from ..hook import ABSENT
from ..values.numbers import NUMBERS
from ..values.values import Break, RuntimeNumber
from .conditional_writes import ConditionalWrites
from .records import DICTS, UNREAD, Record

PLAIN = (*NUMBERS, str, type(None))


@dataclass
class Key:
    """A key that another call may have otherwise: what it is today, where it comes from, how it is computed there."""

    today: Any
    sources: tuple[Source, ...]
    formula: Any


def is_plain(key: Any) -> bool:
    """Whether a key is a number, a text, or a tuple of such, which are told apart by their values."""
    return all(map(is_plain, key)) if type(key) is tuple else type(key) in PLAIN


class LateWrites(ConditionalWrites):
    """Part of ``Objects``."""

    numbers: Any  # see ``ComputedKeys``

    def known_key(self, key: Any) -> Key | None:
        """A number or text that is another in each call, or a tuple with some, whose value of today is known; None for
        any other."""
        if type(key) in PLAIN:
            return None
        found = self.numbers.found_again(key)
        return None if found is None or not is_plain(found[0]) else Key(*found)

    def writes_late(self, record: Record, key: Any) -> bool:
        """Whether ``record[key] = …`` of a dict waits for the running step. (Attributes and globals have names.)"""
        if record.late and not (self.is_apart(record, key) and self.stands(record, key)):
            return True
        if type(record.obj) not in DICTS or id(record) in self.owners:
            return False
        unknown = type(key) is torch.SymInt or (is_kind(key, RuntimeNumber) and key.kind is str)
        return unknown or self.known_key(key) is not None

    def stands(self, record: Record, key: str) -> bool:
        """Whether a dict has the key before what is written late: it keeps its place in the order."""
        if record.shadow is not None:
            return key in record.shadow
        return record.writes.get(key, dict.get(record.obj, key, ABSENT)) is not ABSENT

    def place_is_open(self, record: Record, key: Any) -> bool:
        """Whether only the running step knows which place of a list ``record[key]`` is."""
        if type(record.obj) is not list:
            return False
        number = is_kind(key, RuntimeNumber) and key.kind is int and key.known
        unknown = type(key) is torch.SymInt or number
        return unknown or (bool(record.late) and type(key) is int)

    def open_length(self, record: Record) -> int:
        """The length of a list that is written to at open places; guarded, where its items are not."""
        self.refuse_recorder(record)
        self.refuse_conditional(record)
        if record.shadow is not None:
            return len(record.shadow)
        self.refuse_growing(record)
        self.guards.check("length", record.source, len(record.obj), text=f"has {len(record.obj)} items")
        return len(record.obj) + len(record.appends or ())

    def length_alone(self, value: Any) -> int | None:
        """``len(value)`` of a list whose items differ from call to call, which are not guarded for it; else None."""
        record = self.records.get(id(value))
        if record is None or record.obj is not value or record.shadow is not None or type(value) is not list:
            return None
        if not record.late and record.source.name not in self.symbolic_places:
            return None
        self.heap.read("length", value, None, None)
        return self.open_length(record)

    def refuse_late(self, record: Record, key: Any = UNREAD) -> None:
        """A graph break if nobody knows where the dict or list holds an entry, or what a node has written into it.

        key: of the entry that is read, UNREAD for the whole.
        """
        if id(record.obj) in self.told:
            self.told[id(record.obj)]()
        if id(record) in self.drawn and (key is UNREAD or key in record.obj) and key != "disable":
            detail = f"{record.source.name} is read or changed after the step drew it"
            raise Break("progress bar", detail, "read it before the step, or after it")
        if record.late and not self.is_apart(record, key):
            self.refuse_conditional(record, key)
            key = record.late[0].key
            name = "a text that the graph makes" if getattr(key, "kind", int) is str else "a number that varies"
            raise Break(
                f"{type(record.obj).__name__} read after a write at a number",
                f"{record.source.name} is read after the step wrote an entry at {name}",
                "read it before that write, or after the step",
            )
