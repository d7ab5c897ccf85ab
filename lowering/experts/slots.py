"""Experts on the slots of all tokens, as the operator on the tokens.

``x.repeat_interleave(K, 0)``, or ``x[order // K]`` where the slots are sorted by expert, gives each of a token's K
slots a row of its own. What the experts give is then multiplied with the slots' weights, put back into the order of
slots, and added up for each token: ``(y * w[order, None])[inverse].view(T, K, D).sum(1)``. Or it is added to each row's
token at once, to zeros or to something else: ``zeros.index_add(0, order // K, y * w[order, None])``, or scatter_add.
The operator does all of this; it keeps the tokens, not copies of them, and no results for the weights' gradient.

Letters: T tokens, K slots of each, S = T · K rows, D width.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.kernels import experts
from moebius.lowering.aliasing import Storage, storage_now
from moebius.lowering.contract import Work
from moebius.lowering.experts.layout import WithoutGrad
from moebius.lowering.experts.positions import (
    computed_since_the_choice,
    is_order,
    is_sorted,
    keeps_order,
    lookup,
    root_of,
    rows_of_column,
    sorted_by,
    uncast,
)
from moebius.lowering.experts.routing import index_root, is_among, weighs_alike
from moebius.lowering.experts.saved_for_backward import writer_before_backward
from moebius.lowering.experts.unrolled_loops import has_effect
from moebius.lowering.experts.views import column_of, moved, sized_one
from moebius.lowering.operators import Call, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import (
    add_call,
    computed_of,
    dtype_of,
    infer,
    nodes_between,
    rank_of,
    same_shape,
    shape_of,
    stands_at,
    tensor_of,
)


@dataclass
class Rows:
    """x [T, D], of which row r is that of slot ``order[r]``, or of slot r (None). k: slots of each token."""

    x: fx.Node
    order: fx.Node | None
    k: int


@dataclass
class Sum:
    """What is done with the rows' results. chain: the nodes, the last one the sum over each token's slots. weights: of
    the slots, [S] or [T, K]; column: what the results are multiplied with; factor: the numbers that all are multiplied
    with. place: at which row each slot is; inverse:
    the node that writes it, if one does. base: what the sum is added to, if that is not zeros; token: which token each
    row is added to; written: the zeros that it was written into."""

    chain: list[fx.Node] = field(default_factory=list)
    weights: fx.Node | None = None
    column: fx.Node | None = None
    factor: float = 1.0
    place: fx.Node | None = None
    inverse: fx.Node | None = None
    base: fx.Node | None = None
    token: fx.Node | None = None
    written: fx.Node | None = None


def at_tokens(work: Work, node: fx.Node) -> fx.Node | None:
    """The operator on tokens in the place of ``node``, one on rows, and of what is done with its result; or None, and
    the graph is as it was."""
    x, _, _, index, weight = node.args[:5]
    rows = slot_rows(x) if isinstance(x, fx.Node) else None
    own, factor = None if rows is None else slot_weights(weight, rows.order, None), factor_of(weight)
    if own is None and factor is None:
        return None
    numbers = None if rows is None else slot_numbers(index, rows.order, node.args[1])
    storage = storage_now(node.graph) if numbers is not None else None
    end = None if rows is None or storage is None else added_up(node, rows, storage)
    if rows is None or numbers is None or storage is None or end is None:
        return None
    last = end.chain[-1]
    weights = [one for one in (own, end.weights) if one is not None]
    factor = end.factor * (1.0 if factor is None else factor)
    if factor != 1.0 and not (weights and weighs_alike(factor, {dtype_of(one) for one in (*weights, node)})):
        return None
    if not stands_still(node, rows, numbers, end, weights, storage):
        return None
    graph = node.graph
    with graph.inserting_before(last):
        index_TK = add_call(graph, node, "reshape", numbers, -1, rows.k)
        weight_TK = None
        for one in weights:
            part_TK = add_call(graph, node, "reshape", one, -1, rows.k)
            weight_TK = part_TK if weight_TK is None else add_call(graph, node, torch.mul, weight_TK, part_TK)
        if factor != 1.0:
            weight_TK = add_call(graph, node, torch.mul, weight_TK, factor)
        given = (rows.x, *node.args[1:3], index_TK, weight_TK, *node.args[5:])
        made = stands_at(graph.call_function(experts, given, node.kwargs), node)
        made.meta["val"] = infer(made)
        total = made if end.base is None else add_call(graph, last, torch.add, end.base, made)
    last.replace_all_uses_with(total)
    if end.written is not None:
        end.written.replace_all_uses_with(total, lambda user: user is not last)
    for one in (*reversed(end.chain), node):
        work.loose += one.all_input_nodes
        graph.erase_node(one)
    if end.inverse is not None and is_unseen(end.inverse, storage):
        work.loose += end.inverse.all_input_nodes
        graph.erase_node(end.inverse)
    work.loose = [one for one in work.loose if one not in (*end.chain, node, end.inverse)]
    return made


def slot_rows(x: fx.Node) -> Rows | None:
    """What the rows [S, D] are made of."""
    call = read_call(x)
    if call is None:
        return None
    if call.name == "repeat_interleave":
        repeats = call["repeats"]
        return Rows(call["input"], None, repeats) if type(repeats) is int and call["dim"] in (0, -2) else None
    found = lookup(call)
    if found is None or rank_of(found[0]) != 2:
        return None
    table, place = found
    inner = read_call(table)
    if is_order(place) and inner is not None and inner.name == "repeat_interleave":
        before = slot_rows(table)
        whole = same_shape((shape_of(table) or (0,))[:1], shape_of(place))
        return Rows(before.x, place, before.k) if before is not None and whole else None
    token = token_of(place)
    slots = (shape_of(place) or (0,))[0]
    whole = token is not None and same_size((shape_of(table) or (0,))[0] * token[1], slots)
    return Rows(table, *token) if whole and token is not None else None


def token_of(place: Any) -> tuple[fx.Node, int] | None:
    """(order, K) of ``order // K``: which token each row is of, where rows are slots in this order."""
    call = read_call(place)
    if call is None or call.name not in ("floor_divide", "div") or type(call["other"]) is not int:
        return None
    down = call.name == "floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    return (call["input"], call["other"]) if down and call["other"] > 0 and is_order(call["input"]) else None


def slot_numbers(index: Any, order: fx.Node | None, weight: Any) -> fx.Node | None:
    """The experts' numbers [S] of the slots in their own order, where ``index`` [S, 1] has those of the rows."""
    call = read_call(index)
    if call is None or call.name not in ("unsqueeze", "reshape") or not isinstance(call["input"], fx.Node):
        return None
    numbers = call["input"]
    looked = read_call(numbers)
    if looked is not None and looked.name == "getitem" and isinstance(looked["input"], fx.Node):
        every = read_call(looked["input"])
        if every is not None and every.name == "arange":  # (it raises for numbers beyond the experts)
            experts_here = (shape_of(weight) or (0,))[0]
            if is_among(root_of(looked["index"]), experts_here) and every["bounds"] == (experts_here,):
                numbers = looked["index"]
            elif order is not None:
                return None
    if order is None:
        return numbers if not is_sorted(numbers) else None
    slots = uncast(sorted_by(order))
    value = tensor_of(slots)
    if value is None or value.dtype.is_floating_point:
        return None
    if is_sorted(numbers):
        return slots if root_of(numbers) is root_of(slots) else None
    found = read_call(numbers)
    part = None if found is None else lookup(found)
    return slots if part is not None and part[1] is order and flat_root(part[0]) is flat_root(slots) else None


def flat_root(node: fx.Node) -> fx.Node:
    """The tensor that has the same numbers in the same order."""
    return index_root(uncast(node))


def added_up(node: fx.Node, rows: Rows, storage: Storage) -> Sum | None:
    """The sum over each token's slots that the results go into, and into nothing else."""
    now, found, in_order, apart = node, Sum(), rows.order is None, False
    shape = shape_of(node) or (0, 0)
    while len(now.users) == 1:
        (user,) = now.users
        call = read_call(user)
        if call is None:
            return None
        if call.name in ("index_add", "scatter_add") and not in_order and not apart:
            found.chain.append(user)
            return found if added_to_tokens(call, now, rows, found, storage) and of_one_type(found, node) else None
        if call.op.inplace:
            return None
        found.chain.append(user)
        sizes = shape_of(user) or ()
        part = lookup(call)
        if call.name == "cast" and is_as_wide(user, node):
            now = user
            continue
        if call.name in ("getitem", "squeeze", "unsqueeze") and part is None:  # axes of size 1 come and go
            keys = call.args.get("index", ())
            keys = keys if isinstance(keys, tuple) else (keys,)
            plain = keeps_order(tuple(key for key in keys if type(key) is not int))
            if not plain or not same_shape(tuple(size for size in sizes if not sized_one(size)), shape):
                return None
        elif call.name == "mul" and type(call["other"]) in (int, float):
            found.factor *= call["other"]
        elif call.name == "mul" and found.weights is None and len(sizes) == (3 if apart else 2):
            other = call["other"] if call["input"] is now else call["input"]
            found.weights = slot_weights(other, None if in_order else rows.order, rows.k if apart else None)
            value, found.column = tensor_of(other), other
            if found.weights is None or value is None or not value.dtype.is_floating_point:
                return None
            if not same_shape(shape_of(other), (*shape[:-1], 1)):
                return None
        elif part is not None and part[0] is now and not in_order and not apart and rows.order is not None:
            found.inverse = written_by(part[1], user, storage)
            if not is_inverse(part[1], rows.order, found.inverse, user, storage):
                return None
            in_order, found.place = True, part[1]
        elif call.name == "reshape" and in_order and not apart and len(sizes) == 3:
            if not same_size(sizes[1], rows.k) or not same_size(sizes[2], shape[1]):
                return None
            apart, shape = True, sizes
        elif call.name == "sum" and apart and rank_of(now) == 3 and not call["keepdim"]:
            along = call["dim"] in (1, -2, (1,), [1]) and call["dtype"] is None
            return found if along and of_one_type(found, node) else None
        else:
            return None
        now = user
    return None


def added_to_tokens(call: Call, results: fx.Node, rows: Rows, found: Sum, storage: Storage) -> bool:
    """Whether each row is added to its token's, and nothing else is."""
    base, total = call["input"], call.node
    zeros = read_call(base)
    values, index = call.args.get("source", call.args.get("src")), call["index"]
    index = rows_of_column(index) if call.name == "scatter_add" else index
    if zeros is None or not isinstance(index, fx.Node) or values is not results:
        return False
    if call["dim"] not in (0, -2) or call.args.get("alpha", 1) != 1 or token_of(index) != (rows.order, rows.k):
        return False
    if zeros.name != "zeros" and call.op.inplace:
        return False
    if call.op.inplace and not all(one in (base, total) or total < one for one in (*storage.family(base), *base.users)):
        return False
    if storage.writer_between(base, total) is not None:
        return False
    found.token, found.base = index, None if zeros.name == "zeros" else base
    found.written = base if call.op.inplace else None
    whole = rank_of(values) == 2 and same_shape((shape_of(values) or ())[:1], shape_of(index))
    return whole and same_shape(shape_of(total), shape_of(rows.x))


def is_as_wide(cast: fx.Node, node: fx.Node) -> bool:
    """Whether a cast, where it is, gives numbers of the type that the operator's results have, or of a wider one."""
    value, own = tensor_of(cast), tensor_of(node)
    if value is None or own is None or value.device != own.device:
        return False
    return value.dtype == own.dtype or torch.promote_types(value.dtype, own.dtype) == value.dtype != own.dtype


def of_one_type(found: Sum, node: fx.Node) -> bool:
    """Whether the sum has the type of the operator's result, or is cast to it, where wider weights made it wider."""
    own, total = tensor_of(node), found.chain[-1]
    value = tensor_of(total)
    if own is None or value is None or value.dtype == own.dtype:
        return own is not None and value is not None
    if found.base is not None or found.written is not None:
        return False
    user = next(iter(total.users)) if len(total.users) == 1 else None
    call, cast = (None, None) if user is None else (read_call(user), tensor_of(user))
    if user is None or call is None or call.name != "cast" or cast is None or cast.dtype != own.dtype:
        return False
    found.chain.append(user)
    return True


def slot_weights(other: Any, order: fx.Node | None, k: int | None) -> fx.Node | None:
    """The weights of the slots in their own order: of ``w[order].unsqueeze(-1)`` [S, 1], or [T, K, 1] (k)."""
    call = read_call(other)
    rank = rank_of(other) if isinstance(other, fx.Node) else 0
    if call is None or rank != (2 if k is None else 3) or not same_size((shape_of(other) or (0,))[-1], 1):
        return None
    if k is None:
        weights = column_of(other)
        found = None if weights is None or order is None else read_call(weights)
        part = None if found is None else lookup(found)
        if order is None or part is None:
            return weights if order is None else None
        return part[0] if part[1] is order and rank_of(part[0]) == 1 else None
    added = moved(call, (0, 1)) == (0, 1, None)
    return call["input"] if added and same_size((shape_of(call["input"]) or (0, 0))[1], k) else None


def factor_of(weight: Any) -> float | None:
    """The number that all rows are multiplied with, ``torch.ones_like(rows) * 2.0``; 1 without weights."""
    if weight is None:
        return 1.0
    call = read_call(weight)
    ones = read_call(call["input"]) if call is not None and call.name == "mul" else None
    number = call["other"] if call is not None and ones is not None and ones.name == "ones" else None
    return number if type(number) in (int, float) else None


def written_by(place: fx.Node, at: fx.Node, storage: Storage) -> fx.Node | None:
    """The one node that writes into ``place`` before ``at``."""
    writers = list(storage.writers_of((place,), place, at))
    return writers[0] if len(writers) == 1 else None


def is_inverse(place: fx.Node, order: fx.Node, writer: fx.Node | None, at: fx.Node, storage: Storage) -> bool:
    """Whether ``place`` says at which row each slot is: ``argsort(order)``, or ``place[order] = arange(S)``."""
    if writer is None:
        return is_order(place) and sorted_by(place) is order and storage.writer_between(place, at) is None
    if writer.target is not operator.setitem or writer.args[0] is not place:
        return False
    keys, values = writer.args[1:]
    keys = keys[0] if isinstance(keys, tuple) and len(keys) == 1 else keys
    counted = read_call(values)
    if keys is not order or counted is None or counted.name != "arange" or len(counted["bounds"]) != 1:
        return False
    return same_shape(shape_of(values), shape_of(order)) and same_shape(shape_of(place), shape_of(order))


def is_unseen(writer: fx.Node, storage: Storage) -> bool:
    """Whether what a node writes into is read by nobody else, under any name."""
    target = writer.args[0]
    assert isinstance(target, fx.Node)
    return storage.is_fresh(target) and storage.family(target) == {target} and set(target.users) == {writer}


def stands_still(
    node: fx.Node, rows: Rows, numbers: fx.Node, end: Sum, weights: list[fx.Node], storage: Storage
) -> bool:
    """Whether all of it may be computed where the sum is: nothing that the proof went through was written to by then,
    or is before backward; history was dropped nowhere, and no mode changes."""
    last = end.chain[-1]
    values = None if end.inverse is None else end.inverse.args[2]
    made = [one for one in (node.args[0], *node.args[3:5], end.column, values, end.token) if isinstance(one, fx.Node)]
    ends = {one for one in (rows.x, rows.order, numbers, *weights, end.place) if one is not None}
    passed = computed_of(made, lambda one: () if one in ends or one.op == "placeholder" else one.all_input_nodes)
    passed |= {*node.all_input_nodes, node, *end.chain[:-1], *ends} | computed_since_the_choice([numbers])
    passed -= {end.place} if end.inverse is not None and end.place is not None else set()
    if storage.writer_into(passed, last) is not None:
        return False
    kept = [rows.x, *weights]
    if writer_before_backward(storage, last, kept, kept, last) is not None:
        return False
    quiet = WithoutGrad(node.graph)
    if any(one in quiet for one in passed - computed_since_the_choice([numbers]) - ends):
        return False
    return not any(map(has_effect, nodes_between(node, last)))
