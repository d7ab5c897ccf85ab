"""Integers that are positions along an axis (of experts), in whatever order, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from moebius.lowering.experts.batched import gathered_with
from moebius.lowering.experts.routing import EXACT, index_root
from moebius.lowering.experts.views import column_of
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.values import (
    certain,
    computed_of,
    dtype_of,
    is_floating,
    rank_of,
    same_shape,
    shape_of,
    tensor_of,
)


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
            node = certain(read_call(certain(call)["input"]))["input"]
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
    index = gathered_with(call.node)
    if call.name == "gather" and call["dim"] == 0:
        whole = same_shape((shape_of(call["index"]) or ())[1:], (shape_of(call["input"]) or ())[1:])
        index = rows_of_column(call["index"]) if whole else None
    if index is None or rank_of(index) != 1 or not isinstance(call["input"], fx.Node):
        return None
    return call["input"], index


def rows_of_column(index: Any) -> fx.Node | None:
    """positions [S] of ``positions[:, None].expand(-1, D)``, each the same for all of a row."""
    call = read_call(index)
    if call is None or rank_of(index) != 2 or call.name not in ("expand", "repeat"):
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
        return not call["descending"] and rank_of(node) == 1
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
    return made is not None and made.name == "sort" and not made["descending"] and rank_of(node) == 1
