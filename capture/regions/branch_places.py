"""Items of containers, and attributes, that a side of a branch on values sets: what each is afterwards is among what
the branch's node gives out, as it is for locals (two_sides.py).

The place must have held a tensor before, or each side sets it to one, of the same kind; how many rows it has may be
another matter. Of numbers see chosen_numbers.py. A side that does not set it leaves it as it was.
"""

from __future__ import annotations

from typing import Any

from moebius.interpreter import is_kind

from ..heap.places import HeapPlace
from ..tensors.tensors import TensorOperations
from ..values.values import Body, Break, TensorProxy
from . import chosen_numbers
from .branches import Conditional
from .loop_regions import FirstSide, Joined, LoopRegion, alike


def refuse(place: HeapPlace) -> None:
    raise Break("data-dependent branch", f"what {place.text()} is afterwards depends on a condition on values",
                "use torch.where, or move the branch out of the captured step")  # fmt: skip


class Joins:
    """Whether the branch that is being recorded may set a place of the heap that is older than it."""

    def __init__(self, loops: list[LoopRegion], bodies: list[tuple[Body, int]]):
        self.loops, self.bodies = loops, bodies

    def __call__(self, place: HeapPlace) -> bool:
        loop = self.loops[-1] if self.loops else None
        if loop is None or not is_kind(loop.rows, Conditional) or self.bodies[-1][1] != loop.since:
            return False
        loop.places.setdefault(place.key, (place, place.get()))
        return True


def put_back(loop: LoopRegion) -> None:
    """The places are as they were before the body."""
    for place, before in reversed(loop.places.values()):
        place.put_back(before)


def leave_one(loop: LoopRegion, first: FirstSide | None, tensors: TensorOperations) -> None:
    """A side is recorded, the other does nothing, or is known: what they leave is joined."""
    made = {} if first is None else {place[0].key: (place, mine) for place, mine in first.placed.items()}
    for key, (place, before) in loop.places.items():
        if key not in made and place.get() is not before:
            made[key] = (place,), before
    for (place,), mine in made.values():
        now = place.get()
        if chosen_numbers.is_left(loop, place, (now, mine), tensors):
            continue
        if not alike(mine, now, rows=True):
            refuse(place)
        loop.joined.append(Joined((place,), now, mine))
    put_back(loop)  # (a branch around this one notes what was there before it)


def leave_first(loop: LoopRegion, side: FirstSide) -> None:
    """The first of two sides is recorded: the second begins with what was there before it."""
    for place, before in loop.places.values():
        if (now := place.get()) is before:
            continue
        side.placed[(place,)] = now
        if is_kind(now, TensorProxy):
            loop.joined.append(Joined((place,), now, None))
        elif chosen_numbers.kind_of(now) not in chosen_numbers.KINDS:
            refuse(place)
    put_back(loop)


def hand_out(values: dict[Any, Any], first: FirstSide | None) -> dict[Any, Any]:
    """Puts what the branch gives for such places there, or into the record of the first side; returns the rest."""
    rest = {}
    for where, value in values.items():
        if type(where[0]) is int:
            rest[where] = value
        elif first is not None:
            first.placed[where] = value
        else:
            where[0].put(value)
    return rest
