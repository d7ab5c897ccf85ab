"""Projections of experts in phases: all of the first one joined, an activation of the whole, and cut up again.

    h = torch.cat([linear(part, w1[e]) for e, part in enumerate(x.split(sizes))])
    y = torch.cat([linear(part, w2[e]) for e, part in enumerate(act(h).split(sizes))])

Where what is between is a function of each row by itself, and the cuts are those of the parts that were joined, piece e
is that function of part e. So written, each expert stands by itself and may become part of an operator
(blocks.py); where none of them does, the pieces are as they were.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.operators import ELEMENTWISE, PRODUCTS, is_pure, read_call
from moebius.lowering.torch_private import same_size, set_grad_enabled
from moebius.lowering.values import certain, infer, shape_of

JOINS = frozenset({torch.cat, torch.concat, torch.concatenate})
ROWS_FIRST = PRODUCTS - {"addmm"}  # the rows are the first operand
ALONG_ROWS = ELEMENTWISE | {"cast", "contiguous", "clone", "chunk", "getitem", "glu"}
FAR = 64
Joins = dict[fx.Node, list[fx.Node]]


def take_apart(work: Work) -> list[Provisional]:
    """Makes the pieces of each such split of the parts."""
    found: list[Provisional] = []
    storage: Storage | None = None
    for node in list(work.gm.graph.nodes):
        call = read_call(node)
        if call is None or call.name != "split" or call["dim"] != 0 or not isinstance(call["input"], fx.Node):
            continue
        between, joins = joined_behind(node, call["input"], sizes_of(node))
        if joins:
            storage = storage or Storage(work.gm.graph)
            every = {*between, *joins, *(part for parts in joins.values() for part in parts)}
            if is_quiet(work.gm.graph, every, node, storage):
                pieces = [SplitPhases(node, user, joins, between) for user in list(node.users)]
                if not all(one.is_made() for one in pieces):
                    for made in [made for one in pieces for made in reversed(one.made)]:
                        work.gm.graph.erase_node(made)
                    continue
                found += [Provisional(one.node, own := one.copies[call["input"]], own) for one in pieces]
                work.loose += [user for one in (*between, *joins) for user in one.users if not user.users]
    for one in found:
        one.node.replace_all_uses_with(one.result)
    return found


def is_quiet(graph: fx.Graph, nodes: set[fx.Node], end: fx.Node, storage: Storage) -> bool:
    """Whether nobody writes into what is between the parts and the split, nor switches gradients there."""
    least = min(nodes)
    switches = [node for node in graph.nodes if least < node < end and node.target is set_grad_enabled]
    return not switches and not any(storage.writers_of(nodes))


def sizes_of(split: fx.Node) -> list[Any] | None:
    """The sizes of the pieces, one each; None unless each piece is taken once, by its number."""
    call = certain(read_call(split))
    sizes = call["split_size_or_sections"]
    if not isinstance(sizes, tuple | list):
        return None
    numbers = [user.args[1] if user.target is operator.getitem else None for user in split.users]
    return list(sizes) if sorted(map(str, numbers)) == sorted(map(str, range(len(sizes)))) else None


def joined_behind(split: fx.Node, node: fx.Node, sizes: list[Any] | None) -> tuple[list[fx.Node], Joins]:
    """(the nodes from joins to what is split, the joins with the parts of each), if that is cut as they were joined.

    Nobody else may read them: what the parts are joined for would be computed twice."""
    between: list[fx.Node] = []
    joins: Joins = {}
    pending = [node] if sizes is not None else []
    rows = (shape_of(node) or (None,))[0]
    while pending:
        one = pending.pop()
        if one in between or one in joins:
            continue
        parts = parts_of(one, sizes)
        if parts is not None:
            joins[one] = parts
        elif keeps_to_rows(one, rows) and len(between) < FAR:
            between.append(one)
            pending += [argument for argument in one.all_input_nodes if not is_feature(argument)]
        else:
            return [], {}
    inside = {split, *between}
    users = [user for one in (*between, *joins) for user in one.users if user not in inside]
    if any(user.users or user.target is not operator.getitem for user in users):  # (pieces that nobody uses)
        return [], {}
    if any(len(part.users) > 1 for parts in joins.values() for part in parts):
        return [], {}
    return between, joins


def parts_of(node: fx.Node, sizes: list[Any] | None) -> list[fx.Node] | None:
    """What a node joins, one under another, if these are products of pieces of such sizes."""
    if node.target not in JOINS or sizes is None:
        return None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    parts: Any = node.args[0] if node.args else None
    if dim != 0 or not isinstance(parts, tuple | list) or len(parts) != len(sizes):
        return None
    return list(parts) if all(is_cut(part, e, sizes) for e, part in enumerate(parts)) else None


def keeps_to_rows(node: fx.Node, rows: Any) -> bool:
    call, shape = read_call(node), shape_of(node)
    if call is None or not is_pure(node) or call.name not in ALONG_ROWS:
        return False
    if call.name == "chunk":
        return call["dim"] == -1
    if call.name == "glu":
        return call["dim"] == -1
    if call.name == "getitem":
        return along_features(call["index"]) or isinstance(call["index"], int) and shape_of(call["input"]) is None
    return shape is not None and len(shape) == 2 and same_size(shape[0], rows)


def along_features(index: Any) -> bool:
    """``[..., a:b]`` or ``[:, a:b]``."""
    keys = index if isinstance(index, tuple) else ()
    plain = len(keys) == 2 and isinstance(keys[1], slice) and not any(isinstance(key, fx.Node) for key in keys)
    return plain and (keys[0] is ... or keys[0] == slice(None))


def is_feature(node: fx.Node) -> bool:
    """A tensor of one axis, the features', or a number."""
    shape = shape_of(node)
    return shape is not None and len(shape) < 2


def is_cut(part: Any, e: int, sizes: list[Any]) -> bool:
    """Whether it is a product of piece e of a tensor that is cut into pieces of these sizes."""
    call = read_call(part)
    piece = read_call(call["input"]) if call is not None and call.name in ROWS_FIRST else None
    if piece is None or piece.name != "getitem" or piece["index"] != e:
        return False
    cut = read_call(piece["input"])
    return (
        cut is not None
        and cut.name == "split"
        and cut["dim"] == 0
        and isinstance(cut["split_size_or_sections"], tuple | list)
        and list(cut["split_size_or_sections"]) == sizes
    )


class SplitPhases:
    """One piece of a split, made of its part of each join."""

    def __init__(self, split: fx.Node, piece: fx.Node, joins: Joins, between: list[fx.Node]):
        self.split, self.node, self.between = split, piece, set(between)
        number: Any = piece.args[1]
        self.copies: dict[fx.Node, fx.Node] = {join: parts[number] for join, parts in joins.items()}
        self.made: list[fx.Node] = []

    def is_made(self) -> bool:
        """Makes it; False where an operator does not work on the rows of one expert."""
        call = certain(read_call(self.split))
        try:
            self.copy(call["input"])
        except Exception:
            return False
        return True

    def copy(self, node: fx.Node) -> fx.Node:
        if node in self.copies:
            return self.copies[node]
        for argument in node.all_input_nodes:
            if argument in self.between:
                self.copy(argument)
        graph = self.split.graph
        with graph.inserting_before(self.split):
            made = graph.node_copy(node, lambda argument: self.copies.get(argument, argument))
        self.made.append(made)
        made.meta["val"] = infer(made)
        self.copies[node] = made
        return made
