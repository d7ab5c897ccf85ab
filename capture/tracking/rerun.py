"""A checkpointed call once more: whether backward, which runs it again, would find and do what forward did.

Where the call has changed nothing, that is so if what it read is as it was (``Read``). Where it has changed something
older, as a hook that collects outputs does, it is interpreted again when backward would run it (``Again``): where that
changes nothing plain Python does the change once, and where it gives the same graph that stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .. import torch_private
from .graphs import GraphScope
from .records import contents_of, same_item, whole_items
from .values import Body

if TYPE_CHECKING:
    from .domain import TrackingDomain
    from .objects import Objects

AGAIN = Body("a checkpointed call changes Python state", "a {} is changed in it again by backward", "")


class Read:
    """What one checkpointed call reads of Python objects, which backward reads again."""

    def __init__(self, objects: Objects, cells: list[Any]):
        self.objects, self.cells, self.events = objects, cells, list[Any]()
        self.log = objects.log if objects.log is not None else []
        self.begin = len(self.log)
        self.given, objects.log = objects.log, self.log
        self.held: dict[int, tuple[Any, tuple[Any, ...]]] = {}  # what the step made and the call reaches

    def finish(self) -> None:
        self.objects.log = self.given
        self.events = [event for event in self.log[self.begin :] if event[0] in ("entry", "cell", "whole")]
        for value in (*(event[-1] for event in self.events), *(then for _, then in self.cells)):
            self.hold(value)

    def hold(self, value: Any) -> None:
        """Note a list, dict or set that the step made, which no log tells of, and what is in it."""
        kind = type(value)
        if kind is tuple:
            items = value
        elif kind in (list, dict, set, deque) and self.objects.is_new(value) and id(value) not in self.held:
            items = whole_items(value)
            self.held[id(value)] = value, items
        else:
            return
        for item in items:
            self.hold(item)

    def is_unchanged(self) -> bool:
        """Whether each read would find now what it found."""
        if not all(map(self.holds, self.events)) or any(contents_of(cell) is not then for cell, then in self.cells):
            return False
        return all(same_whole(whole_items(now), then) for now, then in self.held.values())

    def holds(self, event: tuple[Any, ...]) -> bool:
        kind, record, *parts = event
        if kind == "entry":
            return same_item(self.objects.entry_now(record, parts[0]), parts[1])
        if kind == "cell":
            return same_item(record.writes.get("value", record.reads["value"]), parts[0])
        now = whole_items(record.obj if record.shadow is None else record.shadow)
        return record.shadow is None or same_whole(now, parts[0])


def same_whole(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(same_item, now, then))


class Again:
    """A checkpointed call that backward may run again. nodes: what it was in the graph."""

    def __init__(self, domain: TrackingDomain, run: Callable[[], Any]):
        self.domain, self.run, self.nodes = domain, run, list[fx.Node]()
        self.switches = torch_private.switches()

    def is_the_same(self) -> bool:
        """Whether running it now changes nothing and gives the same nodes."""
        objects, writer, functions = (
            self.domain.objects,
            self.domain.tensors.writer,
            self.domain.tensors.gradients.functions,
        )
        scope, before = GraphScope(writer.scope), torch_private.switches()
        scope.in_loop = False
        outer, count, told, recomputed = writer.scope, writer.count, writer.before_node, writer.recomputed
        modules, calls = dict(writer.submodules), len(functions)
        writer.scope, writer.before_node, writer.recomputed = scope, lambda *_: None, True
        objects.inside.append(AGAIN)
        try:
            torch_private.throw_switches(self.switches)
            self.run()
            found = [node for node in scope.graph.nodes if node.op != "placeholder"]
            return alike(self.nodes, found, dict(scope.lifted), writer.submodules)
        except Exception:
            return False
        finally:
            torch_private.throw_switches(before)
            objects.inside.pop()
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


def fakes_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from fakes_in(item)
