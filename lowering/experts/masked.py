"""Rows that are scaled and then masked, ``torch.where(mask[:, None], expert(x) * gate, 0)``, as rows scaled by a masked
gate: ``expert(x) * torch.where(mask[:, None], gate, 0)``. The two are equal for each row, and so are their gradients,
where the expert's output is finite. What the mask leaves of the gate is read here too:

    (index == e).any(-1, keepdim=True)      all of it: the gate is zero for the tokens that it leaves out
    gate > c                                the same comparison of the weights that the gate is made of
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.views import column_of, same_value
from moebius.lowering.experts.zeros import number_of
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import add_call, certain, rank_of, same_shape, shape_of, tensor_of

COMPARISONS = {"gt": torch.gt, "ge": torch.ge, "lt": torch.lt, "le": torch.le, "ne": torch.ne}


@dataclass(frozen=True)
class Masked:
    """rows where the condition holds, else zeros; the other way round if not ``kept``."""

    node: fx.Node
    rows: fx.Node
    condition: fx.Node
    kept: bool


def masked(node: Any, column: bool = True) -> Masked | None:
    """``torch.where(condition, rows, 0)``, ``torch.where(condition, 0, rows)``, ``rows.masked_fill(condition, 0)`` and
    ``rows * condition``. column: of a condition that has one element for each row; else as many as the rows have."""
    call = read_call(node)
    if call is None or call.op.inplace or call.name not in ("where", "masked_fill", "mul"):
        return None
    if call.name == "masked_fill":
        tries = [(call["input"], call["mask"], call["value"], False)]
    elif call.name == "mul":
        tries = [(rows, uncast(mask), 0, True) for rows, mask in call.either_way]
    else:
        condition, one, other = call["condition"], call["input"], call["other"]
        tries = [(one, condition, other, True), (other, condition, one, False)]
    for rows, condition, other, kept in tries:
        if chooses(node, condition, rows, column) and is_zero(other):
            return Masked(node, rows, condition, kept)
    return None


def chooses(node: Any, condition: Any, rows: Any, column: bool = True) -> bool:
    """Whether a condition may say of each row (or, not column, of each element) of a node that it is that of rows."""
    a, b, c = (tensor_of(one) if isinstance(one, fx.Node) else None for one in (node, rows, condition))
    if a is None or b is None or c is None or c.dtype is not torch.bool or a.dtype != b.dtype:
        return False
    if c.dim() != b.dim() or not same_shape(shape_of(node), shape_of(rows)):
        return False
    return b.dim() > 1 and same_size(c.shape[-1], 1) if column else same_shape(shape_of(condition), shape_of(rows))


def uncast(mask: Any) -> Any:
    """The mask that was made numbers of, with an axis added or not."""
    call = read_call(mask)
    return call["input"] if call is not None and call.name in ("cast", "type_as") else mask


def scaled_rows(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(rows [T, D], gate [T, 1]) of their product; with more axes, the gate may have some of size 1."""
    call = read_call(node)
    if call is None or call.name != "mul" or call.op.inplace:
        return None
    for rows, gate in call.either_way:
        if not isinstance(rows, fx.Node) or not isinstance(gate, fx.Node):
            continue
        gate = before_widening(gate)
        a, b = shape_of(rows), shape_of(gate)
        if a and b and len(a) == len(b) > 1 and type(b[-1]) is int and b[-1] == 1 and type(a[-1]) is int and a[-1] > 1:
            repeated = len(a) > 2
            fits = (same_size(x, y) or (repeated and same_size(y, 1)) for x, y in zip(a[:-1], b[:-1], strict=True))
            return (rows, gate) if all(fits) else None
    return None


def before_widening(gate: fx.Node) -> fx.Node:
    """The column [T, 1] of ``column.expand(-1, D)`` or ``.repeat(1, D)``: the product does the same by itself."""

    def widens(call: Call) -> bool:
        column = shape_of(call["input"]) or ()
        return call.name in ("expand", "repeat") and len(column) == rank_of(gate) and same_size(column[-1], 1)

    return behind(gate, widens)


def is_zero(value: Any) -> bool:
    """The number 0, or a tensor that was made of it and that nobody writes into."""
    written = isinstance(value, fx.Node) and any(map(writes, value.users))
    return not written and number_of(value) == 0


def writes(user: fx.Node) -> bool:
    """Whether a user may write into what it uses, or hand it on under another name."""
    call = read_call(user)
    return user.op != "output" and (call is None or call.op.inplace or call.op.alias)


def scale_by_mask(one: Masked, rows: fx.Node, gate: fx.Node | None) -> fx.Node:
    """The masked product as rows times a masked gate, written before it. gate: None where the rows are not scaled."""
    graph, place = one.node.graph, one.node
    with graph.inserting_before(place):
        value = certain(tensor_of(rows))
        if gate is None:
            mask = one.condition if one.kept else add_call(graph, place, torch.logical_not, one.condition)
            return add_call(graph, place, torch.mul, rows, add_call(graph, place, "to", mask, value.dtype))
        chosen = (gate, 0.0) if one.kept else (0.0, gate)
        column = add_call(graph, place, torch.where, one.condition, *chosen)
        return add_call(graph, place, torch.mul, rows, column)


def holds_for_chosen(condition: Any, index: fx.Node, row: fx.Node, kept: bool) -> bool:
    """Whether it is ``(index == e).any(-1, keepdim=True)``; with kept=False, its opposite."""
    call = read_call(condition)
    while call is not None and not kept and call.name == "logical_not":
        condition, kept = call["input"], True
        call = read_call(condition)
    if call is None or not kept:
        return False
    vector = column_of(condition)
    call = call if vector is None else read_call(vector)
    if call is None or call.name != "any" or call["dim"] not in (1, -1) or call["keepdim"] is not (vector is None):
        return False
    chosen = read_call(call["input"])
    return chosen is not None and chosen.name == "eq" and chosen["input"] is index and chosen["other"] is row


def left_by_mask(node: fx.Node, index: fx.Node, row: fx.Node) -> fx.Node | None:
    """The rows that a mask of the tokens that chose the expert is laid over, ``x * mask``: of those it leaves all."""
    one = masked(node)
    return one.rows if one is not None and holds_for_chosen(one.condition, index, row, one.kept) else None


def compared_gate(condition: Any, gate: fx.Node) -> tuple[Any, float] | None:
    """(the comparison, the number) of ``gate > number``."""
    call = read_call(condition)
    if call is None or call.op.inplace or call.name not in COMPARISONS or type(call["other"]) not in (int, float):
        return None
    return (COMPARISONS[call.name], call["other"]) if same_reading(call["input"], gate) else None


COMPUTED = frozenset({"getitem", "unsqueeze", "select", "sum", "mul", "eq"})


def same_reading(a: Any, b: Any) -> bool:
    """Whether two nodes are the same reading of the same tensor. (All are asked what is written between the
    iterations.)"""
    return bool(same_value(a, COMPUTED) == same_value(b, COMPUTED))
