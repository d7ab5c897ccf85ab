"""Integers that are positions along an axis (of experts), put together or taken in parts, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.routing import index_root
from moebius.lowering.operators import Call, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import computed_of, same_shape, shape_of, tensor_of

EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)
INDICES = (torch.int64, torch.int32)


def position_bounds(node: fx.Node) -> tuple[int, int] | None:
    """[low, high) that an integer tensor's values certainly lie in: positions along an axis, and those put together."""
    node = whole_of(node)
    call = read_call(node)
    if call is not None and call.name in ("cat", "stack"):
        parts = call["tensors"] if isinstance(call["tensors"], tuple | list) else (None,)
        joined = [position_bounds(part) if isinstance(part, fx.Node) else None for part in parts]
        known = [bounds for bounds in joined if bounds is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(joined) > 0 else None
    if call is not None and call.name == "getitem" and call["index"] == 1:
        call = read_call(call["input"])
    if call is None or not call.op.positions or type(call["dim"]) is not int:
        return None
    shape = shape_of(call["input"])
    size = shape[call["dim"]] if shape else None
    return (0, size) if isinstance(size, int) else None


def whole_of(node: fx.Node) -> fx.Node:
    """The tensor that has these numbers, and perhaps others, before views and parts of it are taken."""
    while True:
        node = index_root(node)
        call = read_call(node)
        if call is None or call.name != "getitem" or shape_of(call["input"]) is None:
            return node
        keys = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
        if not all(isinstance(key, slice | int) or key is None or key is Ellipsis for key in keys):
            return node
        node = call["input"]


def computed_since_the_choice(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that these were computed of, down to where the experts were chosen: what a proof about them goes through."""
    return computed_of(nodes, lambda node: () if is_choice(node) else node.all_input_nodes)


def is_choice(node: fx.Node) -> bool:
    """Whether it is given, has gradients, or says where along an axis numbers of floating point are largest."""
    value, call = tensor_of(node), read_call(node)
    if node.op == "placeholder" or (value is not None and value.requires_grad):
        return True
    searched = tensor_of(call["input"]) if call is not None and call.op.positions else None
    return searched is not None and searched.is_floating_point()


def uncast(node: Any) -> Any:
    """The tensor of whole numbers before it was cast to another type that has them all."""
    while isinstance(node, fx.Node) and (call := read_call(node)) is not None and call.name == "cast":
        value = tensor_of(node)
        if value is None or value.dtype not in EXACT:
            break
        node = call["input"]
    return node


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
    call = read_call(index) if isinstance(index, fx.Node) else None
    if call is None or len(shape_of(index) or ()) != 2 or call.name not in ("expand", "repeat"):
        return None
    numbers = without_unit_axis(call["input"])
    return numbers if same_shape(shape_of(numbers), (shape_of(index) or ())[:1]) else None


def without_unit_axis(column: Any) -> fx.Node | None:
    """numbers [S] of ``numbers.unsqueeze(-1)`` [S, 1], however that is written."""
    call = read_call(column) if isinstance(column, fx.Node) else None
    shape = shape_of(column) or ()
    if call is None or len(shape) != 2 or not same_size(shape[1], 1):
        return None
    if call.name not in ("reshape", "unsqueeze") and not (call.name == "getitem" and keeps_order(call["index"])):
        return None
    return call["input"] if len(shape_of(call["input"]) or ()) == 1 else None


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
    call = read_call(order)
    assert call is not None
    source = call if call.name == "argsort" else read_call(call["input"])
    assert source is not None
    return source["input"]


def part_of_sort(node: fx.Node, part: int) -> bool:
    call = read_call(node)
    if call is None or call.name != "getitem" or call["index"] != part or not isinstance(call["input"], fx.Node):
        return False
    made = read_call(call["input"])
    return made is not None and made.name == "sort" and not made["descending"] and len(shape_of(node) or ()) == 1
