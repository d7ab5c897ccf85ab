"""``torch.inference_mode`` in the step: what runs in it is the body of one node, which the mode is entered around.

While the step is captured its operators are like any other, between two marks in the graph, as a checkpointed call's.
Where the graph breaks inside, the step is traced again with a graph break where the mode is entered: an entered mode
cannot be handed over to the rest of the frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from moebius.lowering.aliasing import Storage
from moebius.lowering.step.inference import begin_inference, end_inference

from ..python.parts import Parts
from ..torch_facts.torch_private import InferenceGuard
from ..values.values import Break

HINT = "use torch.no_grad(), which is a part of the graph, or enter inference mode around the step"


class InferenceMode:
    """What the step has for torch's own guard object. guard: the real one, while the mode is entered.

    Tracing enters and leaves it; the methods here are for a frame that goes on as native code.
    """

    def __init__(self, mode: bool):
        self.mode = mode
        self.guard: Any = None

    def __enter__(self) -> None:
        self.guard = InferenceGuard(self.mode)
        self.guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        guard, self.guard = self.guard, None
        guard.__exit__(*exc)


class InferenceModes:
    """Those of one trace. open: the one that is entered. allowed: False where the graph is to break instead. failed:
    the trace ended in one, or one did what the body of a node must not."""

    def __init__(self, domain: Parts):
        self.domain, self.writer = domain, domain.tensors.writer
        self.objects, self.tensors = domain.objects, domain.tensors
        self.open: InferenceMode | None = None
        self.allowed, self.failed = True, False
        self.functions: dict[Any, Callable[..., Any]] = {
            InferenceGuard: self.make,
            InferenceMode.__enter__: self.enter,
            InferenceMode.__exit__: self.leave,
        }

    def make(self, mode: Any = True) -> Any:
        if mode is False and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self.objects.made(contextlib.nullcontext())  # (it would switch gradients on as well)
        free = not self.writer.is_inner and not self.writer.recomputed and self.open is None
        if mode is not True or not free or not self.allowed or torch.is_inference_mode_enabled():
            raise Break("object made in C", "torch.inference_mode", HINT)
        if not self.tensors.whole_step:
            raise Break("object made in C", "torch.inference_mode, for a foreign backend", HINT)
        made: InferenceMode = self.objects.made(InferenceMode(mode))
        return made

    def enter(self, mode: InferenceMode) -> None:
        if self.open is not None or mode.guard is not None:
            raise Break("object made in C", "torch.inference_mode", HINT)
        self.mark(begin_inference)
        mode.guard = InferenceGuard(True)
        mode.guard.__enter__()
        self.writer.recomputed = True  # what is said or decided in it would be said in the body
        self.open = mode

    def leave(self, mode: InferenceMode, *exc: Any) -> None:
        if self.open is not mode:
            raise Break("object made in C", "torch.inference_mode", HINT)
        self.failed |= bool(exc) and exc[0] is not None  # (where that ends the trace, its graph ends inside)
        self.restore()
        self.mark(end_inference)
        self.refuse_writes()

    def restore(self) -> None:
        if self.open is not None:
            self.open.guard.__exit__(None, None, None)
            self.open.guard, self.open = None, None
            self.writer.recomputed = False

    def close(self) -> None:
        """The trace is over."""
        self.failed |= self.open is not None
        self.restore()

    def mark(self, function: Callable[[], None]) -> None:
        self.objects.note("inference mode")  # (a module with it is interpreted each time)
        self.writer.call(function)

    def refuse_writes(self) -> None:
        """If an operator in it fails, all of it runs again as Python: it may only write into what it made."""
        made: set[Any] = set()
        for node in reversed(list(self.writer.graph.nodes)):
            if node.target is begin_inference:
                break
            made.add(node)
        module = self.writer.module()  # through which the bodies of loops are found
        roots, writers = (storage := Storage(module.graph)).roots, storage.writers
        written = {root for node in writers if node in made for target in writers[node] for root in roots[target]}
        module.graph.owning_module = None  # fx warns of bodies that such an owner lacks, and more are to come
        if not written <= made:
            self.failed = True
            raise Break("object made in C", "torch.inference_mode, in which a tensor from before is changed", HINT)
