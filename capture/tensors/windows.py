"""Pooling on fakes over windows whose size varies, ``F.max_pool1d(x, x.size(2))``: C takes the window for one of today.

What a fake stands for here is the result's shape and its way back to the input; the graph holds torch's operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.values import TensorProxy


def greatest(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: Any = False,
    return_indices: Any = False,
) -> tuple:  # fmt: skip
    """How a maximum over windows is called."""
    return input, kernel_size, stride, padding, dilation, (ceil_mode, return_indices)


def averaged(
    input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: Any = False,
    count_include_pad: Any = True, divisor_override: Any = None,
) -> tuple:  # fmt: skip
    """How an average is."""
    return input, kernel_size, stride, padding, 1, (ceil_mode,)


POOLS: dict[Any, tuple[int, Callable[..., tuple]]] = {
    getattr(F, f"{name}_pool{axes}d"): (axes, called) for name, called in (("max", greatest), ("avg", averaged))
    for axes in (1, 2, 3)
}  # fmt: skip


class Pooled(torch.autograd.Function):
    """The result, contiguous; backward gives a contiguous gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: tuple) -> torch.Tensor:
        ctx.shape = rows.shape
        return rows.new_empty(sizes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.new_empty(ctx.shape), None


def like_pool(function: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the call gives, where its windows or their distances are numbers that vary and all else is plain; else
    None."""
    axes, called = POOLS[function]
    open_ = [leaf for leaf in torch_private.tree_leaves((args[1:], kwargs)) if torch_private.is_symbolic(leaf)]
    if not open_ or any(map(torch_private.depends_on_values, open_)):
        return None
    try:
        proxy, *numbers, plain = called(*args, **kwargs)
    except TypeError:  # torch's own says what does not fit
        return None
    fake = proxy.fake if is_kind(proxy, TensorProxy) else None
    numbers[1] = numbers[0] if numbers[1] is None or numbers[1] == [] else numbers[1]
    by_axis = [list(v) if is_kind(v, tuple | list) else [v] * axes for v in numbers]
    if any(plain) or any(len(v) != axes or any(type(n) not in (int, torch.SymInt) for n in v) for v in by_axis):
        return None
    if fake is None or fake.dim() not in (axes + 1, axes + 2) or not fake.dtype.is_floating_point:
        return None
    if torch_private.depends_on_values(fake) or not fake.is_contiguous():
        return None
    kernels, strides, paddings, dilations = by_axis
    if not all(n >= 1 for n in (*kernels, *strides, *dilations, *fake.shape)):
        return None
    if not all(0 <= 2 * padding <= kernel for padding, kernel in zip(paddings, kernels, strict=True)):
        return None
    room = [
        size + 2 * padding - dilation * (kernel - 1) - 1
        for size, kernel, padding, dilation in zip(fake.shape[-axes:], kernels, paddings, dilations, strict=True)
    ]
    if not all(n >= 0 for n in room):
        return None
    found = [n // stride + 1 for n, stride in zip(room, strides, strict=True)]
    result: torch.Tensor = Pooled.apply(fake, (*fake.shape[:-axes], *found))
    return result
