"""Rows that go a roundabout way into a sum, written as rows that are added or written at their tokens.

    part = zeros_like(out); part[token] = rows; out += part * gate          out.index_add_(0, token, rows * gate[token])
    h.masked_select(mask[:, None].expand_as(h)).view(-1, D)                 h[mask]
    out.masked_scatter(mask[:, None].expand_as(out), rows)                  out.index_copy(0, token, rows)
    torch.arange(T).masked_select(mask)                                     torch.arange(T)[mask]
    out = out + zeros_like(out).index_add(0, token, rows)                   out.index_add(0, token, rows)

Each holds by itself, whatever becomes of the rest: nothing is proven of experts here. ``rows`` written over one another
would count once, and added twice: so the positions must be known to differ (those where a mask holds).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.dead_code import drop_dead_code
from moebius.lowering.experts.blocks import like
from moebius.lowering.experts.out_of_place import is_without_grad
from moebius.lowering.experts.routing import distinct
from moebius.lowering.experts.views import FULL, column_of
from moebius.lowering.operators import Call, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import certain, computed_of, dtype_of, put_before, rank_of, same_shape, shape_of, tensor_of

SELECTS = frozenset({"masked_select", torch.masked_select})
FAR = 200  # nodes between the rows that a mask picks and those that are written


def straighten(work: Work, wanted: bool) -> None:
    """Every such way of the graph; nothing where it is not wanted."""
    graph = work.gm.graph
    if not wanted:
        return
    targets = {node.target for node in graph.nodes}
    if targets & SELECTS:
        for node in list(graph.nodes):
            take_by_mask(node)
    if targets & {"masked_scatter", "masked_scatter_", torch.masked_scatter}:
        for node in list(graph.nodes):
            if (one := scattered_rows(node)) is not None:
                write_rows_of_mask(work, node, *one)
    storage: Storage | None = None
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None or call.name != "add" or call["alpha"] != 1:
            continue
        for base, part in call.either_way:
            if type(base) is int and base == 0 and (found := written_part(part, node)) is not None and found.adds:
                node.replace_all_uses_with(part)  # what sum() begins with
                graph.erase_node(node)
                storage = None
                break
            if not isinstance(base, fx.Node) or (call.op.inplace and base is not call["input"]):
                continue
            found = written_part(part, node) if base is not part else None
            if found is None or not alike(base, part):
                continue
            storage = storage or Storage(graph)
            if found.stays(storage, node, base):
                found.add_to(work, call, base)
                storage = None
                break
    if work.loose:
        drop_dead_code(work)


@dataclass
class Part:
    """Zeros [.., D] into which ``rows`` [S, D] were written at ``keys``, scaled by ``gate``, if by anything.

    write: what writes them; adds: or adds them. end: what is added to the sum."""

    zeros: fx.Node
    write: fx.Node
    rows: fx.Node
    keys: tuple
    gate: fx.Node | None
    end: fx.Node
    adds: bool

    def stays(self, storage: Storage, node: fx.Node, base: fx.Node) -> bool:
        """Whether nothing that is read later now is written before, and all of it has one history."""
        if storage.share(self.rows, base):
            return False
        read = [self.rows, *self.keys, *([self.gate] if self.gate is not None else [])]
        quiet = all(storage.writer_between(one, node) is None for one in read)
        return quiet and not is_without_grad(self.zeros, node)

    def add_to(self, work: Work, call: Call, base: fx.Node) -> None:
        graph, node = work.gm.graph, call.node
        value, rows, keys = certain(tensor_of(self.rows)), self.rows, self.keys
        count = value.shape[0]

        def made(target: Any, args: tuple, meta: Any) -> fx.Node:
            return put_before(node, target, args, self.write if self.adds else node, meta)

        if is_mask(keys[0]):
            rank = axes_of(keys)
            at = like(value, (count,), torch.int64)
            places = made(torch.where, (keys[0],), (at,) * rank)
            keys = tuple(made(operator.getitem, (places, i), at) for i in range(rank))
        if self.gate is not None:
            column = like(value, (count, *(shape_of(self.gate) or ())[len(keys) :]), value.dtype)
            own = made(operator.getitem, (self.gate, keys if len(keys) > 1 else keys[0]), column)
            rows = made(torch.mul, (rows, own), value)
        arguments: tuple = (base, 0, keys[0], rows) if len(keys) == 1 else (base, keys, rows, True)
        name = "index_add" if len(keys) == 1 else "index_put"
        new = made(f"{name}_" if call.op.inplace else name, arguments, node.meta["val"])
        node.replace_all_uses_with(new)
        scaled = () if self.gate is None else (self.end,)
        for gone in (node, *scaled, self.write, self.zeros):
            graph.erase_node(gone)


def written_part(end: Any, reader: fx.Node) -> Part | None:
    """``end``, which nothing but ``reader`` reads."""
    if not isinstance(end, fx.Node):
        return None
    if set(end.users) - {reader}:
        return scaled_nowhere(end, reader)
    call = read_call(end)
    if call is not None and call.name == "mul" and not call.op.inplace:
        for part, gate in call.either_way:
            if isinstance(part, fx.Node) and isinstance(gate, fx.Node) and is_gate(gate, end):
                found = written_part(part, end)
                if found is not None and found.gate is None:
                    return replace(found, gate=gate, end=end)
        return None
    return scaled_nowhere(end, reader)


def scaled_nowhere(end: fx.Node, reader: fx.Node) -> Part | None:
    """Of zeros that were written in place, or of what a functional write made of them."""
    others = [user for user in end.users if user is not reader]
    if len(others) > 1 or (others and others[0].users):
        return None
    write = others[0] if others else end
    call = read_call(write)
    if call is None or (write is not end) is not call.op.inplace or not write < reader:
        return None
    zeros, rows, keys, adds = call.args.get("input"), None, None, call.name == "index_add"
    if call.name in ("index_copy", "index_add") and call["dim"] == 0 and call.args.get("alpha", 1) == 1:
        rows, keys = call["source"], (call["index"],)
    elif call.name == "index_put" and call["accumulate"] is False:
        rows, keys = call["values"], tuple(call["indices"])
    elif call.name == "setitem":
        rows, keys = call["value"], call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if not isinstance(zeros, fx.Node) or not isinstance(rows, fx.Node) or not keys:
        return None
    if (write is not end and zeros is not end) or (write is end and set(zeros.users) != {write}):
        return None
    fresh = read_call(zeros)
    if fresh is None or fresh.name != "zeros" or fresh["requires_grad"] is True or not alike(zeros, rows, whole=False):
        return None
    if not all(isinstance(key, fx.Node) for key in keys) or not differ(keys, rows):
        return None
    given, made = shape_of(rows) or (), shape_of(zeros) or ()
    whole = len(given) > 1 and same_shape(given[1:], made[axes_of(keys) :])
    return Part(zeros, write, rows, keys, None, end, adds) if whole else None


def alike(a: fx.Node, b: fx.Node, whole: bool = True) -> bool:
    """Whether both are of one floating dtype, and (``whole``) of one shape."""
    one, other = tensor_of(a), tensor_of(b)
    if one is None or other is None or one.dtype != other.dtype or not one.dtype.is_floating_point:
        return False
    return not whole or same_shape(shape_of(a), shape_of(b))


def is_gate(gate: fx.Node, product: fx.Node) -> bool:
    """Whether it is one number for each row of a product, of the product's dtype."""
    shape, made = shape_of(gate), shape_of(product)
    if not shape or not made or len(shape) != len(made) or not alike(gate, product, whole=False):
        return False
    return same_size(shape[-1], 1) and same_shape(shape[:-1], made[:-1])


def is_mask(key: Any) -> bool:
    return dtype_of(key) is torch.bool


def axes_of(keys: tuple) -> int:
    """How many axes of a tensor the keys take up."""
    return rank_of(keys[0]) if is_mask(keys[0]) else len(keys)


def differ(keys: tuple, rows: fx.Node) -> bool:
    """Whether the positions are certainly different ones, as many as rows."""
    if is_mask(keys[0]):
        return len(keys) == 1 and is_made_of(rows, keys[0])
    count = (shape_of(rows) or (None,))[0]
    for key in keys:
        value = tensor_of(key)
        if value is None or value.dim() != 1 or value.dtype is not torch.int64 or not same_size(value.shape[0], count):
            return False
    calls = [read_call(key) for key in keys]
    if any(call is None or call.name != "getitem" or type(call["index"]) is not int for call in calls):
        return False
    sources = {call["input"] for call in calls if call is not None}
    made = read_call(sources.pop()) if len(sources) == 1 else None
    if made is None or made.name not in ("where", "nonzero"):
        return False
    mask = made["condition"] if made.name == "where" else made["input"]
    rank = rank_of(mask) if isinstance(mask, fx.Node) else 0
    if [call["index"] for call in calls if call is not None] == list(range(rank)):
        return True
    chosen = read_call(mask)
    once = chosen is not None and chosen.name == "eq" and type(chosen["other"]) is int and rank == 2
    return once and len(keys) == 1 and calls[0]["index"] == 0 and distinct(chosen["input"])  # type: ignore[index]


def is_made_of(rows: fx.Node, mask: fx.Node) -> bool:
    """Whether as many rows are there as the mask picks: they are made of those that it picked."""
    count, seen = (shape_of(rows) or (None,))[0], computed_of([rows])
    if len(seen) > FAR + len(rows.graph.find_nodes(op="placeholder")):
        seen = {node for node in seen if mask < node}
    return any(takes(node, mask) and same_size((shape_of(node) or (None,))[0], count) for node in seen)


# ----------------------------------------------------------------------------------------------------------------------
# masked_select and masked_scatter
# ----------------------------------------------------------------------------------------------------------------------


def column_behind(mask: Any, whole: fx.Node) -> fx.Node | None:
    """The mask [T] that holds for whole rows: behind ``mask[:, None]``, and ``.expand_as(rows)`` of it."""
    call = read_call(mask)
    if call is not None and call.name == "expand" and isinstance(call["input"], fx.Node):
        mask = call["input"]
    shape, rows = shape_of(mask), shape_of(whole)
    if not is_mask(mask) or not shape or not rows or len(shape) != 2 or len(rows) != 2:
        return None
    if not same_size(shape[1], 1) or not same_size(shape[0], rows[0]) or same_size(rows[1], 1):
        return None
    return column_of(mask) or next((user for user in mask.users if is_column(user)), None)


def is_column(node: fx.Node) -> bool:
    """Whether it is ``mask[:, 0]`` or ``mask.squeeze(1)`` of a mask [T, 1]."""
    call = read_call(node)
    if call is None or rank_of(node) != 1:
        return False
    return call.name == "squeeze" if call.name != "getitem" else call["index"] in ((FULL, 0), (..., 0))


def scattered_rows(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, list[fx.Node]] | None:
    """(the base, the mask [T], the rows, the selections by that mask that these are made of)."""
    if node.target not in ("masked_scatter", "masked_scatter_", torch.masked_scatter) or node.kwargs:
        return None
    base, mask, rows = node.args
    if not (isinstance(base, fx.Node) and isinstance(rows, fx.Node)) or not alike(base, rows, whole=False):
        return None
    column, shape = column_behind(mask, base), shape_of(rows)
    if column is None or not shape or len(shape) != 2 or not same_size(shape[1], (shape_of(base) or (0, 0))[1]):
        return None
    picked = [one for one in computed_of([rows]) if selects(one, column) or takes(one, column)]
    picked = [one for one in picked if same_size((shape_of(one) or (0,))[0], shape[0])]
    return (base, column, rows, picked) if picked else None


def take_by_mask(node: fx.Node) -> None:
    """``h.masked_select(mask)`` of a mask of h's shape is ``h[mask]``."""
    if node.target in SELECTS and not node.kwargs and len(node.args) == 2:
        h, mask = node.args
        if isinstance(h, fx.Node) and is_mask(mask) and same_shape(shape_of(h), shape_of(mask)):
            if rank_of(h) == 1:  # a matrix that is made of it again is for what is below
                node.op, node.target = "call_function", operator.getitem


def takes(node: fx.Node, column: fx.Node) -> bool:
    """Whether it is ``h[column]``."""
    call = read_call(node)
    return call is not None and call.name == "getitem" and call["index"] is column


def selects(node: fx.Node, column: fx.Node) -> bool:
    """Whether it is ``h.masked_select(column[:, None]).view(-1, D)``."""
    call, shape = read_call(node), shape_of(node)
    made = call["input"] if call is not None and call.name == "reshape" else None
    if not isinstance(made, fx.Node) or made.target not in SELECTS or made.kwargs:
        return False
    h, mask = made.args
    if not isinstance(h, fx.Node) or column_behind(mask, h) is not column or not shape or len(shape) != 2:
        return False
    return same_size(shape[1], (shape_of(h) or (0, 0))[1])


def write_rows_of_mask(work: Work, node: fx.Node, base: fx.Node, column: fx.Node, rows: fx.Node, picked: list) -> None:
    graph, storage = work.gm.graph, Storage(work.gm.graph)
    if storage.writer_between(column, node) is not None:
        return
    for one in [one for one in picked if not takes(one, column)]:
        select = one.args[0]
        taken = put_before(select, operator.getitem, (select.args[0], column), select, one.meta["val"])
        one.replace_all_uses_with(taken)
        work.loose.append(one)
    value = certain(tensor_of(rows))
    at = like(value, (value.shape[0],), torch.int64)
    places = put_before(node, torch.where, (column,), node, (at,))
    token = put_before(node, operator.getitem, (places, 0), node, at)
    name = "index_copy_" if str(node.target) == "masked_scatter_" else "index_copy"
    new = put_before(node, name, (base, 0, token, rows), node, node.meta["val"])
    node.replace_all_uses_with(new)
    graph.erase_node(node)
