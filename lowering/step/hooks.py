"""Backward with gradient hooks: the user's hooks are graphs, called by autograd where it would call the hooks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from moebius.lowering.torch_private import gradient_hooks

OBSERVERS = frozenset({"retain_grad"})


def backward_with_hooks(
    outputs: Sequence[torch.Tensor],
    options: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    bodies: Sequence[fx.GraphModule],
    captures: Sequence[Sequence[Any]],
) -> None:
    """``torch.autograd.backward(outputs, **options)`` with one graph for each of ``tensors`` in its hooks' place.

    A graph takes the gradient and its captures, and returns the gradient that goes on. Hooks that are registered on the
    tensors themselves are set aside meanwhile: the graph says what they do.
    """
    aside = [(hooks, list(hooks.items())) for hooks in map(gradient_hooks, tensors) if hooks]
    handles = []
    try:
        for hooks, _ in aside:
            hooks.clear()
        for tensor, body, captured in zip(tensors, bodies, captures, strict=True):
            handles.append(tensor.register_hook(partial(run_hook, body, captured)))
        torch.autograd.backward(outputs, **options)
    finally:
        for handle in handles:
            handle.remove()
        for hooks, items in aside:
            hooks.update(items)


def run_hook(body: fx.GraphModule, captured: Sequence[Any], gradient: torch.Tensor) -> Any:
    return body(gradient, *captured)


def observed(gm: fx.GraphModule) -> dict[str, frozenset[str]]:
    """By name, the values that are computed in the graph and whose gradients somebody sees, with who uses them.

    Where a user is gone, the gradient may take another way, and a hook may see less of it.
    """
    found: dict[str, frozenset[str]] = {}
    for node in gm.graph.nodes:
        seen: Sequence[Any] = ()
        if node.op == "call_method" and node.target in OBSERVERS:
            seen = node.args[:1]
        elif node.op == "call_function" and node.target is backward_with_hooks:
            seen = node.args[2]
        for value in seen:
            if isinstance(value, fx.Node) and value.op != "placeholder":
                found[value.name] = frozenset(user.name for user in value.users)
    return found


fx.wrap("backward_with_hooks")
