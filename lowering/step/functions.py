"""A user's ``torch.autograd.Function`` as a node: its forward and its backward are graphs of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from moebius.lowering.graph import code_of


class GraphFunction(torch.autograd.Function):
    """What runs in the user's function's place: the two graphs, and what the first keeps for the second."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        n_outputs: int,
        constant: tuple[int, ...],
        saved: tuple[int, ...],
        captures: Sequence[Any],
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        found = code_of(forward)(*captures)
        outputs, kept = found[:n_outputs], list(found[n_outputs:])
        if saved:
            ctx.save_for_backward(*(kept[i] for i in saved))
            for i in saved:
                kept[i] = None
        ctx.kept, ctx.saved, ctx.graph = kept, saved, backward
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        return cast(tuple[Any, ...], outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        kept = list(ctx.kept)
        if ctx.saved:  # (else there is nothing that a second backward could miss)
            for i, value in zip(ctx.saved, ctx.saved_tensors, strict=True):
                kept[i] = value
        return (None, None, None, None, None, None, *code_of(ctx.graph)(*gradients, *kept))


@functools.cache
def named(name: str) -> type[GraphFunction]:
    """As ``GraphFunction``, by the user's name: autograd's errors and ``grad_fn`` show it."""
    return type(name, (GraphFunction,), {})


def autograd_function(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    n_outputs: int,
    constant: tuple[int, ...],
    saved: tuple[int, ...],
    captures: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    name: str,
) -> tuple[Any, ...]:
    """``Function.apply(...)``: the outputs of the forward graph, with the backward graph as their history.

    forward: takes ``captures``, gives ``n_outputs`` outputs and then whatever backward needs. backward: takes the
    outputs' gradients and what forward kept; gives one gradient (or None) for each of ``tensors``. constant: indices of
    outputs that are not differentiable. saved: which of what forward keeps it has saved by ``save_for_backward``, which
    looks for changes in place and lets go after one backward. name: of the user's class.
    """
    result = named(name).apply(forward, backward, n_outputs, constant, saved, captures, *tensors)
    return cast(tuple[Any, ...], result)


fx.wrap("autograd_function")
