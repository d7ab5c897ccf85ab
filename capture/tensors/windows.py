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
        proxy, kernel, stride, *others = called(*args, **kwargs)
    except TypeError:  # torch's own says what does not fit
        return None
    fake = proxy.fake if is_kind(proxy, TensorProxy) else None
    stride = kernel if stride is None or stride == [] else stride
    kernels, strides = (list(v) if is_kind(v, tuple | list) else [v] * axes for v in (kernel, stride))
    fits = all(len(each) == axes and all(type(n) in (int, torch.SymInt) for n in each) for each in (kernels, strides))
    plain = [tuple(v) if is_kind(v, tuple | list) else (v,) for v in others]
    if not fits or any(set(v) - {n} for v, n in zip(plain, (0, 1, False), strict=True)):
        return None
    if fake is None or fake.dim() not in (axes + 1, axes + 2) or not fake.dtype.is_floating_point:
        return None
    if torch_private.depends_on_values(fake) or not fake.is_contiguous():
        return None
    sizes = fake.shape[-axes:]
    if not all(n >= 1 for n in (*kernels, *strides, *fake.shape)) or not all(
        size >= kernel for size, kernel in zip(sizes, kernels, strict=True)
    ):
        return None
    found = [(size - k) // s + 1 for size, k, s in zip(sizes, kernels, strides, strict=True)]
    result: torch.Tensor = Pooled.apply(fake, (*fake.shape[:-axes], *found))
    return result
