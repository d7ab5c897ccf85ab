"""A user's ``torch.autograd.Function`` as a node: its forward and its backward are graphs of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from moebius.lowering.autocast import autocast_now
from moebius.lowering.graph import code_of
from moebius.lowering.step.asked import ask_before
from moebius.lowering.torch_private import set_grad_enabled
from moebius.lowering.values import put_before


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
        once: bool,
        later: list[Any] | None,
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        found = code_of(forward)(*captures)
        outputs, kept = found[:n_outputs], list(found[n_outputs:])
        if saved:
            ctx.save_for_backward(*(kept[i] for i in saved))
            for i in saved:
                kept[i] = None
        ctx.kept, ctx.saved, ctx.graph, ctx.once, ctx.later = kept, saved, backward, once, later
        ctx.mark_non_differentiable(*(outputs[i] for i in constant))
        return cast(tuple[Any, ...], outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        kept = list(ctx.kept)
        if ctx.saved:  # (else there is nothing that a second backward could miss)
            for i, value in zip(ctx.saved, ctx.saved_tensors, strict=True):
                kept[i] = value
        graph = ctx.graph
        if ctx.later:
            graph, picks, values = ctx.later
            kept = [values[i - len(kept)] if i >= len(kept) else kept[i] for i in picks]
        ask_before(graph)
        run = code_of(graph)
        if not ctx.once or not torch.is_grad_enabled():
            return (None,) * 8 + tuple(run(*gradients, *kept))
        found = once_differentiable(lambda _, *given: tuple(run(*given, *kept)))(ctx, *gradients)  # create_graph=True
        return (None,) * 8 + (found if isinstance(found, tuple) else (found,))


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
    once: bool = False,
    later: list[Any] | None = None,
) -> tuple[Any, ...]:
    """``Function.apply(...)``: the outputs of the forward graph, with the backward graph as their history.

    forward: takes ``captures``, gives ``n_outputs`` outputs and then whatever backward needs. backward: takes the
    outputs' gradients and what forward kept; gives one gradient (or None) for each of ``tensors``. constant: indices of
    outputs that are not differentiable. saved: which of what forward keeps it has saved by ``save_for_backward``, which
    looks for changes in place and lets go after one backward. name: of the user's class. once: whether its backward is
    ``once_differentiable``. later: where another backward comes to stand in the place of this one (``set_backward``).
    """
    result = named(name).apply(forward, backward, n_outputs, constant, saved, captures, once, later, *tensors)
    return cast(tuple[Any, ...], result)


def backward_place() -> list[Any]:
    """Where ``set_backward`` puts a backward, for one call of a function."""
    return []


def set_backward(place: list[Any], backward: fx.GraphModule, picks: Sequence[int], values: Sequence[Any]) -> None:
    """From here on the function's backward is another graph: what its user's code reads has changed since the call.

    backward: takes the outputs' gradients and then, for each of ``picks``, what forward kept at that index, or (from
    the number of these on) one of ``values``.
    """
    place[:] = backward, picks, values


def by_autocast(
    states: Sequence[tuple[tuple[str, torch.dtype], ...]],
    bodies: Sequence[fx.GraphModule],
    captures: Sequence[Sequence[Any]],
) -> tuple[Any, ...]:
    """The one of several graphs of a backward that was made under the autocast that backward runs under.

    states: as ``autocast_now`` says them; one for each body. Raises RuntimeError under another one.
    """
    now = autocast_now()
    for state, body, captured in zip(states, bodies, captures, strict=True):
        if state == now:
            return cast(tuple[Any, ...], code_of(body)(*captured))
    raise RuntimeError(f"an autograd.Function was captured for backward under autocast {list(states)}, not {now}")


def put_back_mode(graph: fx.Graph) -> None:
    """In a backward's graph: where ``with torch.no_grad()`` ends, grad mode is what it was before, which a caller's
    ``create_graph=True`` switches on. The graph was traced without."""
    outside: fx.Node | None = None
    depth = 0
    for node in list(graph.find_nodes(op="call_function", target=set_grad_enabled, sort=True)):
        names = {name.rpartition(".")[2] for _, _, name in node.meta["stack"][-2:]}  # (no_grad throws set_grad_enabled)
        depth += ("__enter__" in names) - ("__exit__" in names)
        if depth or "__exit__" not in names:
            continue
        if outside is None:
            first = next(n for n in graph.nodes if n.op != "placeholder")
            outside = put_before(first, torch.is_grad_enabled, (), node, False)
        node.args = (outside,)


fx.wrap("autograd_function")
fx.wrap("by_autocast")
fx.wrap("backward_place")
fx.wrap("set_backward")
