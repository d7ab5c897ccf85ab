"""Integers that are positions along an axis (of experts), put together or taken in parts, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.routing import index_root, rearranges, takes_part
from moebius.lowering.experts.views import column_of
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.values import certain, computed_of, dtype_of, is_floating, same_shape, shape_of, tensor_of

EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
INDICES = (torch.int64, torch.int32)


Bounds = tuple[int, int]


def position_bounds(node: Any) -> Bounds | None:
    """[low, high) that an integer tensor's values certainly lie in: positions along an axis, put together, taken in
    parts, or changed by operators whose range follows from that of their operands."""
    if type(node) is int:
        return node, node + 1
    node = whole_of(node) if isinstance(node, fx.Node) else node
    call = read_call(node)
    if call is None or call.op.inplace:
        return None
    match call.name:
        case "cat" | "stack":
            return hull(*call["tensors"]) if isinstance(call["tensors"], tuple | list) and call["tensors"] else None
        case "getitem" if call["index"] == 1 and isinstance(call["input"], fx.Node):
            return along_axis(read_call(call["input"]))
        case "cast":
            return position_bounds(call["input"]) if dtype_of(node) in EXACT else None
        case "remainder" if type(call["other"]) is int and call["other"] > 0:
            return (0, call["other"]) if is_whole(call["input"]) else None
        case "where":
            return hull(call["input"], call["other"])
        case "masked_fill":
            kept, filled = position_bounds(call["input"]), position_bounds(call["value"])
            if kept is None or filled is None:
                return None
            mask = read_call(call["mask"])
            compared = mask is not None and mask.name in ("eq", "ge") and mask["input"] is call["input"]
            high = kept[1] - 1 if compared and mask is not None and mask["other"] == kept[1] - 1 else kept[1]
            return min(kept[0], filled[0]), max(high, filled[1])
        case "clamp" if is_whole(call["input"]):
            return clamped(position_bounds(call["input"]), call["min"], call["max"])
    return along_axis(call) if call.name not in ("topk", "sort", "max", "min") else None


def hull(*parts: Any) -> Bounds | None:
    """What all of these certainly lie in."""
    known = [bounds for part in parts if (bounds := position_bounds(part)) is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(parts) else None


def clamped(bounds: Bounds | None, low: Any, high: Any) -> Bounds | None:
    lows = [n for n in (low, None if bounds is None else bounds[0]) if n is not None]
    highs = [n for n in (None if high is None else high + 1, None if bounds is None else bounds[1]) if n is not None]
    if not lows or not highs or not all(type(n) is int for n in (*lows, *highs)):
        return None
    return (max(lows), min(highs)) if max(lows) < min(highs) else None


def is_whole(node: Any) -> bool:
    return dtype_of(node) in INDICES


def along_axis(call: Call | None) -> Bounds | None:
    """Of the positions along an axis that an operator gives."""
    if call is None or not call.op.positions or type(call["dim"]) is not int:
        return None
    shape = shape_of(call["input"])
    size = shape[call["dim"]] if shape else None
    return (0, size) if isinstance(size, int) else None


def whole_of(node: fx.Node) -> fx.Node:
    """The tensor that has these numbers, and perhaps others, before views and parts of it are taken."""
    return behind(node, lambda call: rearranges(call) or takes_part(call, (None,)))


def computed_since_the_choice(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that these were computed of, down to where the experts were chosen: what a proof about them goes through."""
    return computed_of(nodes, lambda node: () if is_choice(node) else node.all_input_nodes)


def is_choice(node: fx.Node) -> bool:
    """Whether it is given, has gradients, or says where along an axis numbers of floating point are largest."""
    value, call = tensor_of(node), read_call(node)
    if node.op == "placeholder" or (value is not None and value.requires_grad):
        return True
    return call is not None and call.op.positions and is_floating(call["input"])


def uncast(node: Any) -> Any:
    """The tensor of whole numbers before it was cast to another type that has them all."""

    def exact(call: Call) -> bool:
        return call.name == "cast" and dtype_of(call.node) in EXACT

    return behind(node, exact)


def root_of(node: fx.Node) -> fx.Node:
    """The tensor that has the same numbers in whatever order."""
    while True:
        node = index_root(uncast(node))
        call = read_call(node)
        if is_sorted(node):
            assert call is not None
            node = read_call(call["input"])["input"]  # type: ignore[index]
            continue
        if call is not None and call.name == "getitem" and keeps_order(call["index"]) and shape_of(call["input"]):
            node = call["input"]
            continue
        found = None if call is None else lookup(call)
        if found is None or not is_order(found[1]) or not same_shape(shape_of(node), shape_of(found[0])):
            return node
        node = found[0]


def keeps_order(index: Any) -> bool:
    """Whether ``x[index]`` has the numbers of x, all of them in their order."""
    keys = index if isinstance(index, tuple) else (index,)
    return all(key is None or key is Ellipsis or (isinstance(key, slice) and key == slice(None)) for key in keys)


def lookup(call: Call) -> tuple[fx.Node, fx.Node] | None:
    """(table, positions [S]) of ``table[positions]``, whole rows."""
    index = call.args.get("index")
    if not isinstance(call.args.get("input"), fx.Node):
        return None
    if call.name == "gather" and call["dim"] == 0 and same_shape(shape_of(index)[1:], shape_of(call["input"])[1:]):  # type: ignore[index]
        index = rows_of_column(index)
    elif call.name not in ("getitem", "index_select") or (call.name == "index_select" and call["dim"] != 0):
        return None
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    value = tensor_of(index) if isinstance(index, fx.Node) else None
    whole = value is not None and value.dim() == 1 and value.dtype in INDICES
    return (call["input"], index) if whole else None  # type: ignore[return-value]


def rows_of_column(index: Any) -> fx.Node | None:
    """positions [S] of ``positions[:, None].expand(-1, D)``, each the same for all of a row."""
    call = read_call(index)
    if call is None or len(shape_of(index) or ()) != 2 or call.name not in ("expand", "repeat"):
        return None
    numbers = column_of(call["input"])
    return numbers if same_shape(shape_of(numbers), (shape_of(index) or ())[:1]) else None


def is_sorted(node: fx.Node) -> bool:
    """``torch.sort(flat)[0]`` of one axis, the smallest first."""
    return part_of_sort(node, 0)


def is_order(node: Any) -> bool:
    """Where the items of a tensor of one axis are, smallest first: ``torch.sort(flat)[1]``, ``torch.argsort(flat)``."""
    if not isinstance(node, fx.Node):
        return False
    call = read_call(node)
    if call is not None and call.name == "argsort":
        return not call["descending"] and len(shape_of(node) or ()) == 1
    return part_of_sort(node, 1)


def sorted_by(order: fx.Node) -> fx.Node:
    """What ``order`` is the order of."""
    call = certain(read_call(order))
    source = certain(call if call.name == "argsort" else read_call(call["input"]))
    return source["input"]


def part_of_sort(node: fx.Node, part: int) -> bool:
    call = read_call(node)
    if call is None or call.name != "getitem" or call["index"] != part or not isinstance(call["input"], fx.Node):
        return False
    made = read_call(call["input"])
    return made is not None and made.name == "sort" and not made["descending"] and len(shape_of(node) or ()) == 1
