"""One projection of experts: rows that lie in the order of their experts, each times its own expert's matrix.

What the experts operator (experts_op.py) has not got, layers are made of this: experts of a single projection, or of
more than three, with low-rank additions, norms or dropout between. It keeps what a loop of ``F.linear`` keeps: the rows
and the weights. Expert by expert, the library's GEMM, on any device; in float32 where a CPU is faster so (widening.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moebius.kernels import products, twice
from moebius.kernels.experts_op import as_they_are
from moebius.kernels.separate_weights import refuse_other_data

Own = tuple[bool, "Tensor | tuple[Tensor, ...]"]


def project(
    rows_SA: Tensor, weight_EBA: Tensor | Own, offsets: Tensor, bias_EB: Tensor | Own | None = None,
    hit: Tensor | None = None,
) -> Tensor:
    """``out[s] = weight[e] @ rows[s] + bias[e]``, [S, B], for the rows ``offsets[e]:offsets[e + 1]`` of expert e.

    rows_SA: [S, A], floating point. weight_EBA: [E, B, A], oriented as in F.linear, of rows' dtype; or (turned, parts)
    with parts a tensor for each expert, or one for all, whose two last axes lie the other way round where turned.
    offsets: integer [E + 1], from 0 to S, ascending. bias_EB: [E, B], or (False, a tensor [B] for each expert).
    hit: as in stack_experts: an expert with parameters of its own that is not among these gets no gradient.

    Every row is some expert's. Gradients may be differentiated again. Shapes are not checked: torch's products do.
    """
    turned, weights = of_parts(weight_EBA)
    _, biases = of_parts(bias_EB)
    layout = (turned, isinstance(weights, tuple), isinstance(biases, tuple), biases is not None)
    leaves = [leaf for part in (weights, biases) if part is not None
              for leaf in (part if isinstance(part, tuple) else (part,))]
    if hit is not None:  # what has no gradient is no part of autograd's graph: its hooks do not run
        there = running(layout, offsets, hit)
        leaves = [leaf if ran else leaf.detach() for leaf, ran in zip(leaves, there, strict=True)]
    return Projection.apply(layout, offsets, hit, rows_SA, *leaves)


def of_parts(weight: Any) -> Own:
    """(turned, parts) of a weight; the parts are None where there is none."""
    return weight if isinstance(weight, tuple) else (False, weight)


Layout = tuple[bool, bool, bool, bool]  # the weight is turned; weights, biases have a tensor each; there is a bias


def matrices(layout: Layout, leaves: Sequence[Tensor], experts: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """([B, A] of each expert, [B] of each or nothing)."""
    turned, own_weights, own_biases, biased = layout
    count = experts if own_weights else 1
    weights: Sequence[Tensor] = leaves[:experts] if own_weights else leaves[0].unbind(0)
    biases: Sequence[Tensor] = ()
    if biased:
        biases = leaves[count:] if own_biases else leaves[count].unbind(0)
    return [weight.mT for weight in weights] if turned else weights, biases


def segments(offsets: Tensor) -> list[tuple[int, int, int]]:
    """(expert, start, stop) of those that have rows."""
    return [(e, start, stop) for e, (start, stop) in enumerate(pairwise(offsets.tolist())) if start < stop]


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, rounded once."""
    given = [rows, weight] if bias is None else [rows, weight, bias]
    if products.is_wide(rows, weight.T, len(rows)):
        return torch.nn.functional.linear(*(tensor.to(torch.float32) for tensor in given)).to(rows.dtype)
    return torch.nn.functional.linear(*given)


def forward(layout: Layout, offsets: Tensor, rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """In operators that autograd knows."""
    weights, biases = matrices(layout, leaves, len(offsets) - 1)
    done = [linear(rows[start:stop], weights[e], biases[e] if biases else None)
            for e, start, stop in segments(offsets)]
    return torch.cat(done) if done else rows.new_empty(0, weights[0].shape[0])


class Projection(torch.autograd.Function):
    """Keeps the rows and the weights, with the data that they have in forward, as views of a loop keep it."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, offsets: Tensor, hit: Tensor | None, rows: Tensor, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, hit, rows, *as_they_are(leaves), *leaves)
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        turned, own, *_ = layout
        whole = leaves[: len(offsets) - 1] if turned and own else ()  # (a loop may multiply with the parameter itself)
        ctx.used_whole = [(leaf, leaf.data_ptr()) for leaf in whole if leaf.is_leaf]
        with torch.autocast(rows.device.type, enabled=False):
            return forward(layout, offsets, rows, leaves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        _, _, _, *needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * (3 + len(needs))
        offsets, hit, rows, *both = ctx.saved_tensors
        refuse_other_data(ctx.used_whole)
        leaves, themselves = both[: len(needs) - 1], both[len(needs) - 1 :]
        wanted = [needs[0], *(need and there for need, there in
                              zip(needs[1:], running(ctx.layout, offsets, hit), strict=True))]
        if torch.is_grad_enabled():  # create_graph=True
            found = twice.gradients(lambda each: forward(ctx.layout, offsets, each[0], each[1:]), grad,
                                    (rows, *themselves), (rows, *leaves), wanted)
        else:
            with torch.autocast(rows.device.type, enabled=False):
                found = gradients(ctx.layout, offsets, grad, rows, leaves, wanted)
        return None, None, None, *found


def running(layout: Layout, offsets: Tensor, hit: Tensor | None) -> list[bool]:
    """For each leaf whether its expert's iteration ran; a tensor of all experts always has a gradient."""
    _, own_weights, own_biases, biased = layout
    experts = range(len(offsets) - 1)
    ran = set(experts) if hit is None else set(hit.unique().tolist())
    found: list[bool] = []
    for own in (own_weights, *([own_biases] if biased else [])):
        found += [e in ran for e in experts] if own else [True]
    return found


def gradients(layout: Layout, offsets: Tensor, grad: Tensor, rows: Tensor, leaves: Sequence[Tensor],
              wanted: Sequence[bool]) -> list[Tensor | None]:
    """Of the rows and of each leaf, None where it is not wanted; zero for experts without rows."""
    made = [torch.zeros_like(leaf) if want else None for leaf, want in zip(leaves, wanted[1:], strict=True)]
    experts, (turned, own_weights, own_biases, biased) = len(offsets) - 1, layout
    weights, _ = matrices(layout, leaves, experts)
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wanted[0] else None
    for e, start, stop in segments(offsets):
        own_grad, own_rows = grad[start:stop], rows[start:stop]
        if grad_rows is not None:
            products.product(grad_rows[start:stop], own_grad, weights[e], stop - start)
        room = made[e] if own_weights else made[0]
        if room is not None:
            left, right = (own_rows, own_grad) if turned else (own_grad, own_rows)
            products.product(room if own_weights else room[e], left.T, right, stop - start)
        first = experts if own_weights else 1
        room = None if not biased else made[first + e] if own_biases else made[first]
        if room is not None:
            (room if own_biases else room[e]).copy_(own_grad.sum(0))
    return [grad_rows, *made]
