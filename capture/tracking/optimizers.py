"""Optimizers: their state exists before the graph does.

torch's optimizers make a parameter's state in the first step in which it has a gradient. Captured as it is, that would
be one graph for the first step and another for the rest. The state is zeros either way, so it is made when tracing
comes to it, by the optimizer's own ``_init_group``, and the graph is that of every step.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from .gradients import Gradients
from .objects import Objects
from .values import TensorProxy

MadeState = tuple["weakref.ref[Any]", "weakref.ref[Any]"]  # an optimizer and a parameter


def is_state_maker(function: Any, args: list[Any]) -> bool:
    """Whether this is ``_init_group`` of one of torch's optimizers, called on an optimizer and a group."""
    return (
        function.__name__ == "_init_group"
        and function.__module__.startswith("torch.optim.")
        and len(args) > 1
        and isinstance(args[0], torch.optim.Optimizer)
    )


def make_state(optimizer: torch.optim.Optimizer, group: Any, objects: Objects, gradients: Gradients) -> None:
    """Make the state that this group's parameters with a gradient would get now, where they have none."""
    gradients.optimizers.append(optimizer)
    record = objects.record_of(group)
    if record is None or "params" not in record.obj:
        return
    missing = []
    for p in record.obj["params"]:
        proxy = gradients.tensors.proxies.get(id(p))
        if p in optimizer.state and optimizer.state[p]:
            continue
        if proxy is None:  # not met in this step: its gradient is as it was when the step began
            has_gradient = p.grad is not None
        else:
            has_gradient = isinstance(proxy, TensorProxy) and gradients.read(proxy, objects.enter) is not None
        if has_gradient:
            missing.append(p)
    if not missing:
        return
    gradients.made_state += [(weakref.ref(optimizer), weakref.ref(p)) for p in missing]
    if isinstance(optimizer, torch.optim.SGD):
        make_momentum(optimizer, record.obj, missing)
        if not getattr(optimizer, "_need_device_dtype_check_for_fused", False):
            return
    lists = len(inspect.signature(type(optimizer)._init_group).parameters) - 2  # type: ignore[attr-defined]
    before = [p.grad for p in missing]
    try:
        for p in missing:
            p.grad = p.detach()  # the state's shape and dtype are the parameter's; no value is read
        with torch.no_grad():
            init_group = type(optimizer)._init_group  # type: ignore[attr-defined]
            init_group(optimizer, {**record.obj, "params": missing}, *([] for _ in range(lists)))
    finally:
        for p, gradient in zip(missing, before, strict=True):
            p.grad = gradient


def is_untouched(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
    """Whether a parameter has no gradient, and a state that no step has updated."""
    state = optimizer.state.get(p)
    if p.grad is not None or not state:
        return False
    return all(isinstance(value, torch.Tensor) and not value.any() for value in state.values())


def make_momentum(optimizer: torch.optim.SGD, group: dict[str, Any], missing: list[torch.Tensor]) -> None:
    """SGD's first buffer is the gradient itself. Without dampening that is what zeros become in the first step."""
    if group["momentum"] == 0 or group["dampening"] != 0:
        return
    for p in missing:
        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
