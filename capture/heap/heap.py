"""What a trace reads and writes of all that lives longer than one instruction, in one order.

Every read and every write of state goes through here. So whoever asks whether state is as it was, or what a call
depends on, asks one place: a layer that is written again for another one (``module_reuse``), a call that backward runs
once more (``recompute``), a cached function that would look past what the step has changed (``calls``).

A read is an event ``(kind, owner, key, value)``. A kind in ``now`` has a function that finds what a read of it would
find now; any other counts as changed when its owner is written to. The owner ANYTHING stands for what cannot be said:
it changes with each write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from ..guards.recorder import same_constant

Event = tuple[str, Any, Any, Any]
WRITE = "write"  # its value: since when the trace has had the owner, -1 for what existed before
MARK = ("mark", None, None, None)
OWN = "own"  # of an object that the trace made; it is not told of what C code reads there
WHOLE = object()  # the key of a write to nobody knows which part
ANYTHING = object()
LAYOUTS = object()  # the sizes and strides of all tensors; key: the number of the node whose are changed in place


class Heap:
    """The reads and writes of one trace. outside: how many writes were to what tracing did not make."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.born: dict[int, int] = {}  # by id of an object that the trace made: how long the log was then
        self.outside = 0
        self.written: dict[int, dict[Any, list[int]]] = {}  # by id of the owner, and key: when
        self.writes: list[int] = []  # where in the log
        self.part_of: dict[int, Any] = {}  # by id of a container that a new object has made for itself: whose it is
        self.now: dict[str, Callable[[Any, Any, Any], Any]] = {  # by kind: what a read would find, from its event
            "fact": lambda owner, key, then: then,
            "default": lambda function, key, then: then,  # (which is guarded)
            "answer": lambda ask, key, then: ask(),
            "function": lambda function, key, then: function.__code__,
        }
        self.listening = 0  # who wants to know of reads on classes, which are many

    def mark(self) -> int:
        """A place in the log. What was made before it is older than it, even if nothing was read in between."""
        self.events.append(MARK)
        return len(self.events)

    def made(self, obj: Any) -> None:
        self.born[id(obj)] = len(self.events)

    def age(self, owner: Any) -> int:
        """When the trace made an object, -1 for what existed before."""
        return self.born.get(id(self.owner_of(owner)), -1)

    def owner_of(self, obj: Any) -> Any:
        """Whose part an object is, itself if nobody's."""
        return self.part_of.get(id(obj), obj)

    def read(self, kind: str, owner: Any, key: Any, value: Any) -> None:
        self.events.append((kind, owner, key, value))

    def note(self, what: str) -> None:
        """A read of what cannot be said."""
        self.events.append(("other", ANYTHING, what, None))

    def write(self, owner: Any, key: Any = WHOLE, born: int = -1) -> None:
        self.outside += born < 0
        owner = self.owner_of(owner)
        self.written.setdefault(id(owner), {}).setdefault(key, []).append(len(self.events))
        self.writes.append(len(self.events))
        self.events.append((WRITE, owner, key, born))

    def reads(self, begin: int, end: int | None = None) -> list[Event]:
        """What was read between two marks."""
        return [event for event in self.events[begin:end] if event[0] is not WRITE and event is not MARK]

    def writes_between(self, begin: int = 0, end: int | None = None) -> list[Event]:
        """What was written between two marks. Reads are many more: they are not walked."""
        first = bisect_left(self.writes, begin)
        last = len(self.writes) if end is None else bisect_left(self.writes, end)
        return [self.events[place] for place in self.writes[first:last]]

    def was_written(self, event: Event, begin: int = 0, end: int | None = None) -> bool:
        """Whether the place that was read was written to between two marks."""
        _, owner, key, _ = event
        if owner is ANYTHING:
            return self.changes_older(begin, end)
        written = self.written.get(id(owner))
        if written is None:
            return False
        times = written.values() if key is None else (written.get(WHOLE, ()), written.get(key, ()))
        return any((at := bisect_left(t, begin)) < len(t) and (end is None or t[at] < end) for t in times)

    def changes_older(self, begin: int, end: int | None = None) -> bool:
        """Whether anything that existed before the first of two marks was written to between them."""
        return any(born < begin for _, _, _, born in self.writes_between(begin, end))

    def puts_back(self, begin: int) -> bool:
        """Whether all that was written since a mark, of what is older than it, is as it was: each place was read before
        its first write, and would be found so now."""
        first: dict[tuple[int, Any], Event] = {}
        kept = True
        for event in self.events[begin:]:
            kind, owner, key, value = event
            if kind is WRITE:
                if value < begin:
                    read = None if key is WHOLE else first.get((id(owner), key))
                    kept = kept and read is not None and self.holds(read, begin)
            elif kind in self.now and owner is not None:
                first.setdefault((id(self.owner_of(owner)), key), event)
        return kept

    def is_unchanged(self, reads: Iterable[Event], since: int) -> bool:
        """Whether each of these reads would find now what it found."""
        return all(self.holds(event, since) for event in reads)

    def holds(self, event: Event, since: int) -> bool:
        kind, owner, key, value = event
        if kind in self.now:
            return same_constant(self.now[kind](owner, key, value), value)
        return not self.was_written(event, since)

    def release(self) -> None:
        """The trace is over: what was logged goes without a garbage collection."""
        for known in (self.events, self.writes, self.written, self.born, self.part_of, self.now):
            known.clear()
