"""Graphs of their own inside the step's graph: the forward and backward of an autograd.Function, a gradient hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from ..python.parts import Parts
from ..tensors.graphs import GraphScope
from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_fakes
from ..values.values import Body, Break


@contextmanager
def operators_written_down(tensors: TensorOperations) -> Iterator[None]:
    """Inside, each node is told what operators ran on the fakes for it."""
    world, writer = tensors.world, tensors.writer
    before = world.recorder, writer.ran
    world.recorder = recorder = torch_fakes.OperatorRecorder()
    writer.ran = recorder.ran
    try:
        yield
    finally:
        world.recorder, writer.ran = before


class SubgraphTracer:
    """Interprets functions of the user's into such graphs. what: their name in graph breaks; where: the code."""

    what: str
    where: str
    hint: str
    lenient = False  # whether Python state may change in it: who traces it asks the heap when it is over

    def __init__(self, domain: Parts, call: Callable[..., Any]):
        self.domain, self.call = domain, call
        self.tensors, self.objects, self.writer = domain.tensors, domain.objects, domain.tensors.writer
        self.gradients, self.attributes = domain.tensors.gradients, domain.attributes
        self.world, self.heap = self.tensors.world, self.objects.heap

    @contextmanager
    def scope(self, in_backward: bool = True, recording: bool = False) -> Iterator[GraphScope]:
        """A graph of its own; what is older than it must not be changed in it. in_backward: whether a backward runs it,
        as often as autograd comes to it. recording: whether gradients are."""
        outer, enabled = self.writer.scope, torch.is_grad_enabled()
        self.writer.scope = inner = GraphScope(outer)
        inner.in_loop = outer.in_loop
        changes = f"{self.what} changes Python state", f"a {{}} that existed before is changed in {self.where}"
        body = Body(*changes, self.hint, self.lenient)
        try:
            counter = self.domain.counter
            counted = counter.by_autograd() if in_backward else nullcontext()
            with self.objects.within(body), torch.set_grad_enabled(recording), counted:
                yield inner
            if torch.is_grad_enabled() is not enabled:
                raise Break(self.what, "it changes grad mode and does not change it back", self.hint)
        finally:
            self.writer.scope = outer

    def gradient(self, name: str, of: torch.Tensor) -> Any:
        """A placeholder of the open graph: the gradient of a tensor like ``of``."""
        node = self.writer.placeholder(name)
        node.meta.update(where=self.writer.where()[-1], stack=self.writer.where())
        with self.tensors.mode:
            return self.tensors.wrap(torch.empty_like(of).requires_grad_(False), node)

    def body(self, name: str, module: fx.GraphModule, of: fx.Node | None = None) -> fx.Node:
        """The graph's node for a finished inner graph: of what is called now, or of the node of an earlier call, before
        which it stands."""
        name = f"{name}_{len(self.writer.submodules)}"
        self.writer.submodules[name] = module
        if of is None:
            node = self.writer.graph.get_attr(name)
            node.meta.update(val=None, where=self.writer.where()[-1], stack=self.writer.where())
            return node
        with of.graph.inserting_before(of):
            node = of.graph.get_attr(name)
        node.meta.update({key: of.meta[key] for key in ("where", "stack")}, val=None)
        return node
