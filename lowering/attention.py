"""Attention without a mask on a CPU, run by ``kernels.attention``.

The lowered graph stays as it is, as with ``chains``: only the code that runs it calls another function, which is asked
for each call whether it takes these tensors; else torch's runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from moebius.kernels.attention import attention
from moebius.lowering.draft import finish
from moebius.lowering.torch_private import nobody_looks, transforms_are_active
from moebius.lowering.values import tensor_of

BY_POSITION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's function."""
    if nobody_looks() and not transforms_are_active():
        shared = query.dim() > 1 and query.shape[1] != key.shape[1]
        if not shared or options.get("enable_gqa"):
            found = attention(query, key, value, options.get("is_causal", False), options.get("scale"))
            if found is not None:
                return found
    return scaled_dot_product_attention(query, key, value, **options)


def finish_with_ours(gm: fx.GraphModule) -> fx.GraphModule:
    """``draft.finish``: what could be ours is called as ``attend``."""
    nodes = [n for n in gm.graph.find_nodes(op="call_function", target=scaled_dot_product_attention) if may_be_ours(n)]
    before = [(node, node.args, node.kwargs) for node in nodes]
    for node in nodes:
        named = dict(zip(BY_POSITION, node.args, strict=False)) | node.kwargs
        given = tuple(named.pop(name) for name in BY_POSITION[:3])
        node.target, node.args, node.kwargs = attend, given, named
    try:
        return finish(gm)
    finally:
        for node, args, kwargs in before:
            node.target, node.args, node.kwargs = scaled_dot_product_attention, args, kwargs


def may_be_ours(node: fx.Node) -> bool:
    """Whether it has no mask, drops nothing, and is in float32 on a CPU."""
    named: dict[str, Any] = dict(zip(BY_POSITION, node.args, strict=False)) | node.kwargs
    found = tensor_of(node)
    return (
        found is not None and found.dtype == torch.float32 and found.device.type == "cpu"
        and named.get("attn_mask") is None and named.get("dropout_p", 0.0) == 0.0
        and type(named.get("is_causal", False)) is bool and type(named.get("scale")) in (float, type(None))
        and type(named.get("enable_gqa", False)) is bool
    )  # fmt: skip
