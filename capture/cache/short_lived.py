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
from torch.utils.weak import WeakIdKeyDictionary

from ..guards.recorder import can_be_held_weakly, can_die
from ..heap.identities import is_bare

Models = list[tuple[weakref.ref, str]]  # each with its place

FEW = 3  # captures in a row whose model or optimizer dies before a second call
MANY = 16  # the same, calls that were not captured for that counted


class ShortLived:
    """Of one captured callable. in_a_row: the last captures that died unused, and calls that were not captured."""

    def __init__(self) -> None:
        self.in_a_row = self.captures = 0
        self.counted = 0, 0  # misses and hits by the time of the last one: all layers that die with a model are one
        self.met: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.models: Models = []

    def died(self, used: bool, calls: tuple[int, int], models: Models) -> None:
        """What was captured for one is gone with it. calls: misses and hits so far. models: those of the capture."""
        if used:
            self.in_a_row = self.captures = 0
        elif calls != self.counted:
            self.in_a_row, self.captures, self.counted = self.in_a_row + 1, self.captures + 1, calls
            self.models = models if self.in_a_row > 1 else self.models

    def places(self) -> set[str]:
        """Where the models stood that died: what stands there next is known by what is read in it."""
        gone = {place for model, place in self.models if model() is None}
        self.models = []
        return gone

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
