"""A checkpointed call once more: whether backward, which runs it again, would find and do what forward did.

Where the call has changed nothing, that is so if what it read is as it was (``Read``). Where it has changed something
older, as a hook that collects outputs does, it is interpreted again when backward would run it (``Again``): where that
changes nothing plain Python does the change once, and where it gives the same graph that stands.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

from torch import fx

from ..guards.recorder import same_constant
from ..heap.heap import ANYTHING, LAYOUTS, OWN, WRITE, Event, Heap
from ..heap.records import VIEWS, raw_dict, whole_items
from ..python.parts import Parts
from ..tensors.graphs import GraphScope
from ..tensors.interfaces import StateRead
from ..torch_facts import torch_private
from ..values.values import Body

AGAIN = Body("a checkpointed call changes Python state", "a {} is changed in it again by backward", "")


WINDOWS = (*VIEWS, types.MappingProxyType)  # what shows a container
HELD = (list, dict, set, deque, types.FunctionType, partial)


def held_parts(value: Any) -> tuple[Any, ...]:
    """All that reading or calling it may tell."""
    if type(value) is types.FunctionType:
        return value.__code__, value.__defaults__, *whole_items(value.__kwdefaults__ or {})
    if issubclass(type(value), partial):
        return value.func, value.args, *whole_items(value.keywords)
    return whole_items(value)


def own_part(owner: Any, key: Any) -> Any:
    """The value of an object's own attribute, without running anybody's code; None where it has none."""
    if (found := (raw_dict(owner) or {}).get(key)) is not None:
        return found
    slot = next((vars(base)[key] for base in type(owner).__mro__ if key in vars(base)), None)
    try:
        return slot.__get__(owner) if type(slot) is types.MemberDescriptorType else None
    except AttributeError:  # it is empty
        return None


class Read:
    """What one checkpointed call, or the backward of a function, reads of what existed before it, which backward reads
    again."""

    def __init__(self, heap: Heap, nodes: int, given: tuple[Any, ...]):
        """nodes: how many the graph has so far. given: the call's arguments."""
        self.given = given
        self.heap, self.begin, self.end, self.reads = heap, heap.mark(), 0, list[Event]()
        self.first = nodes
        self.moved = self.changes_older = False
        self.held: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # containers that the step made, and what was in them
        heap.listening += 1

    def finish(self) -> None:
        self.heap.listening -= 1
        self.end = self.heap.mark()
        older = [event for event in self.heap.reads(self.begin, self.end) if self.heap.age(event[1]) < self.begin]
        self.hold(self.given)
        for kind, owner, key, value in older:
            self.hold(value)
            if kind == OWN:
                self.hold(owner)
                self.hold(own_part(owner, key))
        self.reads = [event for event in older if event[0] == OWN or id(event[1]) not in self.held]
        self.reads.append(("layouts", LAYOUTS, None, None))  # (no read of a size is told)
        self.moved = any(  # of an older tensor: what it does to sizes it would do twice
            kind is WRITE and owner is LAYOUTS and node <= self.first
            for kind, owner, node, _ in self.heap.events[self.begin : self.end]
        )
        self.changes_older = not self.moved and self.heap.changes_older(self.begin, self.end)

    def hold(self, value: Any) -> None:
        """Note what the step made and can be read without telling (by C code, or by a call), and what is in it."""
        if type(value) in WINDOWS:
            return self.hold(gc.get_referents(value)[0])
        if type(value) is tuple:
            items = value
        elif id(value) not in self.held and self.heap.age(value) >= 0 and issubclass(type(value), HELD):
            items = held_parts(value)
            self.held[id(value)] = value, items
        else:
            return
        for item in items:
            self.hold(item)

    def is_unchanged(self) -> bool:
        """Whether each read would find now what it found."""
        return self.is_held() and not self.moved and self.heap.is_unchanged(self.reads, self.end)

    def stays(self) -> bool:
        """The same, of the places that can be named: the step ends, and who goes on later asks these."""
        return self.is_held() and self.heap.is_unchanged(filter(is_named, self.reads), self.end)

    def is_held(self) -> bool:
        return all(same_constant(held_parts(now), then) for now, then in self.held.values())


class ReadElsewhere:
    """The same in a module's call that was written again. counterpart: of an object, what stands for it there."""

    def __init__(self, first: StateRead, counterpart: Callable[[Any], Any]):
        self.first, self.counterpart = first, counterpart
        self.heap: Heap = first.heap
        self.end = self.heap.mark()

    @cached_property
    def reads(self) -> list[Event]:
        return [(kind, self.counterpart(owner), key, value) for kind, owner, key, value in self.first.reads]

    def stays(self) -> bool:
        """Whether nothing was written to the places that are read."""
        return all(
            self.heap.holds(now, self.end) if now[1] is then[1] else not self.heap.was_written(now, self.end)
            for now, then in zip(self.reads, self.first.reads, strict=True)
            if is_named(now)
        )


def is_named(read: Event) -> bool:
    return read[1] is not ANYTHING and read[1] is not LAYOUTS


class Again:
    """A checkpointed call that backward may run again. nodes: what it was in the graph."""

    def __init__(self, domain: Parts, run: Callable[[], Any]):
        self.domain, self.run, self.nodes = domain, run, list[fx.Node]()
        self.switches = torch_private.switches()

    def is_the_same(self) -> bool:
        """Whether running it now changes nothing and gives the same nodes."""
        objects, tensors = self.domain.objects, self.domain.tensors
        writer, functions = tensors.writer, tensors.gradients.functions
        scope, before = GraphScope(writer.scope), torch_private.switches()
        scope.in_loop = False
        outer, count, told, recomputed = writer.scope, writer.count, writer.before_node, writer.recomputed
        modules, calls = dict(writer.submodules), len(functions)
        writer.scope, writer.before_node, writer.recomputed = scope, lambda *_: None, True
        try:
            torch_private.throw_switches(self.switches)
            with objects.within(AGAIN):
                self.run()
            found = [node for node in scope.graph.nodes if node.op != "placeholder"]
            return alike(self.nodes, found, dict(scope.lifted), writer.submodules)
        except Exception:
            return False
        finally:
            torch_private.throw_switches(before)
            writer.scope, writer.count, writer.before_node, writer.recomputed = outer, count, told, recomputed
            writer.submodules.clear()
            writer.submodules.update(modules)
            del functions[calls:]


def alike(
    ours: list[fx.Node], theirs: list[fx.Node], same: dict[fx.Node, fx.Node], modules: dict[str, fx.GraphModule]
) -> bool:
    """Whether two lists of nodes do the same with the same. same: of each node from outside, what stands for it."""
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a.op != b.op:
            return False
        if a.op == "get_attr":
            one, other = modules.get(str(a.target)), modules.get(str(b.target))
            if one is None or other is None:
                return False
            if not alike(list(one.graph.nodes), list(other.graph.nodes), {}, modules):
                return False
        elif a.op != "placeholder":
            given = fx.map_arg((a.args, a.kwargs), lambda node: same.get(node, node))
            if a.target != b.target or given != (b.args, b.kwargs):
                return False
        same[a] = b
    return True


def after(begin: fx.Node) -> Iterator[fx.Node]:
    """The nodes that were written since."""
    node = begin.next
    while node.op != "root":
        yield node
        node = node.next
