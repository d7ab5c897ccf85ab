"""Values [batch, T, D] whose axes before the last are one: [T, D]. What works on the last axis alone is the same there.

Of all experts on all tokens, masked by a gate [batch, T, 1] or [batch, 1, 1], the same sum on a matrix (dense.py); a
gate is repeated along the axes that it has not. Of experts on rows with several axes, ``expert(slots[e])`` of [batch,
slots, D], those on a matrix of these rows: they may become an operator (blocks.py), or are as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.blocks import expert_rows, products_by_line
from moebius.lowering.experts.missed_experts import MissedExperts, find_overlooked
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.experts.unrolled_loops import NoExperts
from moebius.lowering.experts.views import FULL
from moebius.lowering.experts.zeros import one_of
from moebius.lowering.operators import ELEMENTWISE, PRODUCTS, Call, is_pure, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import add_call, computed_of, erase_new, infer, rank_of, same_shape, shape_of, stands_at

COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le", "logical_not", "and"})
BY_ELEMENT = ELEMENTWISE | COMPARISONS | {"cast", "where", "masked_fill", "contiguous"}
REDUCTIONS = frozenset({"sum", "any"})
MOST = 50_000  # nodes of all iterations


def as_matrices(
    base: fx.Node | None, parts: list[fx.Node], place: fx.Node, last: fx.Node
) -> tuple[Flat, fx.Node | None, list[fx.Node]]:
    """What is added to, and what each iteration adds, [*axes, D], as matrices before ``last``. Raises NoExperts."""
    leaves = behind(parts[0], set()) & behind(parts[1], set())
    if not leaves.isdisjoint(parts):
        raise NoExperts("what is added is made of the sum: layers one after another", place)
    start = min((node for part in parts for node in behind(part, leaves)), default=place)
    flat = Flat(last, leaves, start, Storage(last.graph))
    if base is not None:
        with last.graph.inserting_before(last):
            base = add_call(last.graph, last, torch.reshape, base, (-1, (shape_of(base) or ())[-1]))
    return flat, base, [flat.of(part) for part in parts]


def behind(node: fx.Node, leaves: set[fx.Node]) -> set[fx.Node]:
    """What a node is computed of, itself included, up to the leaves and what the graph is given."""
    found = computed_of([node], lambda at: [] if at in leaves else at.all_input_nodes)
    return {at for at in found if at not in leaves and at.op not in ("placeholder", "get_attr")}


def is_projection(call: Call) -> bool:
    """Whether it multiplies the last axis of rows with a matrix."""
    weight = call["weight"] if call.name == "linear" else call["other"]
    rows = call["input"]
    return isinstance(rows, fx.Node) and isinstance(weight, fx.Node) and rank_of(weight) == 2


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
        rank = rank_of(source)
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


# ----------------------------------------------------------------------------------------------------------------------
# Experts on rows with several axes
# ----------------------------------------------------------------------------------------------------------------------


def flatten_rows(work: Work) -> list[Provisional]:
    """Writes the experts of one line so, two or more of them."""
    graph = work.gm.graph
    found, missed = list[Provisional](), list[MissedExperts]()
    lines = products_by_line(graph, 3)
    storage = Storage(graph) if lines else None
    for nodes in lines:
        own = {node: set(expert_rows(node, rank_of(node)) or ()) for node in nodes}
        alone = {node: rows.pop() for node, rows in own.items() if len(rows) == 1}
        if len(set(alone.values())) < len(alone):  # who has which rows does not say that these are experts
            missed = missed or find_overlooked(graph)
            alone = {} if all(one.nodes.isdisjoint(alone) for one in missed) else alone
        if storage is not None and len(alone) > 1:
            found += [flat for down, rows in alone.items() if (flat := written(down, rows, storage)) is not None]
    return found


def written(down: fx.Node, rows: fx.Node, storage: Storage) -> Provisional | None:
    """The same computation on a matrix, before each node its own."""
    graph = down.graph
    before = set(graph.nodes)
    try:
        if storage.writer_between(rows, graph.output_node()) is not None:
            raise NoExperts("the rows are changed in place", rows)
        flat = Flat(rows, {rows}, min(node for node in behind(down, {rows}) if rows < node), storage)
        core = flat.of(down)
        with graph.inserting_before(down):
            whole = add_call(graph, down, torch.reshape, core, (*flat.sizes(down), (shape_of(down) or ())[-1]))
    except NoExperts:
        erase_new(graph, before)
        return None
    for node in [node for node in graph.nodes if node not in before]:  # what another product may read
        storage.add(node)
    down.replace_all_uses_with(whole)
    return Provisional(down, whole, core)
