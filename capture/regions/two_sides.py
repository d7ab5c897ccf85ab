"""``if … else …`` on values: the side that the jump passes over is recorded as a branch, then the other as one on the
opposite condition. What both sides set is the first one's where that ran, else the second one's.

A local that was not set before, or was something else, has no value to begin with: the first branch is given None for
it, which nobody sees, as one of the two runs. So it is for what both leave on the stack (``a if … else b``, and ``a or
b``, of which one side leaves the condition), and for what they return. A tuple that each side makes is joined item by
item, and so are a list and a dict that are returned: nobody else knows these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind

from ..bytecode.flow import RETURNED
from ..bytecode.liveness import read_by_name
from ..heap.objects import Objects
from ..python.parts import Parts as Domain
from ..tensors.tensors import TensorOperations
from ..values.values import Break, TensorProxy
from . import branch_places, chosen_numbers
from .branches import Conditional
from .loop_regions import FirstSide, Joined, LoopRegion, Place, alike

PLAIN = (int, str, bool, bytes, type(None), float)


@dataclass(frozen=True)
class Container:
    """In the place of one that a side made."""

    kind: type
    keys: tuple[Any, ...]


def is_double(loop: LoopRegion) -> bool:
    """Whether the loop is one side of two."""
    return is_kind(loop.rows, Conditional) and (loop.rows.other is not None or loop.first is not None)


def left_on_stack(loop: LoopRegion) -> dict[int, Any]:
    """By the position in the stack, inverted: what was not there before. Only sides of two may leave it otherwise."""
    frame, before = loop.frame, loop.stack
    if loop.head == RETURNED:
        instruction, before = frame.program.instructions[frame.pc], []
        frame.stack[:] = [instruction.argval if instruction.opname == "RETURN_CONST" else frame.stack[-1]]
    left = {~i: value for i, value in enumerate(frame.stack) if i >= len(before) or before[i] is not value}
    if not is_double(loop) and (left or len(frame.stack) != len(before)):
        raise Break("expert loop changes the stack", "an expression spans the loop",
                    "assign the loop's result to a variable")  # fmt: skip
    return left


def own_condition(tensors: TensorOperations, condition: Any) -> Any:
    """For the second side, as the first may write into the tensor that was asked."""
    return tensors.function(torch.clone, (condition,), {}) if is_kind(condition, TensorProxy) else condition


class Parts:
    """Of what a side leaves, all that is joined by itself."""

    def __init__(self, loop: LoopRegion, objects: Objects):
        self.kinds = (tuple, list, dict) if loop.head == RETURNED else (tuple,)
        heap, (_, self.mark) = objects.heap, objects.inside[-1]
        self.age = heap.age
        self.met: set[int] = set()

    def of(self, value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
        own = type(value) in self.kinds and self.age(value) >= self.mark and id(value) not in self.met
        items = items_of(value) if own else {}
        if not own or not all(type(key) in PLAIN for key in items):  # (others would be asked for their hash)
            yield place, value
            return
        self.met.add(id(value))
        yield place, Container(type(value), tuple(items))
        for key, item in items.items():
            yield from self.of(item, (*place, key))


def items_of(value: Any) -> dict[Any, Any]:
    return value if type(value) is dict else dict(enumerate(value))


def leave_first(loop: LoopRegion, changed: list[int], stack: dict[int, Any], joins: branch_places.Joins) -> FirstSide:
    """The first side is recorded: what it gives out, apart from what it changed of what was there before."""
    frame, parts, side = loop.frame, Parts(loop, joins.objects), FirstSide(len(loop.frame.stack))
    names = frame.program.localsplus
    for index, value in {**{i: frame.locals[i] for i in changed}, **stack}.items():
        if index >= 0 and names[index] not in read_by_name(frame.program)[loop.head]:
            side.left[index,] = value
            continue
        for place, part in parts.of(value, (index,)):
            if is_kind(part, TensorProxy):
                side.joined[place] = part
                loop.joined.append(Joined(place, part, None))
            else:
                side.left[place] = part
    joins.leave_first(loop, side)
    return side


def leave_second(
    loop: LoopRegion, first: FirstSide, changed: list[int], stack: dict[int, Any], joins: branch_places.Joins
) -> list[int]:
    """The second side is recorded: joins what both give. changed: locals that it alone sets. Returns those of which it
    cannot be said what they are then."""
    tensors = joins.tensors
    frame, parts, unsure = loop.frame, Parts(loop, joins.objects), set(stack) - first.indices()
    now: dict[Place, Any] = {}
    for index in first.indices():
        if index >= 0 or ~index < len(frame.stack):
            now.update(parts.of(frame.locals[index] if index >= 0 else frame.stack[~index], (index,)))
    for place, mine in first.joined.items():
        if alike(mine, now.get(place), rows=True):
            loop.joined.append(Joined(place, now[place], mine))
        else:
            unsure.add(place[0])
    joins.leave_one(loop, first)
    others = {place: mine for place, mine in first.left.items() if place not in now or not is_same(mine, now[place])}
    for place, mine in others.items():
        where = place if len(place) > 1 else place[0]
        if chosen_numbers.is_left(loop, where, (now.get(place), mine), tensors):
            continue
        if (held := chosen_numbers.in_tensors((now.get(place), mine), tensors)) is not None:
            loop.joined.append(Joined(place, *held, number=True))
        else:
            unsure.add(place[0])
    if first.height != len(frame.stack) or any(index < 0 for index in unsure):
        what = "what is returned" if loop.head == RETURNED else "the value of an expression"
        raise Break("data-dependent branch", f"{what} depends on a condition on values",
                    "use torch.where, or move it out of the captured step")  # fmt: skip
    return chosen_numbers.others(loop, changed, tensors) + sorted(unsure)


def is_same(one: Any, other: Any) -> bool:
    """Whether it is one object, or constants (keys) that nobody can tell apart."""
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is Container:
        pairs = zip(one.keys, other.keys, strict=False)
        return one.kind is other.kind and len(one.keys) == len(other.keys) and all(is_same(a, b) for a, b in pairs)
    if type(one) is float:
        return one.hex() == other.hex()  # (0.0 and -0.0 are equal, too)
    return type(one) in PLAIN and bool(one == other)


def hand_out(
    loop: LoopRegion, found: list[Any], first: FirstSide | None, domain: Domain, counts: set[tuple[Any, int]]
) -> None:
    """The values after the branch go where they belong; the first side's into the record of it. counts: see
    ``chosen_numbers.hand_out``."""
    made, tensors = domain.objects.made, domain.tensors
    pairs = zip(loop.joined, found, strict=True)
    given_out = {one.place: tensors.numbers.of_item(value) if one.number else value for one, value in pairs}
    asked = {place[1]: given_out.pop(place) for place in [*given_out] if place[0] is chosen_numbers.ASKED}
    numbers = chosen_numbers.hand_out(loop, domain, counts, asked)
    values = branch_places.hand_out(given_out, first) | numbers
    if first is not None:
        first.joined.update(values)
        return

    def filled(value: Any, place: Place) -> Any:
        if place in values:
            return values[place]
        if not any(one[: len(place)] == place for one in values):
            return value
        items = {key: filled(item, (*place, key)) for key, item in items_of(value).items()}
        return made(items if type(value) is dict else type(value)(items.values()))

    for index in {place[0] for place in values}:
        where, position = (loop.frame.locals, index) if index >= 0 else (loop.frame.stack, ~index)
        where[position] = filled(where[position], (index,))


def placeholders(loop: LoopRegion, scope: Any) -> list[fx.Node]:
    made = []
    for one in loop.joined:
        node = scope.placeholder("other")
        node.meta.update(val=None if one.initial is None else one.initial.fake, **loop.stands_at)
        made.append(node)
    return made
