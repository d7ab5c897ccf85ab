"""Iterations that stand one after another in a graph, as one loop: what an unrolled loop over experts leaves.

``for expert in self.experts`` and every other loop that Python ran by itself (while loops, generators, dictionaries of
rows) leaves E accumulations into one sum. If the graphs behind them are alike, but for the number of the expert and for
the expert's own parameters, they are the iterations of ``for e in range(E)`` over those parameters stacked. The loop
that :func:`find_unrolled_loops` builds is only there to be proven: it runs nowhere. Where the proof fails, the graph
stays as it was.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage, makes_new, only_computes
from moebius.lowering.experts.stacking import pick, stack_experts
from moebius.lowering.experts.views import column_cut
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.operators import (
    added_body,
    behind,
    call_name,
    draws,
    given_to,
    is_size,
    loop_body,
    operator_name,
    read_call,
    target_name,
)
from moebius.lowering.torch_private import sizes_key
from moebius.lowering.values import add_call, certain, computed_of, put_before, stands_at, tensor_of, value_of

SUMS = frozenset({"index_add", "index_put", "scatter_add", "setitem"})
PLACES = SUMS | {"index_copy"}  # (which replaces rows)
SETS = frozenset({operator.setitem})
MOST = 4096  # iterations looked at together


class Differ(Exception):
    """The iterations are not alike. ``node``: of the first iteration, where."""

    def __init__(self, reason: str, node: fx.Node):
        self.reason, self.node = reason, node
        super().__init__(reason)


class NoExperts(Differ):
    """They do not look like experts: nobody needs to be told."""


@dataclass
class Place:
    """One accumulation: ``anchor`` in the graph, and the operator that accumulates, which a branch may hold inside.

    base: the tensor that is added to, as a node of the graph. skips: conditions of the branch around it.
    """

    anchor: fx.Node
    inner: fx.Node
    base: fx.Node
    inside: dict[fx.Node, Any] = field(default_factory=dict)  # a branch's placeholders -> what the graph passes
    skips: list[fx.Node] = field(default_factory=list)

    @property
    def carried(self) -> bool:
        call = read_call(self.inner)
        return call is not None and not call.op.inplace

    def resolve(self, node: fx.Node) -> Any:
        """A branch's placeholder as what stands for it in the graph."""
        return self.inside.get(node, node)


@dataclass
class Unrolled:
    """E places as one loop. loop, total: the nodes that stand for it and for its carried result.

    stacked: the experts' own parameters. skipping: whether those of experts without rows do not run. drawn: dropouts.
    """

    places: list[Place]
    loop: fx.Node
    total: fx.Node | None
    stacked: list[fx.Node]
    skipping: bool
    drawn: list[fx.Node] = field(default_factory=list)

    def stacked_bytes(self) -> int:
        """The copy of the experts' own parameters, which is kept for backward."""
        values = [tensor_of(node) for node in self.stacked]
        return sum(value.numel() * value.itemsize for value in values if value is not None)

    def skip_unused(self, index: fx.Node, made: list[fx.Node]) -> None:
        """Once it is proven that iterations are skipped for experts without rows only: those get no gradients.

        made: the nodes that compute the routing index before the loop, if it is not an earlier one."""
        if not self.skipping or not self.stacked:
            return
        for node in made:
            self.stacked[0].prepend(node)
        for node in self.stacked:
            node.args = (index, *node.args[1:])

    def draw_elsewhere(self) -> None:
        """The layer draws the iterations' random numbers now."""
        for node in self.drawn:
            node.meta[DRAWN] = True


def is_branch(node: fx.Node) -> bool:
    return bool(node.op == "call_function" and node.target is expert_loop and node.args[1] == 1)


def place_of(node: fx.Node) -> Place | None:
    """The accumulation that a node is, if it is one."""
    call = read_call(node)
    if call is None:
        return None
    if call.name in PLACES:
        base = node.args[0] if node.args else None
        return Place(node, node, base) if isinstance(base, fx.Node) else None
    return place_in_branch(node) if is_branch(node) else None


def place_in_branch(node: fx.Node) -> Place | None:
    """A branch that does nothing but accumulate once, in place or as its only carried value."""
    call = certain(read_call(node))
    body = loop_body(node).graph
    inner: list[fx.Node] = []
    skips: list[fx.Node] = []
    for inside in body.nodes:
        if inside.op in ("placeholder", "output", "get_attr"):
            continue
        if call_name(inside) == "skip_iteration":
            if inner:
                return None
            skips.append(inside)
        elif call_name(inside) in PLACES:
            inner.append(inside)
        elif not only_computes(inside) and not adds_to_rows(inside) and not draws(inside):
            return None
    if len(inner) != 1 or len(call["carried"]) > 1 or drawn_for_nothing(body) is not None:
        return None
    place = Place(node, inner[0], node, given_to(node))
    place.skips = skips
    first = inner[0].args[0] if inner[0].args else None
    base = place.resolve(first) if isinstance(first, fx.Node) else None
    if not isinstance(base, fx.Node) or base.graph is not node.graph or any(b is not base for b in call["carried"]):
        return None
    results = body.output_node().args[0]
    if place.carried != (tuple(results) == (inner[0],)):  # type: ignore[arg-type]
        return None
    place.base = base
    return place


def drawn_for_nothing(body: fx.Graph) -> fx.Node | None:
    """A dropout of a body that neither its result is computed of nor what it writes or asks: it draws all the same."""
    wanted = computed_of(n for n in body.nodes if (n.op == "output" or not only_computes(n)) and not draws(n))
    return next((node for node in body.nodes if node not in wanted and draws(node)), None)


def adds_to_rows(node: fx.Node) -> bool:
    """``out[token] += rows`` adds in place to the copy that it took, and writes that back."""
    call = read_call(node)
    if call is None or call.name != "add" or not call.op.inplace or not isinstance(call["input"], fx.Node):
        return False
    copied = call["input"]
    taken = read_call(copied)
    if taken is None or taken.name != "getitem":
        return False
    return all(user is node or (user.target in SETS and user.args[2] is copied) for user in copied.users)


def added_rows(node: fx.Node) -> fx.Node | None:
    """Of ``out[token] = out[token] + rows``, whichever way it is spelled: the node that adds."""
    value = node.args[2] if node.target in SETS and len(node.args) > 2 else None
    if not isinstance(value, fx.Node):
        return None
    adds = [user for user in value.users if user is not node]
    if len(adds) == 1 and adds_to_rows(adds[0]) and adds[0].args[0] is value:
        value = adds[0]
    added = read_call(value)
    if added is None or added.name != "add" or not isinstance(added["input"], fx.Node):
        return None
    taken = read_call(added["input"])
    return value if taken is not None and taken.name == "getitem" and taken["input"] is node.args[0] else None


def accumulates(node: fx.Node) -> bool:
    """Whether one of PLACES adds its rows to those that are there: others replace them."""
    call = read_call(node)
    if call is None or call.name == "index_copy" or (call.name == "index_put" and not call["accumulate"]):
        return False
    return node.target not in SETS or added_rows(node) is not None


def groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Accumulations into one sum, in order, two or more; each of the same line of the program."""
    chains: dict[Any, list[fx.Node]] = {}
    found: list[list[fx.Node]] = []
    for node in graph.nodes:
        if not (is_branch(node) or operator_name(node.target) in SUMS):
            continue
        place = place_of(node)
        if place is None or (place.inner.target in SETS and added_rows(place.inner) is None):
            continue
        line = place.inner.meta.get("where"), place.inner.target
        key = (place.base, line) if place.carried else (chased(place.base), line)
        chain = chains.pop(key, None) if place.carried else chains.get(key)
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(node)
        if not place.carried:
            chains[key] = chain
        elif (result := result_of(place)) is not None:
            chains[result, line] = chain
    return [chain for chain in found if 2 <= len(chain) <= MOST]


def chased(node: fx.Node) -> fx.Node:
    """The tensor that in-place operators wrote into and handed on."""
    return behind(node, lambda call: call.name in PLACES and call.op.inplace)


def result_of(place: Place) -> fx.Node | None:
    """The node that holds a functional accumulation's result in the graph."""
    if place.anchor is place.inner:
        return place.anchor
    users = [u for u in place.anchor.users if u.target is operator.getitem and u.args[1] == 0]
    return users[0] if len(users) == 1 and len(place.anchor.users) == 1 else None


class Builder:
    """Builds the body of one loop out of the graphs behind its iterations."""

    def __init__(self, gm: fx.GraphModule, places: list[Place], storage: Storage):
        self.gm, self.places, self.storage = gm, places, storage
        self.count = len(places)
        self.body = fx.Graph()
        self.row = self.body.placeholder("row")
        self.row.meta["val"] = self.row_value()
        self.first = places[0].anchor
        self.carried = places[0].carried
        self.state = self.body.placeholder("sum")
        self.state.meta["val"] = places[0].base.meta.get("val")
        self.last_placeholder = self.state
        self.captures: dict[fx.Node, fx.Node] = {}
        self.known: dict[tuple[int, ...], Any] = {}
        self.read: set[fx.Node] = set()  # nodes of the graph that iterations compute, and what they read
        self.uses_row = False
        self.next_row: fx.Node | None = None
        self.stacked: list[fx.Node] = []
        self.skipping = any(place.skips for place in places)
        self.drawn: list[tuple[fx.Node, ...]] = []  # dropouts of the iterations, in the order of the body

    def row_value(self) -> Any:
        for node in self.places[0].anchor.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
                return value.fake_mode.shape_env.create_unbacked_symint() if value.fake_mode.shape_env else 0
        return 0

    # ------------------------------------------------------------------------------------------------------------------

    def build(self) -> fx.GraphModule:
        """The body. Raises Differ."""
        if len({len(place.skips) for place in self.places}) != 1:
            raise Differ("some iterations are skipped on a condition and others are not", self.places[0].inner)
        for conditions in zip(*(place.skips for place in self.places), strict=True):
            condition = self.argument(tuple(node.args[0] for node in conditions), conditions[0])
            skip = self.body.call_function(skip_iteration, (condition,))
            skip.meta.update(conditions[0].meta)
        inner = [place.inner for place in self.places]
        result = self.node(tuple(inner), sum_too=True)
        self.body.output((result,) if self.carried else ())
        if not self.uses_row:
            raise Differ("nothing in the iterations says which expert they are of", inner[0])
        self.check_order()
        self.check_draws(self.anchors())
        return fx.GraphModule(torch.nn.Module(), self.body)

    def argument(self, values: tuple[Any, ...], at: fx.Node) -> Any:
        """One argument of the body from those of the iterations."""
        first = values[0]
        if any(isinstance(v, fx.Node) for v in values):
            if not all(isinstance(v, fx.Node) for v in values):
                raise Differ(f"{target_name(at)} gets a tensor in some iterations and a number in others", at)
            return self.node(values)
        if isinstance(first, tuple | list):
            if not all(type(v) is type(first) and len(v) == len(first) for v in values):
                count = len(first)
                raise Differ(f"{target_name(at)} gets {count} arguments in one iteration, and others in another", at)
            return type(first)(self.argument(parts, at) for parts in zip(*values, strict=True))
        if isinstance(first, slice):
            if not all(isinstance(v, slice) for v in values):
                raise Differ(f"{target_name(at)} gets a slice in some iterations only", at)
            if all(type(v.start) is int and v.stop == v.start + 1 and v.step is None for v in values):
                return self.slice_of_one(self.argument(tuple(v.start for v in values), at))
            return slice(*(self.argument(tuple(getattr(v, n) for v in values), at) for n in ("start", "stop", "step")))
        if all(type(v) is type(first) and (v is first or v == first) for v in values):
            return first
        if values == tuple(range(self.count)) and all(type(v) is int for v in values):
            self.uses_row = True
            return self.row
        raise Differ(f"{target_name(at)} gets {', '.join(map(str, values[:4]))}… in the iterations", at)

    def slice_of_one(self, start: Any) -> slice:
        """``e : e + 1``."""
        if start is not self.row:
            return slice(start, start + 1, None)
        if self.next_row is None:
            self.next_row = self.body.call_function(operator.add, (self.row, 1))
            self.next_row.meta["val"] = self.row.meta["val"] + 1
        return slice(self.row, self.next_row, None)

    def node(self, nodes: tuple[fx.Node, ...], sum_too: bool = False) -> Any:
        """The body's node for what each iteration has a node of its own for."""
        resolved = tuple(place.resolve(node) for place, node in zip(self.places, nodes, strict=True))
        if not all(isinstance(node, fx.Node) for node in resolved):
            return self.argument(resolved, nodes[0])
        key = tuple(map(id, resolved))
        if key not in self.known:
            self.known[key] = self.make(resolved, sum_too)
        return self.known[key]

    def make(self, nodes: tuple[fx.Node, ...], sum_too: bool) -> Any:
        if not sum_too and self.is_sum(nodes):
            return self.state
        first = nodes[0]
        if all(node is first for node in nodes):
            return self.capture(first)
        if any(node in self.anchors() for node in nodes) and not sum_too:
            raise Differ("an iteration reads what an earlier one added to", first)
        if len(set(nodes)) == self.count and all(map(self.is_weight, nodes)):
            return self.family(nodes)
        if len(nodes) > 1 and (cut := column_cut(nodes)) is not None and cut[0].graph is self.gm.graph:
            return self.column(nodes, *cut)
        if any(node.op != first.op or node.target != first.target or node.op == "placeholder" for node in nodes):
            if all(one in other.all_input_nodes for one, other in itertools.pairwise(nodes)):
                raise Differ("an iteration goes on with what the one before it has computed", nodes[1])
            raise Differ(f"an iteration uses {first.name} where another uses something else", first)
        drawn = all(map(draws, nodes))
        if not sum_too and not drawn and not all(is_known(node) for node in nodes):
            raise Differ(f"{target_name(first)} in the iterations may have effects", first)
        if any(node.kwargs.keys() != first.kwargs.keys() for node in nodes):
            raise Differ(f"{target_name(first)} is called in different ways", first)
        given = [(*node.args[:2], added_rows(node)) if sum_too and node.target in SETS else node.args for node in nodes]
        args = self.argument(tuple(given), first)
        kwargs = {name: self.argument(tuple(node.kwargs[name] for node in nodes), first) for name in first.kwargs}
        self.read.update(node for node in nodes if node.graph is self.gm.graph)
        self.drawn += [nodes] if drawn else []
        made = self.body.create_node(first.op, first.target, args, kwargs)
        made.meta.update(first.meta)
        return made

    def anchors(self) -> set[fx.Node]:
        return {place.anchor for place in self.places} | {place.inner for place in self.places}

    def is_sum(self, nodes: tuple[fx.Node, ...]) -> bool:
        if self.carried:
            return all(node is place.base for node, place in zip(nodes, self.places, strict=True))
        return all(chased(node) is chased(self.places[0].base) for node in nodes)

    def is_weight(self, node: fx.Node) -> bool:
        """A parameter of its own: an input of the graph."""
        return node.op == "placeholder" and node.graph is self.gm.graph and tensor_of(node) is not None

    def placeholder(self, name: str, value: Any) -> fx.Node:
        with self.body.inserting_after(self.last_placeholder):
            made = self.body.placeholder(name)
        made.meta["val"] = value
        self.last_placeholder = made
        return made

    def capture(self, outer: fx.Node) -> fx.Node:
        """A tensor that is the same in every iteration."""
        if outer.graph is not self.gm.graph:
            raise Differ("the iterations share something that a branch computes", outer)
        if outer not in self.captures:
            if not outer < self.first and outer.op != "placeholder":
                raise Differ(f"{outer.name} is computed after the first iteration", outer)
            made = self.captures[outer] = self.placeholder(f"{outer.name}_outer", outer.meta.get("val"))
            made.meta.update(outer.meta)
        return self.captures[outer]

    def before(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node of the graph before the first iteration."""
        with self.gm.graph.inserting_before(self.first):
            return self.kept(add_call(self.gm.graph, self.first, target, *args, **kwargs))

    def kept(self, made: fx.Node) -> fx.Node:
        self.storage.add(made)
        return made

    def column(self, nodes: tuple[fx.Node, ...], whole: fx.Node, keeps_axis: bool) -> fx.Node:
        """Column e of a matrix that the program has cut apart."""
        self.uses_row = True
        self.read.update(nodes)
        index: Any = (..., self.slice_of_one(self.row) if keeps_axis else self.row)
        made = self.body.call_function(operator.getitem, (self.capture(whole), index))
        made.meta.update(nodes[0].meta)
        return made

    def family(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """The expert's own parameter: row e of the parameters stacked."""
        values = [tensor_of(node) for node in nodes]
        alike = {(sizes_key(v.shape), v.dtype, v.device) for v in values if v is not None}
        if len(alike) != 1 or not all(isinstance(size, int) for size in next(iter(alike))[0]):
            used = min(computed_of([self.first]).intersection(nodes[0].users), default=nodes[0])
            raise Differ("the experts' parameters differ in shape or dtype", used)
        self.uses_row = True
        self.read.update(nodes)
        stacked = self.before(stack_experts, None, *nodes)
        self.stacked.append(stacked)
        picked = self.body.call_function(pick, (self.capture(stacked), self.row))
        picked.meta.update(nodes[0].meta)
        return picked

    # ------------------------------------------------------------------------------------------------------------------

    def check_draws(self, ends: set[fx.Node]) -> None:
        """Random numbers must be drawn as the graph draws them: iteration by iteration, in the body's order, nobody
        else between; and what was made of them must end in ``ends``, so that the graph's own dropouts go."""
        if not self.drawn:
            return
        order = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        inner = {place.inner.graph: (place, {n: i for i, n in enumerate(place.inner.graph.nodes)})
                 for place in self.places if place.inner.graph is not self.gm.graph}  # fmt: skip

        def position(node: fx.Node) -> tuple[int, int]:
            if node in order:
                return order[node], -1
            place, inside = inner[node.graph]
            return order[place.anchor], inside[node]

        places = [position(nodes[iteration]) for iteration in range(self.count) for nodes in self.drawn]
        first = self.drawn[0][0]
        own = {node for nodes in self.drawn for node in nodes}
        if any(a >= b for a, b in itertools.pairwise(places)):
            raise Differ("the iterations draw random numbers in another order than one expert after another", first)
        begin, end = places[0][0], places[-1][0]
        for node, i in order.items():
            if begin <= i <= end and node not in own and node not in self.anchors() and may_draw(node):
                raise Differ(f"{target_name(node)} stands between random numbers that the iterations draw", node)
        pending = [node for node in own if node in order and node not in ends]
        while pending:
            node = pending.pop()
            for user in node.users:
                if user not in ends and user not in self.read:
                    raise Differ("what dropout made is used outside of the iterations", user)
                if user not in ends:
                    pending.append(user)

    def check_order(self) -> None:
        """Computing all iterations where the first one added its rows must read what they read where they stand."""
        graph = self.gm.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        anchors = {place.anchor for place in self.places}
        base = {place.base for place in self.places}
        rows = {node for node in self.read if adds_to_rows(node)}
        begin = min(order[node] for node in [*self.read, *anchors] if node.op != "placeholder")
        end = max(order[anchor] for anchor in anchors)
        for node in order:
            if begin <= order[node] <= end and node not in anchors and has_effect(node):
                raise Differ(f"{target_name(node)} stands between the iterations", node)
        touched = {*self.read, *(argument for node in self.read for argument in node.all_input_nodes), *self.captures}
        touched -= base | anchors
        for writer, targets in self.storage.writers.items():
            if writer not in order or not begin <= order[writer] <= end or writer in anchors or writer in rows:
                continue
            if any(self.storage.share(target, node) for target in targets for node in touched | base):
                raise Differ(f"{target_name(writer)} changes between the iterations what they use", writer)
        self.check_sum(order, order[self.first], end, anchors | rows)

    def check_sum(self, order: dict[fx.Node, int], begin: int, end: int, own: set[fx.Node]) -> None:
        """Nobody but the iterations' own accumulation reads the sum while it grows."""
        chain = {place.base for place in self.places[1:]} if self.carried else {self.places[0].base}
        names = chain if self.carried else self.storage.family(self.places[0].base)
        for name in names:
            for user in name.users:
                at = order.get(user, -1)
                if at < begin or (at > end and not self.carried) or user in own or user in names & chain:
                    # (whoever comes after the last iteration reads all of a sum in place, and a part of another)
                    continue
                rows = self.carried and user.target is operator.getitem  # that the accumulation itself reads
                if not rows and user not in self.read:
                    raise Differ(f"{target_name(user)} reads the sum between the iterations", user)
                self.check_read(user, own | chain)

    def check_read(self, read: fx.Node, ends: set[fx.Node]) -> None:
        """What an iteration reads of the sum ends in the iterations' own accumulation: nobody else is to see it."""
        pending, seen = [read], set[fx.Node]()
        while pending:
            for user in pending.pop().users:
                if user in ends or user in seen:
                    continue
                if user not in self.read:
                    raise Differ(f"{target_name(user)} sees what an iteration has read of the sum", user)
                pending.append(user)
                seen.add(user)


OPENED = "opened"  # in a branch's meta: all that it does is done elsewhere (hoisted_conditionals.py)
DRAWN = "drawn elsewhere"  # in a node's meta: what draws the numbers of this dropout stands where the iterations stood


def may_draw(node: fx.Node) -> bool:
    """Whether an operator may take random numbers from torch's generator."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    call = read_call(node)
    if call is None:
        return not only_computes(node)
    if call.name == "expert_loop":
        return not node.meta.get(OPENED) and any(map(may_draw, loop_body(node).graph.nodes))
    return draws(node) or call.name == "draw_noise"


def has_effect(node: fx.Node) -> bool:
    """Whether a node is there for something else than its value: a switch of the grad mode, autocast, a mark, a branch
    on data where the graph may be left: an expert behind it may never run, and then has no gradient."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    call = read_call(node)
    if call is not None:
        iterations = call.name == "expert_loop" and not is_branch(node)
        return iterations or call.name in ("set_grad_enabled", "skip_iteration", "require_branch")
    return not holds_values(value_of(node)) and not is_size(node)


def holds_values(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(holds_values, value))
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool)


def is_known(node: fx.Node) -> bool:
    """Whether the node is there for its value only (an operator that the proof does not know stops it later)."""
    return only_computes(node) or adds_to_rows(node) or is_size(node) or makes_new(node)


def build_loop(gm: fx.GraphModule, anchors: list[fx.Node], storage: Storage) -> Unrolled:
    """The loop node for these accumulations, before the first. Raises Differ; the graph may hold new nodes then."""
    places = [place for place in map(place_of, anchors) if place is not None]
    assert len(places) == len(anchors)
    builder = Builder(gm, places, storage)
    return loop_of(gm, builder, builder.build())


def loop_of(gm: fx.GraphModule, builder: Builder, body: fx.GraphModule) -> Unrolled:
    """The loop node of a body that was built, before the first iteration."""
    places, storage = builder.places, builder.storage
    name = added_body(gm, "iterations", body)
    base = places[0].base
    carried = (base,) if builder.carried else ()
    captures = (() if builder.carried else (chased(base),)) + tuple(builder.captures)
    first, at = builder.first, places[0].inner
    with gm.graph.inserting_before(first):
        get_body = stands_at(gm.graph.get_attr(name), at)
    get_body.meta["val"] = None
    loop = put_before(first, expert_loop, (get_body, len(places), carried, captures), at, value_of(carried))
    total = put_before(first, operator.getitem, (loop, 0), at, value_of(base)) if builder.carried else None
    for node in (get_body, loop, *([total] if total is not None else [])):
        storage.add(node)
    drawn = [node for nodes in builder.drawn for node in nodes if node.graph is gm.graph]
    return Unrolled(places, loop, total, builder.stacked, builder.skipping, drawn)


def remove(iterations: Unrolled, storage: Storage) -> list[fx.Node]:
    """Takes the iterations out of the graph, where the loop stands for them. Returns what they alone may use."""
    loose: list[fx.Node] = []
    for place in reversed(iterations.places):
        stand_in = iterations.total if iterations.total is not None else chased(place.base)
        added = added_rows(place.anchor)
        results = [place.anchor]
        if place.carried and (result := result_of(place)) is not None and result is not place.anchor:
            results.insert(0, result)
        for node in results:
            if node.users:
                node.replace_all_uses_with(stand_in)
            loose += erase(node, storage)
        if added is not None and not added.users:
            loose += erase(added, storage)
    gone = {node for node in loose if node not in storage.roots}
    return [node for node in dict.fromkeys(loose) if node.op != "placeholder" and node not in gone]


def erase(node: fx.Node, storage: Storage) -> list[fx.Node]:
    used = node.all_input_nodes
    node.graph.erase_node(node)
    storage.take_out(node)
    return used
