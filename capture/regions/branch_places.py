"""Items of containers, and attributes, that a side of a branch on values sets: what each is afterwards is among what
the branch's node gives out, as it is for locals (two_sides.py).

The place must have held a tensor before, or each side sets it to one, of the same kind; how many rows it has may be
another matter. Of numbers see chosen_numbers.py. A side that does not set it leaves it as it was.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import only_computes
from moebius.lowering.step import new_notes, note_side

from ..bytecode.flow import RETURNED
from ..bytecode.liveness import read_by_name
from ..guards.recorder import same_constant
from ..heap.conditional_writes import Notes, Side, Write, refuse_place
from ..heap.objects import Objects
from ..heap.places import Entry, HeapPlace
from ..heap.records import Record
from ..python.parts import Parts
from ..tensors.failing import may_raise_on_data
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.values import ATOMS, IDENTITIES, SYMBOLIC, Break, TensorProxy, type_of
from . import chosen_numbers
from .branches import Conditional
from .loop_regions import FirstSide, Joined, LoopRegion, alike


class Joins:
    """Whether the branch that is being recorded may set a place of the heap that is older than it, or write there on
    its side (conditional_writes.py)."""

    def __init__(self, loops: list[LoopRegion], domain: Parts):
        self.loops, self.domain, self.bodies = loops, domain, domain.objects.inside
        self.objects, self.tensors, self.writer = domain.objects, domain.tensors, domain.tensors.writer
        self.objects.joins, self.objects.side, self.objects.open_sides = self, self.side, self.open_sides
        self.sides = 0
        self.given: dict[int, Side] = {}  # containers made on a side and written to what is older, by id

    def open(self) -> LoopRegion | None:
        """The branch, if nothing else is being recorded within it."""
        loop = self.loops[-1] if self.loops else None
        found = loop is not None and is_kind(loop.rows, Conditional) and self.bodies[-1][1] == loop.since
        return loop if found else None

    def __call__(self, place: HeapPlace | Side) -> bool:
        loop = self.open()
        if loop is None or is_kind(place, Side):
            return loop is not None
        loop.places.setdefault(place.key, (place, place.get()))
        return True

    def can_note(self) -> bool:
        return self.tensors.whole_step and self.writer.runs_at_most_once

    def side(self, record: Record, key: Any) -> Side | None:
        """On which side the record is written to, where the graph can note that it was come to."""
        loop = self.open()
        if loop is None or not self.can_note():
            return None
        places = [place for place, _ in loop.places.values() if is_kind(place, Entry)]
        if any(place.record is record and same_constant(place.where, key) for place in places):
            return None  # (it was written there before)
        return self.side_of(loop)

    def open_sides(self) -> set[Side]:
        return {loop.side for loop in self.loops if loop.side is not None}

    def side_of(self, loop: LoopRegion) -> Side:
        if loop.side is None:
            domain, depth = self.domain, self.loops.index(loop)
            outer = self.side_of(self.loops[depth - 1]) if depth else None
            site = loop.frame.code, cast(Conditional, loop.rows).here
            path = () if outer is None else (outer, *outer.outer)
            loop.side = Side(self.sides, loop.since, path, partial(domain.bounds.refused.add, site))
            self.sides += 1
        return loop.side

    def refuse_failing(self, target: Any, args: tuple) -> None:
        """A graph break where an operator may fail behind a write on its side, which is not noted then."""
        if not self.loops:
            return
        written = [loop.side for loop in self.loops if loop.side is not None and self.objects.written_on(loop.side)]
        if written and may_raise_on_data(target, args):
            for side in written:
                side.refuse()
            self.refuse_write(f"{getattr(target, '__name__', target)} may fail behind what is written")

    def waits(self, loop: LoopRegion, place: HeapPlace, value: Any) -> bool:
        """Whether what a side has left there, which no node can give, is written where the side was come to."""
        if not is_kind(place, Entry) or not self.can_note():
            return False
        self.objects.write_on(self.side_of(loop), place.record, place.where, value)
        return True

    def leave_one(self, loop: LoopRegion, first: FirstSide | None) -> None:
        """A side is recorded, the other does nothing, or is known: what they leave is joined."""
        made = {} if first is None else {place[0].key: (place, mine) for place, mine in first.placed.items()}
        for key, (place, before) in loop.places.items():
            if key not in made and place.get() is not before:
                made[key] = (place,), before
        for (place,), mine in made.values():
            now = place.get()
            if chosen_numbers.is_left(loop, place, (now, mine), self.tensors):
                continue
            if alike(mine, now, rows=True):
                loop.joined.append(Joined((place,), now, mine))
            elif (first is not None and (place,) in first.placed) or not self.waits(loop, place, now):
                refuse_place(place.text())
        self.leave(loop)

    def leave_first(self, loop: LoopRegion, side: FirstSide) -> None:
        """The first of two sides is recorded: the second begins with what was there before it."""
        for place, before in loop.places.values():
            if (now := place.get()) is before:
                continue
            if is_kind(now, TensorProxy):
                side.placed[(place,)] = now
                loop.joined.append(Joined((place,), now, None))
            elif {chosen_numbers.kind_of(now), chosen_numbers.kind_of(before)} <= chosen_numbers.KINDS:
                side.placed[(place,)] = now
            elif not self.waits(loop, place, now):
                refuse_place(place.text())
        self.leave(loop)

    def leave(self, loop: LoopRegion) -> None:
        put_back(loop)  # (a branch around this one notes what was there before it)
        if loop.side is not None and (written := self.objects.written_on(loop.side)):
            self.note(loop, loop.side, written)

    def note(self, loop: LoopRegion, side: Side, written: list[tuple[Record, Write]]) -> None:
        """A side is recorded on which something is written: a node notes it, with what is computed there for that."""
        objects, writer = self.objects, self.writer
        noted = {id(value) for _, write in written for one in write.path for value in one.values}
        for _, write in written:
            for value in objects.parts_in(write.parts()):
                self.refuse_lost(value, write.path, noted)
                if chosen_numbers.is_made_in(value, writer.scope) and id(value) not in noted:
                    side.values.append(value)
                    noted.add(id(value))
        self.refuse_given(loop)
        if objects.notes is None:
            with writer.in_front((), lambda scope: True):
                objects.notes = Notes(self.tensors.numbers, {}, (made := writer.call(new_notes)))
                made.meta |= loop.stands_at
        writer.call(note_side, objects.notes, side.number, *side.values).meta.update(loop.stands_at)
        for _, write in written if not side.outer else ():
            for one in write.path:
                one.is_over = True

    def refuse_lost(self, value: Any, path: tuple[Side, ...], noted: set[int]) -> None:
        """A graph break where residual code cannot say what is written on the side."""
        objects, writer = self.objects, self.writer
        if is_kind(value, TensorProxy):
            known = value.node.graph is writer.scope.root().graph or id(value) in noted or self.gives_out(value)
        elif type(value) in SYMBOLIC:
            known = id(value) in noted or all(map(writer.bound, chosen_numbers.symbols_of(value)))
        elif is_kind(value, Number):
            known = value.node is None or id(value) in noted or writer.scope.scope_of(value.node) is not None
        elif objects.is_new(value) and objects.is_made_of_items(value):
            made = objects.heap.age(value) >= path[-1].since
            known = not made or self.given.setdefault(id(value), path[0]) is path[0]
        else:
            known = type(value) in ATOMS or objects.is_entered(value) or is_kind(value, IDENTITIES)
        if not known:
            self.refuse_write(f"a {type_of(value).__name__} that is made there is written to what existed before")

    def gives_out(self, tensor: TensorProxy) -> bool:
        """Whether a tensor that the side makes is noted as it is, or stands in front of the branch from now on: what is
        but another view of a tensor that was there costs nothing."""
        scope, storage = self.writer.scope, torch_private.storage_of
        if tensor.node.graph is not scope.graph or tensor.fake.requires_grad or tensor.cls is not torch.Tensor:
            return False
        older = {inner: outer for outer, inner in scope.lifted.items()}
        shared = {storage(t) for node in older for t in [node.meta.get("val")] if is_kind(t, torch.Tensor)}
        if storage(tensor.fake) not in shared:
            return True
        return scope.parent is scope.root() and self.put_in_front(tensor, older, shared)

    def put_in_front(self, tensor: TensorProxy, older: dict[fx.Node, fx.Node], shared: set[Any]) -> bool:
        """Writes the views that lead to a tensor in front of the branch. older: by placeholder of the side, what was
        there before. False where there is more to do than to look."""
        chain, node, storage = [], tensor.node, torch_private.storage_of
        while node not in older:
            fake = node.meta.get("val")
            looks = is_kind(fake, torch.Tensor) and storage(fake) in shared and only_computes(node)
            if not looks or len(node.all_input_nodes) != 1:
                return False
            chain.append(node)
            (node,) = node.all_input_nodes
        found = older[node]
        with self.writer.in_front((), lambda scope: True):
            for inner in reversed(chain):
                def put(_: fx.Node, found: fx.Node = found) -> fx.Node:
                    return found

                args, kwargs = fx.map_arg((inner.args, inner.kwargs), put)
                found = self.writer.node(inner.op, inner.target, args, kwargs)
                found.meta.update(val=inner.meta["val"], where=inner.meta["where"], stack=inner.meta["stack"])
        tensor.node = found
        return True

    def refuse_given(self, loop: LoopRegion) -> None:
        """The same where what was made there and is written to an older object is used behind the branch, too."""
        frame, later = loop.frame, []
        if loop.head != RETURNED:
            read = read_by_name(frame.program)[loop.head]
            later = [v for n, v in zip(frame.program.localsplus, frame.locals, strict=True) if n in read]
        if any(id(value) in self.given for value in self.objects.parts_in((*later, *frame.stack))):
            self.refuse_write("an object that is made there has another name, too")

    def refuse_write(self, detail: str) -> NoReturn:
        raise Break("data-dependent branch", f"{detail}, on one side of a branch", "move it out of the branch")


def forget(loop: LoopRegion, objects: Objects) -> None:
    """What the body has written is not: it is recorded once more."""
    put_back(loop)
    if loop.side is not None:
        objects.drop_written(loop.side)


def put_back(loop: LoopRegion) -> None:
    """The places are as they were before the body."""
    for place, before in reversed(loop.places.values()):
        place.put_back(before)


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
