"""Lowers equal layers once: what the passes cost grows with the distinct layers of a graph, not with its layers.

Where equal layers stand one after another, the passes get two graphs in place of one: that of a layer, and one in which
each layer is a single call. Both together are the code that runs (``repeats.Repeats``); the whole graph is written out
when somebody asks for it.

A layer's graph does not show what is around it. So it is lowered alone only where that cannot matter: it writes into
nothing that came from outside, its experts are proven without the surroundings, and nobody looks at gradients halfway.
Else the whole graph is lowered as any other.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from moebius.kernels.precision import text_of
from moebius.lowering.aliasing import Storage, storage_of, writes_outside
from moebius.lowering.attention import finish_with_ours
from moebius.lowering.contract import Work
from moebius.lowering.draft import Draft
from moebius.lowering.experts.loops import find_loops, loops_among
from moebius.lowering.experts.saved_for_backward import writer_before_backward
from moebius.lowering.graph import CapturedGraph, ExpertRegion, LayerCall, LoweringOptions
from moebius.lowering.memo import remembering
from moebius.lowering.pipeline import run_passes
from moebius.lowering.repeats import (
    Layer,
    Repeats,
    Written,
    find_layers,
    with_calls,
    with_equal_parts,
    worked,
    write_body,
)
from moebius.lowering.step import asks_of_each, checkpoint, inference, observed
from moebius.lowering.values import copy_node, results_of, stands_at


@dataclass
class Parts:
    """A lowered graph in parts. bodies: of its layers. outer: the rest, with a call for each iteration of a layer.
    modules: what their nodes take from the graph's module, by target."""

    captured: CapturedGraph
    layers: list[Layer]
    bodies: list[Work]
    outer: Work
    modules: dict[str, Any]

    def repeats(self) -> Repeats:
        """The code that runs it."""
        found = with_equal_parts(self.outer.gm, chains=True)
        if found is None:
            return Repeats(self.outer.gm, self.written_out, finish_with_ours)
        outer, written = found
        return Repeats(outer, lambda: self.written_out().behind(written), finish_with_ours)

    def regions(self) -> list[ExpertRegion]:
        """One for each loop over experts, in the order of the graph; then what was no loop."""
        gm = self.captured.gm
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        inside = {node for layer in self.layers for iteration in layer.iterations for node in iteration}
        outer = [loop for loop in find_loops(gm) if loop not in inside]
        found = list(zip(map(position.__getitem__, outer), self.outer.regions, strict=False))
        others = self.outer.regions[len(outer) :]
        for layer, body in zip(self.layers, self.bodies, strict=True):
            for iteration in layer.iterations:
                regions = [dataclasses.replace(region) for region in body.regions]
                loops = [position[loop] for loop in loops_among(iteration)]
                found += zip(loops, regions, strict=False)
                others += regions[len(loops) :]
        return [region for _, region in sorted(found, key=lambda pair: pair[0])] + others

    def written_out(self) -> Written:
        """The whole graph, each iteration of a layer in nodes of its own."""
        graph = fx.Graph()
        originals: dict[fx.Node, fx.Node] = {}
        every: dict[fx.Node, list[fx.Node]] = {}
        copies: dict[fx.Node, fx.Node] = {}
        results: dict[fx.Node, list[fx.Node]] = {}
        iterations = [iter(layer.iterations) for layer in self.layers]
        outer, captured = self.outer.gm, self.captured.gm
        which = {body.gm: i for i, body in enumerate(self.bodies)}
        for node in outer.graph.nodes:
            if isinstance(node.target, LayerCall):
                number = which[node.target.body]
                given = fx.map_arg(node.args, copies.__getitem__)
                iteration = Iteration(self.layers[number].iterations[0], next(iterations[number]))
                every[node], results[node] = iteration.write(graph, node.target.body.graph, given)
            elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in results:
                source, place = node.args
                copies[node] = originals[node] = results[source][place]
            else:
                copies[node] = originals[node] = copy_node(graph, node, copies.__getitem__)
        made = Draft(self.modules, graph, class_name=type(captured).__name__)
        made.meta = copy.copy(captured.meta)
        return Written(made, originals, every)


@dataclass
class Iteration:
    """One iteration of a layer, as captured, beside the first one, which was lowered for all."""

    first: list[fx.Node]
    this: list[fx.Node]

    def write(self, graph: fx.Graph, body: fx.Graph, given: Any) -> tuple[list[fx.Node], list[fx.Node]]:
        """The lowered layer's nodes at the graph's end, and its results among them."""
        twins = {a.meta.get("number"): b for a, b in zip(self.first, self.this, strict=True)}
        copies: dict[fx.Node, fx.Node] = {}
        made: list[fx.Node] = []
        for node in body.nodes:
            if node.op == "placeholder":
                copies[node] = given[len(copies)]
            elif node.op == "output":
                return made, [copies[result] for result in results_of(body)]
            else:
                copy = copies[node] = copy_node(graph, node, copies.__getitem__)
                made.append(copy)
                twin = twins.get(node.meta.get("number"))
                if twin is not None:
                    stands_at(copy, twin)
        raise AssertionError("a graph without output")


def lower_layers(captured: CapturedGraph, options: LoweringOptions) -> Parts | None:
    """The graph after all passes, its layers lowered once; None where it has none that can be."""
    layers = layers_of(captured, options)
    bodies = []
    for layer in layers:
        body = write_body(captured.gm, layer)
        if writes_outside(body.graph):
            return None
        work = run_passes(dataclasses.replace(captured, gm=body), options)
        if not work.regions or not all(region.lowered for region in work.regions) or writes_outside(work.gm.graph):
            return None
        bodies.append(work)
    if not bodies:
        return None
    calls = [LayerCall(work.gm, isolated=True, fresh=are_fresh(work.gm.graph)) for work in bodies]
    outer = Draft(captured.gm, with_calls(captured.gm, layers, calls)[0])
    with remembering():
        if changes_what_layers_keep(outer.graph):
            return None
        work = run_passes(dataclasses.replace(captured, gm=outer), options)
    modules = modules_of([work.gm, *(body.gm for body in bodies)])
    return None if modules is None else Parts(captured, layers, bodies, work, modules)


def layers_of(captured: CapturedGraph, options: LoweringOptions) -> list[Layer]:
    """Equal layers that have a loop over experts in them; none where the surroundings of a layer may matter."""
    gm = captured.gm
    own_names = (text_of(options.precision) or "").startswith("budget")  # each layer's operator has a name
    if options.backend != "moebius" or options.mesh is not None or own_names:
        return []
    if not find_loops(gm) or checkpoint.is_marked(gm) or inference.marks_of(gm.graph) or observed(gm):
        return []
    if asks_of_each(gm):
        return []
    return [layer for layer in find_layers(worked(gm.graph)) if loops_among(layer.iterations[0])]


def changes_what_layers_keep(outer: fx.Graph) -> bool:
    """Whether something writes into what a layer was given, between it and its backward: the proof of a layer alone
    can't see that."""
    storage = storage_of(outer)
    calls = [node for node in outer.nodes if isinstance(node.target, LayerCall)]
    given = ((call, call.all_input_nodes) for call in calls)
    return any(writer_before_backward(storage, call, kept, kept, call) is not None for call, kept in given)


def are_fresh(graph: fx.Graph) -> bool:
    """Whether each result is a new tensor with a storage of its own."""
    storage = Storage(graph)
    roots = [storage.roots[result] for result in results_of(graph)]
    every = [root for found in roots for root in found]
    return len(set(every)) == len(every) and not any(root.op in ("placeholder", "get_attr") for root in every)


def modules_of(parts: list[fx.GraphModule]) -> dict[str, Any] | None:
    """What the nodes of all parts take from their modules; None if two mean different things by one name."""
    found: dict[str, Any] = {}
    for part in parts:
        for node in part.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                value = operator.attrgetter(str(node.target))(part)
                if found.setdefault(str(node.target), value) is not value:
                    return None
    return found
