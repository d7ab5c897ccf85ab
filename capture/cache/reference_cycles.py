"""Models that their own parts lead back to: a hook that is the model's bound method, a child or trainer that knows it.

What was captured for a model goes when that dies, and guards hold the dicts of its parts. Where one of these leads back
to the model it would never die, as the captured function holds the guards. So before each full collection of garbage
Python's own question is asked for such models, of what hangs from them: does a reference lead there that is neither
between these objects nor from our guards? If none does, what was captured goes, and the collection finds the rest.

A count that is too low keeps a model alive, and one that is too high costs another capture: neither gives a wrong
answer.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import time
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moebius.interpreter.machine import BUILTINS_OF

from ..bytecode.hidden_frames import apart, hidden
from ..codegen.residual import residual_file
from ..guards.program import CompiledGuards
from ..guards.recorder import WatchedClass, WatchedInstance
from ..guards.sources import Source, Static
from ..hook import Entry, GuardProgram
from ..values.formulas import AtSource, Formula
from ..values.weak_ids import WeakIds

MAX_HANGING = 100_000  # objects; a model with more of them lives as long as its captures
SHARE = 20  # a look that takes t is followed by none for SHARE * t
FOREIGN = (type, types.ModuleType, types.CodeType, types.FrameType, weakref.ref, Entry, GuardProgram)
OF_GUARDS = (Source, AtSource, Formula, tuple)  # what holds what guards refer to
ONE = [object()]
OURS = sys.getrefcount(ONE[0])  # the list's, and what the look at a count adds to it


# ----------------------------------------------------------------------------------------------------------------------
# What hangs from a model
# ----------------------------------------------------------------------------------------------------------------------


class Reachable:
    """objects: all that a reference leads to from the first ones; links: of each, the indices of what it refers to.

    Not through types, Python modules and the globals of functions: what a program's own names hold, it can let go.
    """

    def __init__(self, start: Iterable[Any]):
        self.objects = [*start]
        self.links: list[list[int]] = []
        self.places = {id(obj): i for i, obj in enumerate(self.objects)}
        while len(self.links) < len(self.objects) < MAX_HANGING:
            self.links.append([*self.held_by(self.objects[len(self.links)])])

    def held_by(self, found: Any) -> Iterator[int]:
        names = [found.__globals__, BUILTINS_OF(found)] if type(found) is types.FunctionType else []
        for part in gc.get_referents(found):
            if not gc.is_tracked(part) or issubclass(type(part), FOREIGN) or any(part is known for known in names):
                continue
            place = self.places.get(id(part))
            if place is None:
                place = self.places[id(part)] = len(self.objects)
                self.objects.append(part)
            yield place

    @property
    def lead_back(self) -> bool:
        """Whether a reference leads from the first object to itself."""
        return any(0 in held for held in self.links)

    @property
    def complete(self) -> bool:
        return len(self.links) == len(self.objects)

    def lead_to_the_first(self, some: Iterable[int]) -> bool:
        """Whether a reference leads from one of these to the first object."""
        waiting, seen = [*some], set()
        while waiting:
            place = waiting.pop()
            if place == 0:
                return True
            if place not in seen:
                seen.add(place)
                waiting += self.links[place]
        return False


# ----------------------------------------------------------------------------------------------------------------------
# Who else holds it
# ----------------------------------------------------------------------------------------------------------------------


Captures = Iterable[tuple[CompiledGuards, Callable[..., Any]]]  # guards, and what runs when they hold


def is_held_by_captures_alone(model: weakref.ref, captures: Captures) -> bool:
    """Whether the model would die without these captures."""
    reachable = Reachable([model()])  # (no variable of ours holds it while references are counted)
    if not reachable.complete:
        return False
    counts = [0] * len(reachable.objects)
    for held in reachable.links:
        for place in held:
            counts[place] += 1
    for guards, run in captures:
        for kept in held_by(guards, run, reachable.places):
            if (at := reachable.places.get(id(kept))) is not None:
                counts[at] += 1
    kept = None
    objects = reachable.objects
    outside = [i for i in range(len(objects)) if sys.getrefcount(objects[i]) - OURS > counts[i]]
    return not reachable.lead_to_the_first(outside)


def held_by(guards: CompiledGuards, run: Callable[..., Any] | None, hanging: Container[int]) -> Iterator[Any]:
    """What a capture refers to, each object as often as there are references. hanging: the ids of what hangs from the
    model."""
    for later in guards.later:
        yield from held_by(later.guards, None, hanging)
    yield from gc.get_referents(guards.program)
    for slot in guards.slots:
        yield from slot
    ours = [slot[2] for slot in guards.slots if slot[0] == "python"]
    for fact in guards.facts:
        kind, *rest = fact.check
        yield from rest
        if kind in ("dict", "class"):
            yield from 2 * [*rest[1], *rest[1].values()]  # the program has a copy
            yield from rest[2] or ()
        elif kind in ("none_of", "contents", "keys"):
            yield from rest[1]
        if isinstance(fact.made, WatchedInstance):
            yield from (fact.made.obj, fact.made.namespace)
        elif kind == "class":
            (watched,) = fact.made.args  # type: ignore[attr-defined]
            assert isinstance(watched, WatchedClass)
            yield from watched.entries.values()
        ours += [fact.source, *fact.sources, *(rest[:1] if kind == "python" else ())]
    yield from held_by_ours(ours, hanging)
    if isinstance(run, types.FunctionType) and run.__code__.co_filename == residual_file(run.__name__):
        yield from run.__globals__.values()


def held_by_ours(starts: Iterable[Any], hanging: Container[int]) -> Iterator[Any]:
    """What sources, and the functions of guards and slots, refer to, by way of one another as well."""
    waiting, seen = [*starts], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or id(one) in hanging:
            continue
        seen.add(id(one))
        held = gc.get_referents(one)
        if (names := getattr(one, "__dict__", None)) is not None and any(part is names for part in held):
            held += gc.get_referents(names)
        yield from held
        if not isinstance(one, Static):  # (what that names is the user's)
            waiting += [part for part in held if isinstance(part, OF_GUARDS)]


# ----------------------------------------------------------------------------------------------------------------------
# Before each full collection
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """A model, and what lets go of each of its captures."""

    model: weakref.ref
    let_go: list[Callable[[], None]] = field(default_factory=list)


class ReferenceCycles:
    """Those that captures are for. captures: gives all that there are. once: let go of before, and come back since."""

    def __init__(self, captures: Callable[[], Captures]):
        self.captures = captures
        self.watched: dict[int, Watched] = {}
        self.once = WeakIds()
        self.rest_until = 0.0

    def watch(self, reference: weakref.ref, let_go: Callable[[], None]) -> None:
        """A capture was made for this model."""
        model = reference()
        if model is None or model in self.once:
            return
        if (known := self.watched.get(id(model))) is not None and known.model() is model:
            known.let_go.append(let_go)
        elif Reachable([model]).lead_back:
            self.watched[id(model)] = Watched(reference, [let_go])
            if self.at_a_collection not in gc.callbacks:
                gc.callbacks.append(self.at_a_collection)
                atexit.register(self.end)

    def end(self) -> None:
        """The interpreter ends: what this module names is about to go."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self.at_a_collection)

    @hidden
    def at_a_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2 and self.watched and time.perf_counter() > self.rest_until:
            apart(self.look)

    def look(self) -> None:
        """Let go of the captures of models that nobody else holds."""
        started = time.perf_counter()
        for address, watched in [*self.watched.items()]:
            model = watched.model
            if model() is None:
                del self.watched[address]
            elif is_held_by_captures_alone(model, self.captures()):
                del self.watched[address]
                self.once[model()] = None
                for let_go in watched.let_go:
                    let_go()
        ended = time.perf_counter()
        self.rest_until = ended + SHARE * (ended - started)
