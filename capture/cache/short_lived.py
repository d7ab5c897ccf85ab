"""Models and optimizers that a call makes for itself: nothing that was captured for one serves a second call.

After two such captures in a row, what stands where they stood is known by what is read in it, as any object is. Where
that does not help, after a few more a call with one that no call has met yet runs natively; what comes again is
captured then. After many, all calls do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..guards.recorder import can_be_held_weakly, can_die
from ..heap.identities import is_bare
from ..trace.segment import Segment
from ..values.weak_ids import WeakIds

Models = list[tuple[weakref.ref, str]]  # each with its place

FEW = 3  # captures in a row whose model or optimizer dies before a second call
MANY = 16  # the same, calls that were not captured for that counted


class ShortLived:
    """Of one captured callable. in_a_row: the last captures that died unused, and calls that were not captured."""

    def __init__(self) -> None:
        self.in_a_row = self.captures = 0
        self.counted = 0, 0  # misses and hits by the time of the last one: all layers that die with a model are one
        self.met = WeakIds()
        self.before: Models = []
        self.latest: Models = []
        self.open: set[str] = set()

    def died(self, used: bool, calls: tuple[int, int], models: Models) -> None:
        """What was captured for one is gone with it. calls: misses and hits so far. models: those of the capture."""
        if used:
            self.in_a_row = self.captures = 0
        elif calls != self.counted:
            self.in_a_row, self.captures, self.counted = self.in_a_row + 1, self.captures + 1, calls
            self.before, self.latest = self.latest, []
        if self.in_a_row > 1:
            self.open |= changed(self.before, models)
        self.latest = [*self.latest, *models]

    def places(self) -> set[str]:
        """Where models stood that were others each time: the next ones are known by what is read in them."""
        found, self.open = self.open, set()
        return found

    def idle(self, others: list[tuple[Segment, int]], call: int) -> list[Segment]:
        """Captures for models that no call after their own has met, though they live (in a cycle). They go, as if
        these had died. others: captures for other models than those of this call, each with the calls that it
        served."""
        idle = []
        for segment, served in others:
            if segment.looked_at is None and call > segment.captured_in:
                segment.looked_at = call, served
            elif segment.looked_at == (segment.captured_in + 1, served) and call > segment.captured_in + 1:
                idle.append(segment)
        if idle and others[-1][0].captured_in > idle[-1].captured_in:
            self.open |= changed(idle[-1].guards.models, others[-1][0].guards.models)
            return idle
        return []

    def are_many(self) -> bool:
        return self.captures >= MANY or self.in_a_row > MANY

    def in_words(self) -> str:
        return f"captured {self.captures} times for objects that lived for one call"

    def is_given(self, args: tuple, kwargs: dict[str, Any], captured_for: Iterable[Any]) -> bool:
        """Whether a call brings one that will not live long, for all that is known. captured_for: modules that there
        are captures for."""
        if self.captures < FEW:
            return False
        known = set(map(id, captured_for))
        given = [value for value in (*args, *kwargs.values()) if can_die(value) and can_be_held_weakly(value)]
        new = [value for value in given if value not in self.met and id(value) not in known]
        for value in new:
            self.met[value] = None
        if given:
            self.in_a_row = self.in_a_row + 1 if new else 0
        return bool(new)


def called_on(args: tuple) -> tuple[torch.nn.Module, ...]:
    """The modules among the arguments: the layers of a model share the code of a method, and of the rest of a loop over
    them, and each has captures of its own."""
    return tuple(a for a in args if issubclass(type(a), torch.nn.Module) and not is_bare(a))


def changed(before: Models, now: Models) -> set[str]:
    """The places of both where another model stands."""
    known = {place: model for model, place in before}
    return {place for model, place in now if known.get(place, model) is not model}  # (of one model there is one ref)
