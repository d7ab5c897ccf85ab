"""Places of the heap that a branch on values may set: read, set, and put back as they were."""

from __future__ import annotations

from typing import Any

from ..hook import ABSENT
from .records import Record
from .store import Store


class Item:
    """Of a list or dict that the trace made, or of what stands for a list from before the call; it has it already."""

    def __init__(self, objects: Store, owner: Any, where: Any):
        self.objects, self.owner, self.where = objects, owner, where
        self.key = id(owner), where

    def get(self) -> Any:
        return self.owner[self.where]

    def put(self, value: Any) -> None:
        self.objects.touch(self.owner, place=self)
        self.owner[self.where] = value

    def put_back(self, before: Any) -> None:
        self.owner[self.where] = before

    def text(self) -> str:
        return f"item {self.where!r} of a {type(self.owner).__name__}"


class Entry:
    """Of a dict that existed before the call: an attribute of an object."""

    def __init__(self, objects: Store, record: Record, where: str):
        self.objects, self.record, self.where = objects, record, where
        self.key, self.writes = (id(record.obj), where), record.writes
        self.written = self.writes.get(where, self)

    def get(self) -> Any:
        return self.objects.dict_get(self.record, self.where)

    def put(self, value: Any) -> None:
        self.objects.dict_set(self.record, self.where, value)

    def put_back(self, before: Any) -> None:
        if self.written is self:
            self.writes.pop(self.where, None)
        else:
            self.writes[self.where] = self.written

    def text(self) -> str:
        source = self.record.source
        return f"{source.name}: {self.where}"


HeapPlace = Item | Entry  # key: by which two of them are one


def item_of(objects: Store, owner: Any, where: Any) -> Item | None:
    """The item, where the branch's region can join it."""
    if not objects.inside or type(where) not in (int, str):
        return None
    if not objects.is_new(owner):
        record = objects.records.get(id(owner))
        if objects.inside[-1][0].lenient or type(owner) is not list or record is None or record.late:
            return None
        owner = objects.contents(owner)
    if type(owner) is list and type(where) is int and -len(owner) <= where < len(owner):
        return Item(objects, owner, where % len(owner))
    return Item(objects, owner, where) if type(owner) is dict and where in owner else None


def entry_of(objects: Any, record: Record, where: Any) -> Entry | None:
    """The same for an attribute."""
    if not objects.inside or objects.inside[-1][0].lenient or record.shadow is not None:
        return None
    known = type(where) is str and objects.is_apart(record, where) and objects.dict_get(record, where) is not ABSENT
    return Entry(objects, record, where) if known else None
