"""Rows that are certainly zero, because the token did not choose the expert: ``x[None] * gates.T[..., None]``, where
gates are zero for the experts that topk did not name (zeros.py).

An expert without biases whose function is zero at zero makes zeros of such a row, and its weights get zero gradients of
it. What the row's own gradient would be, reaches nothing: it is scaled by the gate's zero on its way to x, and the
gate's gradient there is dropped by ``scatter``. So these rows need not run. The two differ where x is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.views import indexed
from moebius.lowering.experts.zeros import Zeros
from moebius.lowering.operators import read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import apply, rank_of, same_shape, shape_of, tensor_of

VIEWS = frozenset(
    {"transpose", "permute", "t", "T", "mT", "unsqueeze", "reshape", "getitem", "flatten", "contiguous", "cast"}
)


@dataclass
class Gates:
    """gates [T, E], zero but where ``index`` [T, K] says, at most K in a row. views: these make the rows' factor
    [..., 1] of it, in order."""

    index: fx.Node
    gates: fx.Node
    views: list[fx.Node]


def gates_of(rows: fx.Node, storage: Storage, end: fx.Node) -> Gates | None:
    """What decides which of these rows [..., D] are zero, entry by entry in their order; None where nothing does."""
    node, width = rows, (shape_of(rows) or (None,))[-1]
    while (call := read_call(node)) is not None and call.name in ("reshape", "flatten", "contiguous", "cast"):
        node = call["input"]
        if not isinstance(node, fx.Node) or (shape_of(node) or (None,))[-1] != width:
            return None
    if call is None or call.name != "mul" or call.op.inplace:
        return None
    for factor in (call["input"], call["other"]):
        shape, whole = shape_of(factor) or (), shape_of(node) or ()
        column = isinstance(factor, fx.Node) and len(shape) > 1 and type(shape[-1]) is int and shape[-1] == 1
        if column and width != 1 and same_shape(shape[:-1], whole[:-1]):
            return gates_behind(factor, storage, end)
    return None


def gates_behind(factor: fx.Node, storage: Storage, end: fx.Node) -> Gates | None:
    views: list[fx.Node] = []
    node = factor
    while (call := read_call(node)) is not None and call.name in VIEWS and isinstance(call["input"], fx.Node):
        if call.name == "getitem" and indexed(call["index"], (None,) * rank_of(call["input"])) is None:
            break
        views += [node] if call.name != "cast" else []
        node = call["input"]
    index = Zeros(storage, end).index_of(node) if rank_of(node) == 2 else None
    if index is None or storage.writer_into((index, *views), end) is not None:
        return None
    return Gates(index, node, views[::-1])


def zero_at_zero(body: fx.Graph, rows: fx.Node, result: fx.Node) -> bool:
    """Whether the iteration's function gives zeros for rows of zeros, with finite gradients, and zero ones for its
    weights.

    Tried with random weights: products of zeros are zeros whatever they are, and nothing else is in it."""
    values: dict[fx.Node, Any] = {}
    leaves: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            for node in body.nodes:
                like = tensor_of(node)
                if node is rows and like is not None:
                    values[node] = torch.zeros((2, *like.shape[1:]), dtype=like.dtype, device="cpu", requires_grad=True)
                    leaves.append(values[node])
                elif is_weight(node) and like is not None:
                    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu")
                    made = drawn.to(like.dtype)
                    values[node] = made.requires_grad_()
                    leaves.append(made)
                elif any(argument in values for argument in node.all_input_nodes):
                    given: Any = [fx.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs)]
                    values[node] = apply(node, *given)
                if node is result:
                    break
            out = values[result]
            found = torch.autograd.grad(out.sum(), leaves)
    except Exception:  # it works on other rows only, or reads what is not here
        return False
    finite = all(bool(gradient.isfinite().all()) for gradient in found)
    weights = [gradient for leaf, gradient in zip(leaves, found, strict=True) if leaf is not values[rows]]
    return finite and not out.any() and not any(bool(gradient.any()) for gradient in weights)


def is_weight(node: fx.Node) -> bool:
    """``w[e]`` in the body of an iteration."""
    call = read_call(node)
    if call is None or call.name != "getitem" or not isinstance(call["index"], fx.Node):
        return False
    return call["index"].op == "placeholder" and same_size(rank_of(call["input"]), 3)
