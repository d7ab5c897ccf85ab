"""Gradients of the experts operator that can be differentiated again: a penalty on gradients, a Hessian's product.

The forms' own backwards are opaque to autograd. Where gradients are asked for with ``create_graph=True``, they come
from torch's autograd over the reference form instead, which goes to any order.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class AsItWas(torch.autograd.Function):
    """A tensor's data as forward has seen it, with the tensor itself for its history: ``p.data = ...`` may have come
    between."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, then: Tensor) -> Tensor:
        return then.view_as(then)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def gradients(
    forward: Callable[[Sequence[Any]], Tensor], grad: Tensor, inputs: Sequence[Tensor | None],
    data: Sequence[Tensor | None], needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient of each input that ``needs`` asks for, with a history that leads to ``grad`` and to all inputs.

    forward: gives the operator's result from tensors in the inputs' places, in operators that autograd knows. inputs:
    with their histories. data: the same with the numbers that forward has seen, of their shapes and dtypes.
    """
    # Each input as a tensor of its own: where one of them is computed from another, that is not this operator's part.
    each = [None if t is None or d is None else AsItWas.apply(t, d) for t, d in zip(inputs, data, strict=True)]
    with torch.autocast(grad.device.type, enabled=False):
        out = forward(each)
        wanted = [t for t, needed in zip(each, needs, strict=True) if needed and t is not None]
        found = iter(torch.autograd.grad(
            out, wanted, grad, create_graph=True, allow_unused=True, materialize_grads=True))
    return [next(found) if needed else None for needed in needs]
