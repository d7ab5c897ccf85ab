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
        captures: Sequence[Any],
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        found = code_of(forward)(*captures)
        outputs, kept = found[:n_outputs], found[n_outputs:]
        is_tensor = [isinstance(k, torch.Tensor) for k in kept]
        ctx.save_for_backward(*(k for k, yes in zip(kept, is_tensor, strict=True) if yes))
        ctx.rest = [None if yes else k for k, yes in zip(kept, is_tensor, strict=True)]
        ctx.is_tensor, ctx.graph, ctx.n_outputs = is_tensor, backward, n_outputs
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        return cast(tuple[Any, ...], outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if yes else value for yes, value in zip(ctx.is_tensor, ctx.rest, strict=True)]
        return (None, None, None, None, None, *code_of(ctx.graph)(*gradients, *kept))


@functools.cache
def named(name: str) -> type[GraphFunction]:
    """As ``GraphFunction``, by the user's name: autograd's errors and ``grad_fn`` show it."""
    return type(name, (GraphFunction,), {})


def autograd_function(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    n_outputs: int,
    constant: tuple[int, ...],
    captures: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    name: str,
) -> tuple[Any, ...]:
    """``Function.apply(...)``: the outputs of the forward graph, with the backward graph as their history.

    forward: takes ``captures``, gives ``n_outputs`` outputs and then whatever backward needs. backward: takes the
    outputs' gradients and what forward kept; gives one gradient (or None) for each of ``tensors``. constant: indices of
    outputs that are not differentiable. name: of the user's class.
    """
    result = named(name).apply(forward, backward, n_outputs, constant, captures, *tensors)
    return cast(tuple[Any, ...], result)


fx.wrap("autograd_function")
