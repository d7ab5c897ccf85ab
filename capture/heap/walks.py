"""Iterators that existed before the call: the one of a for loop that a graph break left in the middle.

What such an iterator gives next is asked of another one like it (``again``), so that tracing advances nothing. The
items that the trace takes are guarded where they are met, the end as the number of those that are left; when the graph
has run, the iterator itself is advanced as often, before anything else is changed.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from moebius.interpreter import STOP, is_kind

from ..guards.sources import Part
from ..values.residual_program import Call, Literal, Residual
from ..values.values import ATOMS, Break
from .iterator_states import COUNT, TELLING
from .objects import Objects
from .records import CONTAINERS

ADVANCED = "pass what it gives as an argument (for batch in loader: step(batch)), or iterate over the container itself"
BASES = tuple(CONTAINERS)


class Walk:
    """An iterator from outside in one trace. taken: how often it was advanced. rest: gives what it would give."""

    __slots__ = ("ahead", "ended", "iterator", "place", "rest", "taken")

    def __init__(self, iterator: Any, place: Part, ahead: Ahead, rest: Iterator[Any]):
        self.iterator, self.place, self.ahead, self.rest = iterator, place, ahead, rest
        self.taken, self.ended = 0, False

    def advance(self, emitter: Residual) -> None:
        """Effect: the iterator itself gives what the trace took."""
        name = emitter.load(self.place.parent)
        emitter.lines.append(Call(emitter.constant(advance), (name, Literal(self.taken))))


class Ahead:
    """A tuple of the items that an iterator gives next, which is not advanced. count: at most so many."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, iterator: Any) -> tuple[Any, ...] | None:
        rest = again(iterator)
        return None if rest is None else tuple(itertools.islice(rest, self.count))


class Walks:
    """Those of one trace."""

    def __init__(self, objects: Objects):
        self.before_effects = objects.before_effects
        self.objects, self.guards = objects, objects.guards
        self.open: dict[int, Walk] = {}

    def can_be_told(self, iterator: Any) -> bool:
        """Whether it is known what the iterator, which existed before, gives next."""
        return id(iterator) in self.open or again(iterator) is not None

    def next_item(self, iterator: Any) -> Any:
        """What ``next(iterator)`` gives, STOP at its end. Raises Break where that cannot be known."""
        walk = self.open.get(id(iterator)) or self.begin(iterator)
        if self.is_disturbed(walk):
            self.refuse(iterator, ", and what it goes through was changed")
        self.objects.touch(iterator)
        try:
            item = next(walk.rest, STOP)
        except ValueError:
            self.refuse(iterator, " to where zip(strict=True) fails")
        if walk.ended and item is not STOP:
            self.refuse(iterator, " once more after its end")
        number, walk.taken = walk.taken, walk.taken + 1
        walk.ahead.count = max(walk.ahead.count, walk.taken)
        if item is STOP:
            if not walk.ended:
                text = f"gives {number} items and no more"
                self.guards.check("length", walk.place, number, text=text)
            walk.ended = True
            return STOP
        place = Part(f"{walk.place.name}[{number}]", walk.place, "tuple_item", number)
        if self.varies(item, place.name):
            self.refuse(iterator, ": each iteration has another object")
        return self.objects.enter(item, place)

    def begin(self, iterator: Any) -> Walk:
        rest = again(iterator)
        if rest is None:
            self.refuse(iterator)
        source = self.objects.need(iterator).source
        ahead = Ahead()
        place = Part(f"next({source.name})", source, "python", ahead)
        self.objects.refuse_walk(place.name, type(iterator))
        self.guards.check("type", place, tuple, text="is as far as it was")
        walk = self.open[id(iterator)] = Walk(iterator, place, ahead, rest)
        self.before_effects.append(walk.advance)
        return walk

    def is_disturbed(self, walk: Walk) -> bool:
        """Whether the step has changed what the iterator goes through, or advanced a part of it alone."""
        taken = [other.iterator for other in self.open.values() if other is not walk and other.taken]
        changed = [record.obj for record in self.objects.changed_records() if is_kind(record.obj, BASES)]
        return not are_apart(walk.iterator, *taken, *changed)

    def keep_apart(self) -> None:
        """Two iterators, and an iterator and a container that the step changes, are guarded to have nothing to do with
        one another in later calls, where they had nothing in this one."""
        taken = [walk for walk in self.open.values() if walk.taken]
        if not taken:
            return
        changed = [record for record in self.objects.changed_records() if is_kind(record.obj, BASES)]
        for i, walk in enumerate(taken):
            others = [(other.iterator, other.place.parent) for other in taken[i + 1 :]]
            others += [(record.obj, record.source) for record in changed]
            sources = [source for obj, source in others if are_apart(walk.iterator, obj)]
            if sources:
                name, text = walk.place.parent.name, "goes through nothing that the step changes"
                self.guards.holds(name, text, are_apart, walk.place.parent, *sources)

    def varies(self, item: Any, name: str) -> bool:
        """Whether another object was met here in another call: one that is known by its identity (a layer)."""
        if type(item) is tuple:
            return any(self.varies(value, f"{name}[{i}]") for i, value in enumerate(item))
        return name in self.objects.symbolic_places and type(item) not in ATOMS and not is_kind(item, torch.Tensor)

    def refuse(self, iterator: Any, why: str = "") -> NoReturn:
        kind = type(iterator).__name__
        raise Break("iterator from outside", f"a {kind} that existed before the step is advanced{why}", ADVANCED)


def again(iterator: Any, met: dict[int, Iterator[Any]] | None = None) -> Iterator[Any] | None:
    """Another iterator that gives what this one would, or None. What it goes through is not asked for an iterator.

    met: those that stand for others so far, by id: ``zip(it, it)`` takes its items from one.
    """
    met = {} if met is None else met
    if id(iterator) not in met:
        found = another(iterator, met)
        if found is None:
            return None
        met[id(iterator)] = found
    return met[id(iterator)]


def another(iterator: Any, met: dict[int, Iterator[Any]]) -> Iterator[Any] | None:
    kind = type(iterator)
    if kind is itertools.count:  # (to be asked for its ``__reduce__`` is deprecated from 3.12 on)
        numbers = COUNT.fullmatch(repr(iterator))
        return None if numbers is None else itertools.count(int(numbers[1]), int(numbers[2] or 1))
    if kind is not zip and kind is not enumerate and kind not in TELLING:
        return None
    try:
        maker, arguments, *state = iterator.__reduce__()
    except RuntimeError:  # over a dict or set that has changed
        return None
    if kind is zip or kind is enumerate:
        parts = arguments if kind is zip else arguments[:1]
        inner = [other for part in parts if (other := again(part, met)) is not None]
        if len(inner) < len(parts):
            return None
        return zip(*inner, strict=bool(state)) if kind is zip else enumerate(inner[0], arguments[1])
    found = begin(maker, arguments[0])
    if state and state[0] is not None:
        found.__setstate__(state[0])
    return found


def begin(maker: Any, sequence: Any) -> Any:
    """``iter(sequence)`` or ``reversed(sequence)`` by the method of Python's own: a subclass may have another."""
    if maker is reversed:
        return list.__reversed__(sequence)
    kind: Any = next(kind for kind in (list, tuple, str, bytes, range) if is_kind(sequence, kind))
    return kind.__iter__(sequence)


def parts_of(iterator: Any) -> list[Any]:
    """The iterators that are advanced with this one, itself among them."""
    found, kind = [iterator], type(iterator)
    if kind is zip or kind is enumerate:
        inner = iterator.__reduce__()[1]
        found += [each for part in (inner if kind is zip else inner[:1]) for each in parts_of(part)]
    return found


def are_apart(iterator: Any, *others: Any) -> bool:
    """Whether the iterator shares no part with another one, and goes through none of the others."""
    parts = parts_of(iterator)
    mine = {id(part) for part in parts} | {id(held) for part in parts for held in gc.get_referents(part)}
    return mine.isdisjoint(id(part) for other in others for part in parts_of(other))


def advance(iterator: Iterator[Any], count: int) -> None:
    """``next(iterator)`` so often."""
    for _ in range(count):
        next(iterator, None)
