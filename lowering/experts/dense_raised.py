"""All experts on all tokens [batch, T, D], masked by a gate [batch, T, 1] or [batch, 1, 1], as the same sum on a matrix
of these tokens (dense.py). What works on the last axis alone is the same there; a gate is repeated along the axes that
it has not. Where the experts become no operator, the sum is as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.dense import PRODUCTS, Chain, NoExperts, Stacked, added, stacked_sums
from moebius.lowering.experts.views import FULL
from moebius.lowering.experts.zeros import one_of
from moebius.lowering.operators import ELEMENTWISE, Call, is_pure, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import add_call, computed_of, infer, same_shape, shape_of, stands_at

COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le", "logical_not", "and"})
BY_ELEMENT = ELEMENTWISE | COMPARISONS | {"cast", "where", "masked_fill", "contiguous"}
REDUCTIONS = frozenset({"sum", "any"})
MOST = 50_000  # nodes of all iterations


class Raised(Chain):
    """Such a sum as additions of matrices, and back again."""

    def normalise(self, storage: Storage) -> None:
        super().normalise(storage)
        storage = Storage(self.place.graph)
        first, last = self.nodes[0], self.nodes[-1]
        parts = [added(node) for node in self.nodes]
        base = parts[0][0] if parts[0] is not None else None
        if not isinstance(base, fx.Node):
            raise NoExperts("there is nothing that is added to", first)
        for node in self.nodes[:-1]:
            if len(node.users) != 1:
                raise NoExperts("the sum is read between the iterations", node)
        leaves = shared(parts[0][1], parts[1][1])  # type: ignore[index]
        if first in leaves or any(part is not None and part[1] in leaves for part in parts):
            raise NoExperts("what is added is made of the sum: layers one after another", first)
        ends = [part[1] for part in parts if part is not None]
        start = min((node for end in ends for node in behind(end, leaves)), default=first)
        flat = Flat(base, leaves, start, storage)
        with first.graph.inserting_before(first):
            total = add_call(first.graph, first, torch.reshape, base, (-1, (shape_of(base) or ())[-1]))
        nodes = []
        for node, part in zip(self.nodes, parts, strict=True):
            assert part is not None
            rows = flat.of(part[1])
            with node.graph.inserting_before(node):
                total = add_call(node.graph, node, torch.add, total, rows)
            nodes.append(total)
        with last.graph.inserting_before(last):
            whole = add_call(last.graph, last, torch.reshape, total, (*flat.sizes(last), (shape_of(last) or ())[-1]))
        self.swap(last, whole)
        self.unread += [last]
        self.nodes = nodes
        Chain.take_masks(self, Storage(last.graph))

    def take_masks(self, storage: Storage) -> None:
        """Later, of the matrices."""


class RaisedStack(Raised, Stacked):
    """``(torch.stack([expert(x) for …], 2) * gates[..., None]).sum(2)`` of x [batch, T, D] in this way."""


def stacks(graph: fx.Graph) -> list[Chain]:
    """The sums over a stack of the experts' rows."""
    found = stacked_sums(graph)
    kinds = [Stacked if len(shape_of(total) or ()) == 2 else RaisedStack for total, _ in found]
    return [kind(total, parts) for kind, (total, parts) in zip(kinds, found, strict=True)]


def shared(one: fx.Node, other: fx.Node) -> set[fx.Node]:
    """What both are computed of."""
    return behind(one, set()) & behind(other, set())


def behind(node: fx.Node, leaves: set[fx.Node]) -> set[fx.Node]:
    """What a node is computed of, itself included, up to the leaves and what the graph is given."""
    found = computed_of([node], lambda at: [] if at in leaves else at.all_input_nodes)
    return {at for at in found if at not in leaves and at.op not in ("placeholder", "get_attr")}


def is_projection(call: Call) -> bool:
    """Whether it multiplies the last axis of rows with a matrix."""
    weight = call["weight"] if call.name == "linear" else call["other"]
    rows = call["input"]
    return isinstance(rows, fx.Node) and isinstance(weight, fx.Node) and len(shape_of(weight) or ()) == 2


class Flat:
    """Values of the iterations with the axes before the last as one. base: a tensor with all of these axes. leaves:
    what the iterations share. start: the first node that they do not.

    A value is either [*axes, F] or, where ``lead`` says so, [*axes]."""

    def __init__(self, base: fx.Node, leaves: set[fx.Node], start: fx.Node, storage: Storage):
        self.leaves, self.start, self.storage = leaves, start, storage
        self.axes = (shape_of(base) or ())[:-1]
        self.known: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.whole = next((node for node in leaves if node < start and same_shape(self.own(node), self.axes)), None)

    def own(self, node: fx.Node, lead: bool = False) -> tuple | None:
        """The axes of a value before the last."""
        shape = shape_of(node)
        return shape if shape is None or lead else shape[:-1]

    def sizes(self, at: fx.Node) -> tuple:
        """The axes, as arguments of an operator that is written before a node."""
        if self.whole is None and not all(type(n) is int for n in self.axes):
            raise NoExperts("how many tokens there are is not known before the iterations", at)
        return tuple(n if type(n) is int else add_call(at.graph, at, "size", self.whole, i)
                     for i, n in enumerate(self.axes))  # fmt: skip

    def of(self, node: fx.Node, lead: bool = False) -> fx.Node:
        """Raises NoExperts for what does not go along the last axis."""
        if (node, lead) not in self.known:
            if len(self.known) > MOST:
                raise NoExperts("too much is in the iterations", node)
            outside = node in self.leaves or node.op in ("placeholder", "get_attr")
            self.known[node, lead] = self.leaf(node, lead) if outside else self.made(node, lead)
        return self.known[node, lead]

    def leaf(self, node: fx.Node, lead: bool) -> fx.Node:
        own, width = self.own(node, lead), (shape_of(node) or (0,))[-1]
        if own is None or len(own) != len(self.axes) or not (lead or type(width) is int):
            raise NoExperts(f"{node.name} has other axes than the tokens", node)
        before = self.start if node < self.start or node.op in ("placeholder", "get_attr") else node.next
        with before.graph.inserting_before(before):
            if not same_shape(own, self.axes):
                if not all(same_size(a, b) or (type(a) is int and a == 1) for a, b in zip(own, self.axes, strict=True)):
                    raise NoExperts(f"{node.name} has other axes than the tokens", node)
                whole = self.sizes(before) if lead else (*self.sizes(before), width)
                node = add_call(before.graph, before, "expand", node, whole)
            return add_call(before.graph, before, torch.reshape, node, (-1,) if lead else (-1, width))

    def made(self, node: fx.Node, lead: bool) -> fx.Node:
        call, shape = read_call(node), shape_of(node)
        if call is None or call.op.inplace or shape is None or len(shape) != len(self.axes) + (not lead):
            raise NoExperts(f"{target_name(node)} is not known to go along the last axis", node)
        if self.storage.writer_between(node, node.graph.output_node()) is not None:
            raise NoExperts("what an iteration computes is changed in place", node)
        args = self.arguments(call, lead)
        if args is None:
            raise NoExperts(f"{target_name(node)} is not known to go along the last axis", node)
        with node.graph.inserting_before(node):
            copy = stands_at(node.graph.create_node(node.op, node.target, *args), node)
        try:
            copy.meta["val"] = infer(copy)
        except Exception as error:
            raise NoExperts(f"{type(error).__name__} on a matrix of tokens", node) from None
        made = shape_of(copy)
        if made is None or len(made) != 2 - lead or not (lead or same_size(made[1], shape[-1])):
            raise NoExperts(f"{target_name(node)} gives something else of a matrix of tokens", node)
        return copy

    def arguments(self, call: Call, lead: bool) -> tuple[tuple, dict[str, Any]] | None:
        """The arguments of the same operator on flat values: None where it is none of the last axis."""
        node, last = call.node, (-1, len(self.axes))
        if call.name in PRODUCTS - {"addmm"} and not lead and is_projection(call):
            rows = call["input"]
            return fx.map_arg((node.args, node.kwargs), lambda n: self.of(n) if n is rows else n)
        if call.name in BY_ELEMENT or (call.name == "dropout" and is_pure(node)):
            return fx.map_arg((node.args, node.kwargs), lambda n: self.operand(n, lead))
        source = call.args.get("input")
        if not isinstance(source, fx.Node):
            return None
        if call.name in REDUCTIONS and call["keepdim"] is not lead and call.args.get("dtype") is None:
            return ((self.of(source), -1, not lead), {}) if one_of(call["dim"]) in last else None
        if call.name == "unsqueeze" and not lead and call["dim"] in last:
            return (self.of(source, True), 1), {}
        if call.name == "select" and lead and call["dim"] in last and type(call["index"]) is int:
            return (self.of(source), 1, call["index"]), {}
        return self.picked(call, source, lead) if call.name == "getitem" else None

    def operand(self, node: fx.Node, lead: bool) -> fx.Node:
        """Of an operator on each element: a vector along the last axis, or one number, is as it was."""
        shape = shape_of(node)
        return node if shape is not None and len(shape) < (1 if lead else 2) else self.of(node, lead)

    def picked(self, call: Call, source: fx.Node, lead: bool) -> tuple[tuple, dict[str, Any]] | None:
        """``gates[..., e]``, ``gates[..., e : e + 1]``, ``gate[..., None]``, ``h.chunk(2, -1)[0]``."""
        keys = call["index"]
        if shape_of(source) is None:
            return ((self.pieces(source), keys), {}) if type(keys) is int and not lead else None
        keys = keys if isinstance(keys, tuple) else (keys,)
        before = keys[:-1]
        rank = len(shape_of(source) or ())
        key = keys[-1]
        if key is None and not lead:
            if before == (...,) or before == (FULL,) * rank:
                return (self.of(source, True), (FULL, None)), {}
            one = before and type(before[-1]) is int and before[:-1] in ((...,), (FULL,) * (rank - 1))
            return ((self.of(source), (FULL, before[-1], None)), {}) if one else None
        if not (before == (...,) or before == (FULL,) * (rank - 1)):
            return None
        plain = isinstance(key, slice) and all(type(v) is int or v is None for v in (key.start, key.stop, key.step))
        if type(key) is int if lead else plain:
            return (self.of(source), (FULL, key)), {}
        return None

    def pieces(self, node: fx.Node) -> fx.Node:
        """``h.chunk(2, -1)``, ``h.split(n, -1)``."""
        if (node, False) not in self.known:
            call = read_call(node)
            if call is None or call.name not in ("chunk", "split") or call["dim"] not in (-1, len(self.axes)):
                raise NoExperts(f"{target_name(node)} is not known to go along the last axis", node)
            if not isinstance(call["input"], fx.Node) or node in self.leaves:
                raise NoExperts(f"{target_name(node)} is of all iterations", node)
            how = call["chunks"] if call.name == "chunk" else call["split_size_or_sections"]
            rows = self.of(call["input"])
            with node.graph.inserting_before(node):
                copy = stands_at(node.graph.create_node(node.op, node.target, (rows, how, 1)), node)
            copy.meta["val"] = infer(copy)
            self.known[node, False] = copy
        return self.known[node, False]
