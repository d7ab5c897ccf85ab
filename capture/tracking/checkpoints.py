"""Activation checkpointing: the checkpointed function is interpreted like any other, between two marks in the graph.

Lowering sees its operators (experts in it are lowered), and then makes them the body of one checkpointed node. What the
function does to Python objects would happen once more when backward runs it again, so a function that changes what
existed before it is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import noop_context_fn

from moebius.lowering.step.checkpoint import begin_checkpoint, end_checkpoint

from .values import Body, Break, TensorProxy

if TYPE_CHECKING:
    from .domain import TrackingDomain

DEFAULTS = {"context_fn": noop_context_fn, "determinism_check": "default", "debug": False, "early_stop": True}

CALL = Body(
    "a checkpointed call changes Python state",
    "a {} that existed before the call is changed in it; backward would do that once more",
    "return what it sets, and set it after the call",
)


class Checkpoints:
    """Checkpointed calls in one trace."""

    def __init__(self, domain: TrackingDomain, call: Callable[..., Any]):
        self.domain, self.call = domain, call
        self.writer, self.objects = domain.tensors.writer, domain.objects

    def run(self, function: Any, args: tuple, options: dict[str, Any]) -> Any:
        """``checkpoint(function, *args, **options)``: a mark, the call, a mark."""
        reentrant = options.pop("use_reentrant", None)
        preserve = options.pop("preserve_rng_state", True)
        chosen = {name: options.pop(name, default) for name, default in DEFAULTS.items()}
        self.refuse(reentrant, preserve, chosen)
        if not torch.is_grad_enabled():
            return self.call(function, list(args), options)  # nothing is recorded, so nothing is recomputed
        self.mark(begin_checkpoint, preserve, *(a for a in args if isinstance(a, TensorProxy)))
        self.objects.inside.append(CALL)
        self.writer.recomputed = True
        try:
            result = self.call(function, list(args), options)
        finally:
            self.objects.inside.pop()
            self.writer.recomputed = False
        if not torch.is_grad_enabled():
            raise Break("checkpoint", "the function changes grad mode and does not change it back", "use a with block")
        self.mark(end_checkpoint)
        return result

    def mark(self, function: Callable[..., None], *args: Any) -> None:
        self.writer.node("call_function", function, args, {}).meta["val"] = None

    def refuse(self, reentrant: Any, preserve: Any, chosen: dict[str, Any]) -> None:
        hint = "it runs natively; the graph goes on after it"
        if reentrant is not False:
            raise Break("checkpoint", "use_reentrant is not False", "pass use_reentrant=False to keep it in the graph")
        if not self.domain.tensors.whole_step:
            raise Break("checkpoint", "this backend takes a graph of operators alone", hint)
        if self.writer.scope.parent is not None or self.writer.recomputed:
            raise Break("checkpoint", "in an expert loop, or in another checkpointed call", hint)
        if chosen != DEFAULTS or not isinstance(preserve, bool):
            names = [name for name, default in DEFAULTS.items() if chosen[name] != default]
            raise Break("checkpoint", f"with its own {', '.join(names) or 'preserve_rng_state'}", hint)
