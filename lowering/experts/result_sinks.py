"""Experts by where their results meet (missed_experts.py), where no front end has found them by their projections: what
each gives, and the rows that it is made of, for blocks.py."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx

from moebius.lowering.experts.blocks import NoRows, found_rows
from moebius.lowering.experts.missed_experts import MissedExperts, is_column, is_parameter
from moebius.lowering.experts.rules_computed import ROW_BY_ROW
from moebius.lowering.operators import PRODUCTS, Call, behind, read_call
from moebius.lowering.values import computed_of, rank_of, tensor_of, value_of

INSIDE = ROW_BY_ROW | {"linear", "matmul", "addmm", "chunk", "split", "narrow", "getitem", "reshape", "dropout", "glu",
                       "unbind", "where", "gt", "ge", "lt", "le", "t", "T", "mT", "transpose"}  # fmt: skip
WRAPS = frozenset({"cast", "contiguous", "clone", "type_as"})
FAR = 200


def ends(one: MissedExperts) -> list[fx.Node]:
    """What each expert gives, before it is scaled by the routing."""
    return [before_scaling(result) for result in one.results]


def before_scaling(node: fx.Node) -> fx.Node:
    while (call := read_call(node)) is not None and not call.op.inplace:
        if call.name == "mul":
            wide = [n for n in (call["input"], call["other"]) if isinstance(n, fx.Node) and not is_column(n, node)]
            if len(wide) != 1 or len(node.all_input_nodes) != 2:
                break
            node = wide[0]
        elif call.name in WRAPS:
            node = call["input"]
        else:
            break
    return node


def shared_by(ends: list[fx.Node]) -> set[fx.Node]:
    """What all of them are computed of."""
    first, *others = (computed_of([end]) for end in ends)
    return first.intersection(*others)


def rows_behind(end: fx.Node, shared: Container[fx.Node] = ()) -> list[fx.Node] | None:
    """The rows [S, D] that were looked up, each its own node, and of which the rest is computed row by row; None where
    it is computed of something else. shared: what the other experts read too, as it is."""
    rows: list[fx.Node] = []
    seen: list[fx.Node] = []

    def onwards(node: fx.Node) -> list[fx.Node]:
        seen.append(node)
        call = read_call(node)
        if is_own(node):
            return []
        if len(seen) > FAR:
            raise NoRows
        if node not in shared and (node is end or call is None or not (picks_rows(call) or is_one_of(call))):
            if call is None or call.name not in INSIDE or call.op.inplace:
                raise NoRows
            given = call["input"] if call.name in PRODUCTS else None
            if not isinstance(given, fx.Node) or given not in shared or not is_own(given):
                return node.all_input_nodes
            rows.append(given)  # (tokens that want gradients may look like a parameter)
            return [one for one in node.all_input_nodes if one is not given]
        if rank_of(node) != 2:
            raise NoRows
        rows.append(node)
        return []

    return found_rows(rows, end, onwards)


def is_own(node: fx.Node) -> bool:
    """A parameter, or a view of one."""
    base = behind(node, lambda call: call.op.alias and not picks_rows(call))
    value = tensor_of(base)
    return base.op == "placeholder" and (is_parameter(base) or value is None or value.dim() < 2)


def is_one_of(call: Call) -> bool:
    """``parts[e]`` of a tensor of parts."""
    return call.name == "getitem" and type(call["index"]) is int and tensor_of(call["input"]) is not None


def picks_rows(call: Call) -> bool:
    """Whether an operator picks rows of a tensor: a piece of it, or those at an index."""
    if call.name == "rows_if":
        return True
    if call.name in ("index_select", "narrow"):
        return call["dim"] == 0
    if call.name != "getitem" or not isinstance(call["input"], fx.Node):
        return False
    if isinstance(value_of(call["input"]), tuple | list):
        made = read_call(call["input"])
        return made is not None and made.name in ("split", "chunk", "unbind") and made["dim"] == 0
    keys: Any = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    first = keys[0] if keys else None
    return (isinstance(first, slice) and first != slice(None)) or rank_of(first) > 0
