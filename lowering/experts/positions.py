"""Integers that are positions along an axis (of experts), put together or taken in parts, and what they rest on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.routing import index_root
from moebius.lowering.operators import read_call
from moebius.lowering.values import computed_of, shape_of, tensor_of

JOINS = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack})
EXTREMES = frozenset({torch.max, torch.min, "max", "min"})
CHOICES = frozenset({"topk", "argmax"})


def position_bounds(node: fx.Node) -> tuple[int, int] | None:
    """[low, high) that an integer tensor's values certainly lie in: positions along an axis, and those put together."""
    node = whole_of(node)
    if node.target in JOINS:
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        joined = [position_bounds(part) if isinstance(part, fx.Node) else None for part in parts or (None,)]  # type: ignore[union-attr]
        known = [bounds for bounds in joined if bounds is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(joined) else None
    call = read_call(node)
    if call is not None and call.name == "getitem" and call["index"] == 1 and isinstance(call["input"], fx.Node):
        searched, dim = along_axis(call["input"])
    elif call is not None and call.name in ("argmax", "argsort"):
        searched, dim = call["input"], call["dim"]
    else:
        return None
    shape = shape_of(searched)
    size = shape[dim] if shape and isinstance(dim, int) else None
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


def along_axis(node: fx.Node) -> tuple[Any, Any]:
    """(a tensor, an axis) of which an operator gives values and positions: ``topk``, ``sort``, ``max(x, dim)``."""
    call = read_call(node)
    if call is not None:
        return (call["input"], call["dim"]) if call.name in ("topk", "sort") else (None, None)
    if node.target in EXTREMES and node.args:
        return node.args[0], node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return None, None


def computed_since_the_choice(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that these were computed of, down to where the experts were chosen: what a proof about them goes through."""
    return computed_of(nodes, lambda node: () if is_choice(node) else node.all_input_nodes)


def is_choice(node: fx.Node) -> bool:
    value, call = tensor_of(node), read_call(node)
    chosen = node.target in EXTREMES or (call is not None and call.name in CHOICES)
    return node.op == "placeholder" or chosen or (value is not None and value.requires_grad)
