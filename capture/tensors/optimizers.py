"""Optimizers: their state exists before the graph does.

torch's optimizers make a parameter's state in the first step in which it has a gradient. Captured as it is, that would
be one graph for the first step and another for the rest. The state is zeros either way, so it is made when tracing
comes to it, by the optimizer's own code, and the graph is that of every step.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from moebius.interpreter import is_kind
from moebius.lowering.step.optimizer_steps import count_step, counted_by

from ..heap.objects import Objects
from ..hook import ABSENT
from ..torch_facts import torch_private
from ..values.values import Break, TensorProxy
from .deferred_state import StateAtCapture
from .gradients import NATIVELY, Gradients


def is_state_maker(function: Any, args: list[Any]) -> bool:
    """Whether this is the state maker of one of torch's optimizers, called on an optimizer and a group."""
    return (
        function.__name__ == torch_private.STATE_MAKER
        and function.__module__.startswith("torch.optim.")
        and len(args) > 1
        and is_kind(args[0], torch.optim.Optimizer)
    )


def make_state(optimizer: torch.optim.Optimizer, group: Any, objects: Objects, gradients: Gradients) -> None:
    """Make the state that this group's parameters with a gradient would get now, where they have none."""
    states = objects.record_of(optimizer.state)
    # it was made in the step, or the step has looked at all there is: the graph makes the state, as Python would
    if objects.is_new(optimizer) or (states is not None and states.shadow is not None):
        gradients.wants_python()
        return
    gradients.optimizers.append(optimizer)
    objects.told[id(optimizer.state)] = gradients.others_ask  # which parameters have state depends on the batch
    record = objects.record_of(group)
    if record is None or "params" not in record.obj:
        return
    missing = []
    for p in record.obj["params"]:
        proxy = gradients.tensors.proxies.get(id(p))
        if p in optimizer.state and optimizer.state[p]:
            continue
        if p in optimizer.state or (states is not None and states.reads.get(p) is ABSENT):  # somebody has asked
            gradients.wants_python()
            continue
        if proxy is None:  # not met in this step: its gradient is as it was when the step began
            has_gradient = p.grad is not None
        else:
            has_gradient = is_kind(proxy, TensorProxy) and gradients.read(proxy, objects.enter) is not None
        if has_gradient:
            missing.append(p)
    if not missing:
        return
    if gradients.writer.in_loop:  # only the calls that come to it have the state
        detail, hint = "an optimizer's state is made inside the loop", "take the first step outside of it"
        raise Break("an expert loop changes Python state", detail, hint)
    made = [StateAtCapture(weakref.ref(optimizer), weakref.ref(p)) for p in missing]
    gradients.made_state += made
    initialise(optimizer, record.obj, missing)
    for state in made:
        state.remember()


def initialise(optimizer: torch.optim.Optimizer, group: dict[str, Any], missing: list[torch.Tensor]) -> None:
    """The state of the parameters that have none yet, by the optimizer's own code."""
    if is_kind(optimizer, torch.optim.SGD):
        make_momentum(optimizer, group, missing)
        if not getattr(optimizer, "_need_device_dtype_check_for_fused", False):
            return
    init_group = torch_private.state_maker(optimizer)
    lists = len(inspect.signature(init_group).parameters) - 2
    before = [p.grad for p in missing]
    try:
        for p in missing:
            p.grad = p.detach()  # the state's shape and dtype are the parameter's; no value is read
        with torch.no_grad():
            init_group(optimizer, {**group, "params": missing}, *([] for _ in range(lists)))
    finally:
        for p, gradient in zip(missing, before, strict=True):
            p.grad = gradient


def make_momentum(optimizer: torch.optim.SGD, group: dict[str, Any], missing: list[torch.Tensor]) -> None:
    """SGD's first buffer is the gradient itself. Without dampening that is what zeros become in the first step.

    They are negative ones: a gradient's zero that is added to those keeps its sign.
    """
    if group["momentum"] == 0 or group["dampening"] != 0:
        return
    for p in missing:
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, -0.0, memory_format=torch.preserve_format)


def count_the_step(optimizer: Any, gradients: Gradients, on_a_mesh: bool) -> None:
    """The hook of a mesh on all optimizers: a node that counts the step, where ranks train what it steps on."""
    tensors = gradients.tensors
    parameters = [getattr(p, "real", p) for group in optimizer.param_groups for p in group["params"]]
    groups = counted_by([p for p in parameters if is_kind(p, torch.Tensor)])
    if on_a_mesh and not groups or groups and not tensors.recomputes:  # (it looks at gradients, or has no node)
        raise Break("function outside of the graph", "the hook of a mesh on optimizers", NATIVELY)
    if groups:
        tensors.writer.call(count_step, *groups)
