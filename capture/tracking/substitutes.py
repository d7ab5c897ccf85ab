"""Python code that is interpreted in place of a library's function: the same meaning, in a form that a graph can hold.

Each entry says why the original cannot be interpreted as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .. import torch_private


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """``Optimizer.zero_grad``: the original asks for each gradient whether it is there, which differs between the first
    step and the second, and then drops it in either case."""
    if set_to_none:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
    else:
        original_optimizer_zero_grad(self, set_to_none)


def module_zero_grad(self: Any, set_to_none: bool = True) -> None:
    """``Module.zero_grad``: for the same reason."""
    if set_to_none:
        for p in self.parameters():
            p.grad = None
    else:
        for p in self.parameters():
            if p.grad is not None:
                if p.grad.grad_fn is not None:
                    p.grad.detach_()
                else:
                    p.grad.requires_grad_(False)
                p.grad.zero_()


def group_tensors(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """``_group_tensors_by_device_and_dtype`` (torch/csrc/utils/foreach_utils): the original is C and wants tensors."""
    groups: dict[Any, Any] = {}
    for i, first in enumerate(lists[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in lists], [])
        grouped, indices = groups[key]
        for column, values in zip(grouped, lists, strict=True):
            if len(values):
                column.append(values[i])
        if with_indices:
            indices.append(i)
    return groups


def no_range(*_: Any, **__: Any) -> Any:
    """``record_function``: a name for the profiler around a part of the step; a graph has no such part."""
    return contextlib.nullcontext()


def nothing(*_: Any, **__: Any) -> None:
    """``torch._dynamo.graph_break`` asks torch.compile for a break, for reasons that do not hold here. The optimizers'
    health check warns of CUDA graphs."""


original_optimizer_zero_grad = torch_private.unwrapped(torch.optim.Optimizer.zero_grad)

SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.optim.Optimizer.zero_grad: zero_grad,
    torch.nn.Module.zero_grad: module_zero_grad,
    torch_private.group_tensors_by_device_and_dtype: group_tensors,
    torch.autograd.profiler.record_function: no_range,
    torch_private.graph_break: nothing,
    torch_private.health_check: nothing,
}
