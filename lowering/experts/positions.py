"""Integers that are positions along an axis (of experts), put together or taken in parts, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from moebius.lowering.experts.routing import index_root
from moebius.lowering.operators import read_call
from moebius.lowering.values import computed_of, shape_of, tensor_of


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
