"""Backward with gradient hooks: the user's hooks are graphs, called by autograd where it would call the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from moebius.lowering.graph import code_of
from moebius.lowering.step.gradients import MissingGradientError
from moebius.lowering.torch_private import gradient_hooks, hooks_after_accumulation, hooks_of_accumulation


class RankHook:
    """A gradient hook that a mesh has put on a parameter. It runs in backward as it is: what it does stands in no
    graph, and no Python that is interpreted sees it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor | None]):
        self.function = function

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.function(gradient)


def is_looked_at(parameter: torch.Tensor, nodes: bool = True) -> bool:
    """Whether hooks that are no mesh's see the parameter's gradient on its way. nodes: whether some may be on the node
    that accumulates it."""
    own = (gradient_hooks(parameter) or {}).values()
    return (
        any(not isinstance(hook, RankHook) for hook in own)
        or bool(hooks_after_accumulation(parameter))
        or (nodes and hooks_of_accumulation([parameter]))
    )


def ranks_first(parameter: torch.Tensor) -> None:
    """Let autograd call the hooks that a mesh has put on a parameter before any other, whichever came first."""
    hooks = gradient_hooks(parameter) or {}
    items = sorted(hooks.items(), key=lambda item: not isinstance(item[1], RankHook))
    hooks.clear()
    hooks.update(items)


OBSERVERS = frozenset({"retain_grad"})
ASKING = ("create_graph", "allow_unused", "materialize_grads")


def backward_with_hooks(
    outputs: Sequence[torch.Tensor],
    options: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    bodies: Sequence[fx.GraphModule],
    captures: Sequence[Sequence[Any]],
    leaves: Sequence[torch.Tensor] = (),
    bodies_after: Sequence[fx.GraphModule] = (),
    captures_after: Sequence[Sequence[Any]] = (),
) -> int:
    """``torch.autograd.backward(outputs, **options)`` with one graph for each of ``tensors`` in its hooks' place.

    A graph takes the gradient and its captures, and returns the gradient that goes on. One of ``bodies_after`` takes
    its captures alone, and runs when the gradient of its leaf is accumulated. Hooks that are registered on the tensors
    themselves are set aside meanwhile, but those of a mesh: the graphs say what they do. Returns how many of ``leaves``
    got no gradient, so that their graphs have not run.
    """
    aside = [(hooks, list(hooks.items())) for hooks in map(gradient_hooks, tensors) if hooks]
    after = [hooks for hooks in map(hooks_after_accumulation, leaves) if hooks is not None]
    aside += [(hooks, list(hooks.items())) for hooks in after]
    handles = []
    waiting = set(range(len(after)))
    try:
        for hooks, items in aside:
            hooks.clear()
            hooks.update((key, hook) for key, hook in items if isinstance(hook, RankHook))
        for tensor, body, captured in zip(tensors, bodies, captures, strict=True):
            handles.append(tensor.register_hook(partial(run_hook, body, captured)))
        for number, (hooks, body, captured) in enumerate(zip(after, bodies_after, captures_after, strict=True)):
            hooks[0] = partial(run_after, body, captured, waiting, number)
        torch.autograd.backward(outputs, **options)
    finally:
        for hooks in after:
            hooks.clear()
        for handle in handles:
            handle.remove()
        for hooks, items in aside:
            hooks.clear()
            hooks.update(items)
    return len(waiting)


def run_after(body: fx.GraphModule, captured: Sequence[Any], waiting: set[int], number: int, _: torch.Tensor) -> None:
    waiting.discard(number)
    code_of(body)(*captured)


def require_accumulated(waiting: int) -> None:
    """Each leaf whose hooks the graph holds got a gradient: what they do has been done. waiting: how many did not.

    Raises MissingGradientError, which capture answers.
    """
    if waiting:
        raise MissingGradientError(f"{waiting} parameters with hooks got no gradient in this step")


def run_hook(body: fx.GraphModule, captured: Sequence[Any], gradient: torch.Tensor) -> Any:
    return code_of(body)(gradient, *captured)


def observed(gm: fx.GraphModule) -> dict[str, frozenset[str]]:
    """By name, the values that are computed in the graph and whose gradients somebody sees, with who uses them.

    Where a user is gone, the gradient may take another way, and a hook may see less of it.
    """
    found: dict[str, frozenset[str]] = {}
    for node in gm.graph.nodes:
        for value in looked_at(node):
            if isinstance(value, fx.Node) and value.op != "placeholder":
                found[value.name] = frozenset(user.name for user in value.users)
    return found


def looked_at(node: fx.Node) -> Sequence[Any]:
    """The tensors whose gradients a node gives to somebody."""
    if node.op == "call_method":
        if node.target == "backward":
            return inputs_of(node.kwargs)
        return node.args[:1] if node.target in OBSERVERS else ()
    if node.op != "call_function":
        return ()
    if node.target is backward_with_hooks:
        outputs, options, tensors = node.args[:3]
        return (*tensors, *inputs_of(options))  # type: ignore[misc, arg-type]
    if node.target is torch.autograd.grad:
        return halfway(node.args[1])  # type: ignore[arg-type]
    return inputs_of(node.kwargs) if node.target is torch.autograd.backward else ()


def inputs_of(options: Mapping[str, Any]) -> Sequence[Any]:
    return halfway(options.get("inputs") or ())


def halfway(tensors: Sequence[Any]) -> Sequence[Any]:
    """Those that have a history: to one that has none, all ways lead."""
    return [t for t in tensors if isinstance(t, fx.Node) and not t.meta["val"].is_leaf]


def asks_of_each(gm: fx.GraphModule) -> bool:
    """Whether a gradient is differentiated once more, or may be None: one operator for all experts is a slow way to
    differentiate twice, and gives all of them a gradient."""
    found = [
        node
        for target in (torch.autograd.grad, torch.autograd.backward)
        for node in gm.graph.find_nodes(op="call_function", target=target, sort=False)
    ]
    return any(node.kwargs.get(option) for node in found for option in ASKING)


fx.wrap("backward_with_hooks")
fx.wrap("require_accumulated")
