"""The number of an expert in a tensor of one element, known from the nodes that made it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.operators import read_call

from ..torch_facts.torch_private import is_certain, version_of

WIDE = (torch.int64, torch.int32)  # dtypes in which the number of an expert stays what it is
SAME_NUMBERS = frozenset({"flatten", "reshape", "clone", "contiguous", "squeeze", "unsqueeze", "cast"})
EXPERT = "expert"  # in a node's meta: the number that its only element is


def unwritten(node: fx.Node) -> bool:
    values = node.meta["val"]
    return not any(map(version_of, values if is_kind(values, tuple | list) else (values,)))


def number_of(node: Any) -> int | None:
    """The number of an expert that a tensor of one element certainly holds."""
    while is_kind(node, fx.Node):
        value = node.meta.get("val")
        if not is_kind(value, torch.Tensor) or value.dtype not in WIDE:
            return None
        if not all(is_certain(size == 1) for size in value.shape) or not unwritten(node):
            return None
        if EXPERT in node.meta:
            return int(node.meta[EXPERT])
        call = read_call(node)
        if call is None or call.op.inplace or call.name not in SAME_NUMBERS | {"getitem", "select"}:
            return None
        node = call["input"]
    return None
