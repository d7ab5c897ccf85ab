"""Answers that rest on strides, or on sizes, which an operator's fake tells otherwise than the operator.

Torch's fakes of some operators give what they compute other strides than the operators do, where an operand is not
contiguous (found by comparing the two over torch's own sample inputs, torch 2.13 on a CPU). No operator computes
something else for that, but a program that asks decides by it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from .values import Break, TensorProxy

ASK = frozenset(("is_contiguous", "stride", "dim_order"))
GIVE_BACK = "contiguous"  # its operand, where that is contiguous already
# By the name in a graph; of a batch norm what is in channels_last is known well.
UNSURE = frozenset(
    (
        "copysign div divide floor_divide floordiv heaviside ldexp logaddexp logaddexp2 logical_and "
        "logical_or logical_xor normal batch_norm channel_shuffle native_channel_shuffle pad max_pool1d "
        "max_pool1d_with_indices max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d "
        "max_unpool3d"
    ).split()
)
# They leave ``out`` the sizes that it has, if those are of as many numbers; their fakes make one dimension of it.
FILLING = frozenset(("arange", "range", "linspace", "logspace"))
# What they compute is contiguous, whatever their operands are.
SURE = frozenset(("contiguous", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "embedding"))


def refuse_unsure(function: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """A graph break where an answer, or whether there is a copy, rests on strides that may be others."""
    name = getattr(function, "__name__", "")
    if name in FILLING and isinstance(out := kwargs.get("out"), TensorProxy) and out.fake.dim() != 1:
        raise Break("out= of other sizes", f"{name} may keep or change them", "give it a tensor of one dimension")
    if (name in ASK or name == GIVE_BACK) and args and isinstance(args[0], TensorProxy):
        proxy = args[0]
        if name == GIVE_BACK and not proxy.fake.is_contiguous(**kwargs):
            return  # a copy in the graph; the operator may still give its operand
        if proxy.source is None and (found := unsure(proxy.node)) is not None:
            detail = f"{name}() of what {found} has to do with: the strides that it computes are known when it runs"
            raise Break("strides of a computed tensor", detail, "make the operator's input contiguous, or do not ask")


def refuse_lost_tangent(function: Any, result: Any) -> None:
    """A graph break where a tensor is asked for its forward-mode derivative, and its fake has none: the tensor may."""
    if getattr(function, "__name__", "") == "_unpack_dual" and result[1] is None:
        raise Break("forward-mode derivative", "a tensor from before this graph may have one", "it runs natively")


def unsure(node: fx.Node) -> str | None:
    """The operator that a node's strides come from and that is not to be trusted with them, by its name."""
    seen, pending = set(), [node]
    while pending:
        here = pending.pop()
        name = name_of(here)
        if here in seen or name in SURE:
            continue
        seen.add(here)
        if name in UNSURE and is_odd(here, name) and any(is_mixed(operand, name) for operand in here.all_input_nodes):
            return name
        pending += here.all_input_nodes
    return None


def name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(inspect.unwrap(node.target), "__name__", "")


def is_odd(node: fx.Node, name: str) -> bool:
    """Whether an operator that has several forms is one whose fake is not right."""
    if name == "pad":
        return (node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")) != "constant"
    return name not in ("div", "divide") or "rounding_mode" in node.kwargs


def is_mixed(operand: fx.Node, name: str) -> bool:
    """Whether an operand's numbers do not lie in the order of its dimensions, nor, for a batch norm, channels last."""
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return name != "batch_norm" or last is None or not value.is_contiguous(memory_format=last)
