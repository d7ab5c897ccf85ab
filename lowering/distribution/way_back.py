"""Backward comes to an exchange on all ranks, or on none, whatever a rank's data say.

A branch on data may be all that reads what came back of an exchange: ``if rows.numel(): out[token] += rows``. Where it
is not taken, backward of that rank would pass the exchange by, and the others would wait in it. So what backward starts
from, and what the next exchange sends, is made to come of the exchange on all ranks: with no value there, and no
gradient on the way back. And a branch may be all that makes what is sent of what is trained: ``if token.numel(): rows =
norm(x[token])``. Where none was taken, what is sent requires a gradient none the less, which goes nowhere.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moebius.lowering.aliasing import Storage, nodes_in
from moebius.lowering.experts.blocks import is_number, without_history
from moebius.lowering.graph import expert_loop
from moebius.lowering.step import either, is_backward
from moebius.lowering.step.checkpoint import calls_in
from moebius.lowering.values import computed_of, is_floating, needs_gradient, put_before

CONDITIONAL = frozenset({expert_loop, either})  # data say which of its operands a value comes of


class ComesOf(torch.autograd.Function):
    """A copy of a tensor, which comes of others too; these get no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.others = len(others)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return grad, *[None] * ctx.others


def lead_to(returned: Tensor) -> Tensor:
    """[0]: comes of what an exchange gave, and keeps nothing of it."""
    lead: Tensor = ComesOf.apply(returned.new_empty(0), returned)
    return lead


def coming_of(value: Tensor, *leads: Tensor) -> Tensor:
    """The value; backward of it comes to these exchanges."""
    led: Tensor = ComesOf.apply(value, *leads)
    return led


def with_gradients(value: Tensor) -> Tensor:
    """The value, as a leaf where nothing is known of its history."""
    return value if value.requires_grad else value.detach().requires_grad_()


class WaysBack:
    """The exchanges that backward of a graph's values passes by on some ranks. To be made before they are written.

    starts: by who sends a value, takes it for a call that runs again, runs its backward or gives it out: the value, and
    the regions that are to be exchanges. lacking: by region what it sends that data give a history, or none. alone:
    regions that are to be none: memory that was there before the graph is written with what comes of them, and nobody
    knows where backward of that begins.
    """

    def __init__(self, graph: fx.Graph, regions: Sequence[fx.Node]):
        self.regions, self.alone = regions, set[fx.Node]()
        self.starts = defaultdict[fx.Node, list[tuple[fx.Node, list[fx.Node]]]](list)
        self.leads = dict[fx.Node, fx.Node]()
        self.lacking = defaultdict[fx.Node, list[fx.Node]](list)
        if not any(node.target in CONDITIONAL for node in graph.nodes):
            return
        storage = self.storage = Storage(graph)
        self.unrecorded = without_history(graph)
        for writer, targets in storage.writers.items():
            if writer not in self.unrecorded and not is_backward(writer) and any(map(self.is_outside, targets)):
                self.alone |= self.passed_by([writer], writer)
        freed, self.calls = set(self.alone), calls_in(graph)
        within = {region: next((begin for begin in self.calls(region) if begin.args[1]), None) for region in regions}
        begun = {*self.regions, *within.values()}
        for end in [node for node in graph.nodes if node in begun or is_backward(node) or node.op == "output"]:
            values = nodes_in(end.args[:1]) if is_backward(end) else end.all_input_nodes
            outer = within.get(end)  # what a reentrant call runs again goes back to what it was given, and stops there
            for value in filter(is_floating, values):
                if end in regions and self.may_lack(value, end):
                    self.lacking[end].append(value)
                passed = {one for one in self.passed_by([value], end) - freed if outer is None or outer < one}
                if passed and end.op == "output" and self.is_outside(value):
                    self.alone |= passed
                elif passed:
                    self.starts[end].append((value, sorted(passed)))
            if is_backward(end) and not end.kwargs.get("retain_graph"):
                freed |= self.reached(values, end)

    def is_outside(self, node: fx.Node) -> bool:
        return is_floating(node) and not self.storage.is_fresh(node)

    def comes_of(self, starts: list[fx.Node], end: fx.Node, certainly: bool = False) -> set[fx.Node]:
        """What autograd may know of the history of values at a node. certainly: whatever data say."""

        def onwards(node: fx.Node) -> list[fx.Node]:
            if node in self.unrecorded or is_number(node) or (certainly and node.target in CONDITIONAL):
                return []
            writers = [] if certainly else self.storage.writers_of([node], end=end)
            return [*node.all_input_nodes, *(writer for writer in writers if not is_backward(writer))]

        return computed_of(starts, onwards) - self.unrecorded

    def reached(self, starts: list[fx.Node], end: fx.Node, certainly: bool = False) -> set[fx.Node]:
        """The regions among these."""
        return self.comes_of(starts, end, certainly).intersection(self.regions)

    def may_lack(self, value: fx.Node, end: fx.Node) -> bool:
        """Whether data say if a value has a history of what is trained."""
        possible, certain = (any(map(is_trained, self.comes_of([value], end, sure))) for sure in (False, True))
        return possible and not certain

    def passed_by(self, starts: list[fx.Node], end: fx.Node) -> set[fx.Node]:
        return self.reached(starts, end) - self.reached(starts, end, certainly=True)

    def write(self, end: fx.Node, returned: Mapping[fx.Node, fx.Node]) -> None:
        """Let what ``end`` takes come of all. returned: what the exchanges give that regions have become."""
        taken = {value: value for value in self.lacking[end]}
        for value, passed in self.starts[end]:
            for region in (region for region in passed if region not in self.leads):
                out = returned[region]
                self.leads[region] = put_before(out.next, lead_to, (out,), out, None)
            leads = map(self.leads.__getitem__, passed)
            led = put_before(end, coming_of, (value, *leads), value, value.meta.get("val"))
            for user in [user for user in value.users if user is end or end in self.calls(user)]:
                user.replace_input_with(value, led)
            taken[value] = led
        for value in self.lacking[end]:
            sent = put_before(end, with_gradients, (taken[value],), value, value.meta.get("val"))
            end.replace_input_with(taken[value], sent)


def is_trained(node: fx.Node) -> bool:
    """Whether it is given to the graph, and requires a gradient."""
    return node.op == "placeholder" and needs_gradient(node.meta.get("val"))
