"""Experts that the operator has not got, projection by projection: the rows of all experts are sorted once, and what a
iteration computes of its rows is computed of all of them, each projection with the matrix of each row's own expert
(kernels.projection). So are experts of one projection, or of many, with low-rank additions, norms, residuals, routing
weights or dropout between. The proof is that of the operator (proof.py) as far as it is about iterations and routing;
about the rows it is that each node is a row function (rules_computed.py).

The rows lie in the order in which the iterations would run, and so are sums taken and random numbers drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.autocast import autocast_at
from moebius.lowering.experts import proof, unrolled_loops
from moebius.lowering.experts.claims import Claim, Refused, known, what_is_added
from moebius.lowering.experts.facts import (
    Fact,
    Invariant,
    Items,
    OwnVector,
    RowFunction,
    Rows,
    RowWeight,
    Slice,
)
from moebius.lowering.experts.proof import Fault, Step
from moebius.lowering.experts.reader import Reader
from moebius.lowering.experts.rules_rows import ADDED
from moebius.lowering.operators import PRODUCTS, Call, draws, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import certain, computed_of, dtype_of, shape_of, tensor_of

FLOATS = proof.FLOATS
# Operators whose result is their argument, where the two have one fact.
SAME = frozenset({"contiguous", "clone", "reshape", "flatten", "squeeze", "expand", "dropout"})
LISTS = frozenset({"nonzero", "argwhere", "unique"})
VIEWS = frozenset({"getitem", "reshape", "flatten", "squeeze", "unbind", "cast", "tolist", "select"})


@dataclass(kw_only=True)
class ByRow(Claim):
    """rows: the body's node of the rows that are added, scaled by ``factor``. nodes: what computes them, in order, all
    row functions; leaves: what these read that is none of them, in order."""

    rows: fx.Node
    factor: float
    nodes: list[fx.Node] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)

    @property
    def facts(self) -> list[Fact]:
        return [self.reader.facts[node] for node in self.leaves]

    @property
    def lookups(self) -> list[Rows]:
        return list(dict.fromkeys(fact for fact in self.facts if isinstance(fact, Rows)))

    @property
    def slices(self) -> list[Slice]:
        return [fact for fact in self.facts if isinstance(fact, Slice)]

    @property
    def dropouts(self) -> list[Call]:
        """Those that draw numbers, in the order of an iteration."""
        return [call for node in self.nodes if draws(node) and (call := read_call(node)) is not None]


def make_claim(reader: Reader, storage: Storage) -> ByRow:
    """The claim, or Refused where the rows are made of something else than rows."""
    total = what_is_added(reader)
    known(total.rows, "row by row", total.node)
    rows, factor = added_rows(total.node)
    claim = ByRow(reader=reader, sum=total, storage=storage, weights=(), rows=rows, factor=factor)

    def onwards(node: fx.Node) -> list[fx.Node]:
        before, fact = same_as(reader, node), reader.facts[node]
        if before is not None:
            return [before]
        if is_leaf(fact):
            claim.leaves.append(node)
            return []
        if not isinstance(fact, RowFunction | OwnVector | Items):
            raise Refused("row by row", f"{target_name(node)} is computed of something else than rows", node)
        claim.nodes.append(node)
        return node.all_input_nodes

    computed_of([rows], onwards)
    claim.leaves.sort()
    claim.nodes.sort()
    claim.weights = tuple(dict.fromkeys(fact for fact in claim.facts if isinstance(fact, RowWeight)))
    claim.count_experts()
    return claim


def is_leaf(fact: Fact) -> bool:
    return isinstance(fact, Rows | RowWeight | Slice | Invariant)


def same_as(reader: Reader, node: fx.Node) -> fx.Node | None:
    """The argument that a node only passes on."""
    call = read_call(node)
    if call is None or call.name not in SAME or not isinstance(call["input"], fx.Node):
        return None
    fact = reader.facts[node]
    return call["input"] if isinstance(fact, RowFunction) and reader.facts[call["input"]] == fact else None


def added_rows(node: fx.Node) -> tuple[fx.Node, float]:
    """(the rows that an accumulation adds, what they are scaled by)."""
    call = certain(read_call(node))
    if call.name in ADDED:
        return call[ADDED[call.name]], call.args.get("alpha", 1.0)
    add = unrolled_loops.added_rows(node)  # out[token] = out[token] + rows
    added = certain(read_call(add) if add is not None else None)
    return added["other"], 1.0


# ----------------------------------------------------------------------------------------------------------------------
# The steps
# ----------------------------------------------------------------------------------------------------------------------


def some_projection(claim: ByRow) -> Fault | None:
    """There is a projection with weights of the experts: else nothing is gained. (The only step that is not about what
    is right.)"""
    if any(len(piece.axes) == 2 for piece in claim.slices):
        return None
    return "the iterations project nothing with weights of their expert", claim.node


def one_place(claim: ByRow) -> Fault | None:
    """All rows are those of one selection."""
    facts = [claim.reader.facts[node] for node in (*claim.nodes, *claim.leaves)]
    for node, fact in zip((*claim.nodes, *claim.leaves), facts, strict=True):
        for one in fact.items if isinstance(fact, Items) else (fact,):
            if isinstance(one, RowFunction) and one.selection != claim.selection:
                return f"{target_name(node)} is of rows of another selection", node
    return None


def as_many(claim: ByRow) -> Fault | None:
    """What is looked up by token, the routing index and the result have as many rows; the weights as many experts."""
    index, target = shape_of(claim.index), shape_of(proof.target_of(claim))
    made = shape_of(claim.rows)
    if index is None or target is None or made is None or len(target) != 2 or len(made) != 2:
        return "a shape is not known, or the result has not two axes", claim.node
    for one in (target, *(shape_of(rows.source.node) for rows in claim.lookups)):
        if one is None or not same_size(one[0], index[0]):
            return f"something has {one and one[0]} rows and the routing index {index[0]}", claim.node
    if not same_size(made[1], target[1]):
        return f"rows of width {made[1]} are added to a result of width {target[1]}", claim.node
    for piece in claim.slices:
        shape = shape_of(piece.weight.node)
        if shape is None or not (shape[0] == claim.experts if claim.limit is None else shape[0] >= claim.experts):
            return "the weights do not hold the same number of experts", claim.node
    return None


def one_dtype(claim: ByRow) -> Fault | None:
    """Each projection is computed in the dtype of its operands, or in autocast's, and all in floating point."""
    casts = {to for _, to in autocast_at(claim.reader.loop)}
    for node in claim.nodes:
        if (call := read_call(node)) is not None and call.name in PRODUCTS:
            own, found = dtype_of(node), set(filter(None, map(dtype_of, node.all_input_nodes)))
            if own not in FLOATS:
                return "a projection is not in floating point", node
            if found != {own} and own not in casts:
                return f"a projection in {own} is of {', '.join(map(str, found))}", node
    return None


def drawn_in_order(claim: ByRow) -> Fault | None:
    """Random numbers are drawn as the iterations draw them: the experts in ascending order, rows of whole memory."""
    for call in claim.dropouts:
        value = tensor_of(call.node)
        if value is None or value.device.type != "cpu":
            return "dropout draws its numbers expert by expert, which is followed on a CPU alone", call.node
        if not isinstance(value.shape[1], int) or not isinstance(call["p"], float | int):
            return "what dropout draws is not known", call.node
        given = tensor_of(call["input"])
        if given is None or not lies_in_rows(given):
            return "dropout draws its numbers as its input lies in memory, and that does not lie in rows", call.node
        if claim.selection.keep:
            return "dropout draws its numbers, and some slots are dropped", call.node
        if claim.limit is None and not is_ascending(claim.reader.call["source"]):
            return "dropout draws its numbers expert by expert, and it is not known in which order", call.node
    return None


def lies_in_rows(value: torch.Tensor) -> bool:
    """Whether memory holds one row after another (perhaps a part of wider ones)."""
    step = value.stride(0)
    return same_size(value.stride(1), 1) and isinstance(step, int) and step >= value.shape[1]


def is_ascending(source: Any) -> bool:
    """Whether a list of experts is certainly sorted."""
    node = source
    while isinstance(node, fx.Node) and (call := read_call(node)) is not None:
        if call.name in LISTS:
            return call.name != "unique" or call["sorted"] is True
        if call.name not in VIEWS or (call.name == "getitem" and reverses(call["index"])):
            return False
        node = call["input"]
    return False


def reverses(index: Any) -> bool:
    """Whether an index may change the order of rows."""
    keys = index if isinstance(index, tuple) else (index,)
    return any(isinstance(key, fx.Node | list) for key in keys)


def vectors_unchanged(claim: ByRow) -> Fault | None:
    """Nothing writes into the experts' own vectors between the loop and the backward through it: a loop keeps the
    vectors, and here each row has a copy of its own. (Of tokens and routing weights a loop keeps copies too.)"""
    return proof.changed_before_backward(claim, [p.weight.node for p in claim.slices if len(p.axes) == 1])


SHARED = ("known operators", "nothing else written", "nothing else drawn", "one sum", "own storage",
          "every expert once", "harmless skips", "allowed routing", "rows by token", "tokens once",
          "routing weights", "gradients", "routing unchanged", "routed again")  # fmt: skip
STEPS: tuple[Step, ...] = (
    *(step for step in proof.STEPS if step.name in SHARED),
    Step("projections", some_projection),
    Step("one place", one_place),
    Step("sizes", as_many),
    Step("one dtype", one_dtype),
    Step("drawn in order", drawn_in_order),
    Step("vectors unchanged", vectors_unchanged),
)
