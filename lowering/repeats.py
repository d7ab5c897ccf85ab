"""Code of graphs in which equal layers stand one after another: the code of such a layer is made once.

Making the Python code of a graph takes as long as the graph is; 64 equal layers are 64 times the same lines. Here the
nodes of one of them become a function, and the graph's code calls it once for each. :class:`Repeats` says which node of
the graph a line of the code is about.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.attention import finish_with_ours
from moebius.lowering.chains import ChainCall, find_chains, run_nodes
from moebius.lowering.draft import Draft, finish
from moebius.lowering.equal_nodes import same, same_items
from moebius.lowering.graph import LayerCall
from moebius.lowering.region_calls import find_regions
from moebius.lowering.torch_private import node_of_line
from moebius.lowering.values import copy_node

SHORTEST, FEWEST = 16, 4  # nodes of a layer, and layers, from which on a function of their own is worth it
SHORTEST_CHAINED = 8  # where a node may be a chain
CANDIDATES = 3  # operators whose distances are tried for the length of a layer


@dataclass
class Layer:
    """Nodes that stand in the graph several times. iterations: the nodes of each time. inputs: for each time, the nodes
    from outside that it uses, in one order. outputs: positions of the nodes that are used outside."""

    iterations: list[list[fx.Node]]
    inputs: list[list[fx.Node]]
    outputs: list[int] = field(default_factory=list)


@dataclass
class Reached:
    """Where a graph's code was when it raised: the node, the values that were there, the traceback below."""

    node: fx.Node
    values: dict[fx.Node, Any]
    below: types.TracebackType | None


def whole_code(gm: fx.GraphModule, error: BaseException) -> Reached | None:
    """Where the code of a graph that was written as it is raised; None if the traceback does not lead through it."""
    found = line_of(gm, error.__traceback__)
    if found is None:
        return None
    nodes, (index, values, below) = list(gm.graph.nodes), found
    return Reached(nodes[index], {n: values[n.name] for n in nodes[:index] if n.name in values}, below)


def line_of(
    gm: fx.GraphModule, entry: types.TracebackType | None
) -> tuple[int, dict[str, Any], types.TracebackType | None] | None:
    """The position of the node at whose line a module's code is in a traceback, its local names, and what is below."""
    code = type(gm).forward.__code__
    while entry is not None and entry.tb_frame.f_code is not code:
        entry = entry.tb_next
    if entry is None:
        return None
    index = node_of_line(gm, entry.tb_lineno)
    return None if index is None else (index, entry.tb_frame.f_locals, entry.tb_next)


@dataclass
class Written:
    """A graph written out. originals: its nodes by those of the graph with calls; iterations: its nodes for each call,
    in the order of the layer's graph, in which a chain counts by its first; chains: its nodes for each call of a
    chain."""

    gm: fx.GraphModule
    originals: dict[fx.Node, fx.Node]
    iterations: dict[fx.Node, list[fx.Node]]
    chains: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def behind(self, outer: Written) -> Written:
        """This graph written out, as seen from one in which further nodes of the graph with calls are calls."""
        whole = {**{call: nodes[0] for call, nodes in self.chains.items()}, **self.originals}
        iterations = {call: [whole[node] for node in iteration] for call, iteration in outer.iterations.items()}
        chains = {call: [whole[node] for node in nodes] for call, nodes in outer.chains.items()}
        originals = {}
        for copy, node in outer.originals.items():
            if node in self.iterations:
                iterations[copy] = self.iterations[node]
            elif node in self.chains:
                chains[copy] = self.chains[node]
            elif node in self.originals:
                originals[copy] = self.originals[node]
        for call, nodes in self.chains.items():  # those inside of layers are nobody's copy
            chains.setdefault(call, nodes)
        return Written(self.gm, originals, iterations, chains)


class Repeats:
    """The code of a graph with layers: ``outer`` calls ``bodies``. written: gives the graph that it is the code of.
    made: what makes the code."""

    def __init__(self, outer: fx.GraphModule, written: Callable[[], Written],
                 made: Callable[[fx.GraphModule], fx.GraphModule] = finish):
        self.outer = outer
        self.calls = [node for node in outer.graph.nodes if isinstance(node.target, LayerCall)]
        self.written = functools.cache(written)
        for node in self.calls:
            node.target.forward = made(node.target.body).forward
        made(outer)

    @property
    def bodies(self) -> list[fx.GraphModule]:
        """The graphs of its layers."""
        return list(dict.fromkeys(node.target.body for node in self.calls))

    @property
    def modules(self) -> list[fx.GraphModule]:
        """All that has code."""
        return [self.outer, *self.bodies]

    @property
    def forward(self) -> Callable[..., Any]:
        return self.outer.forward

    def reached(self, error: BaseException) -> Reached | None:
        """Where it raised; None if the traceback does not lead through it. What stands before that has been done: a
        number may raise between the operators of a chain, which runs behind it."""
        found = self.raised_at(error)
        for nodes in self.written().chains.values() if found is not None else ():
            if found is not None and nodes[0] < found.node < nodes[-1] and found.node not in nodes:
                with torch.no_grad():
                    run_nodes([node for node in nodes if node < found.node], found.values)
        return found

    def raised_at(self, error: BaseException) -> Reached | None:
        """The node that raised, written out, by the lines in the traceback: in the outer code, in a layer's, and how
        far a chain had come."""
        found = line_of(self.outer, error.__traceback__)
        if found is None:
            return None
        written, nodes, (index, names, below) = self.written(), list(self.outer.graph.nodes), found
        originals, at = written.originals, nodes[index]
        values = {originals[n]: names[n.name] for n in nodes[:index] if n in originals and n.name in names}
        if isinstance(at.target, ChainCall):
            return Reached(written.chains[at][step_of(below)], values, below)
        if not isinstance(at.target, LayerCall):
            return Reached(originals[at], values, below)
        inner = line_of(at.target.body, below)
        if inner is None:
            return None
        position, names, below = inner
        body, iteration = list(at.target.body.graph.nodes), written.iterations[at]
        shift = sum(node.op == "placeholder" for node in body)
        for node, name in zip(iteration, (n.name for n in body[shift:position]), strict=False):
            if name in names:
                values[node] = names[name]
        node = iteration[position - shift]
        if isinstance(body[position].target, ChainCall):
            node = next(nodes for nodes in written.chains.values() if nodes[0] is node)[step_of(below)]
        return Reached(node, values, below)


def step_of(entry: types.TracebackType | None) -> int:
    """How far a chain had come, by a traceback that leads through it."""
    while entry is not None and entry.tb_frame.f_code is not run_nodes.__code__:
        entry = entry.tb_next
    return 0 if entry is None else int(entry.tb_frame.f_locals.get("reached", 0))


def write_body(gm: fx.GraphModule, layer: Layer) -> Draft:
    """The nodes of a layer's first iteration as a graph of their own."""
    graph = fx.Graph()
    copies = {}
    for i, node in enumerate(layer.inputs[0]):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["val"] = node.meta.get("val")
    for node in layer.iterations[0]:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[layer.iterations[0][position]] for position in layer.outputs))
    return Draft(gm, graph)


def with_calls(gm: fx.GraphModule, layers: list[Layer], targets: list[LayerCall]) -> tuple[fx.Graph, Written]:
    """The graph with one call for each iteration of a layer, and what its nodes stand for."""
    begins = {iteration[0]: (i, k) for i, layer in enumerate(layers) for k, iteration in enumerate(layer.iterations)}
    inside = {node for layer in layers for iteration in layer.iterations for node in iteration}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    written = Written(gm, {}, {})
    for node in gm.graph.nodes:
        if node in begins:
            which, number = begins[node]
            layer, iteration = layers[which], layers[which].iterations[number]
            own = set(iteration)
            call = graph.call_function(targets[which], tuple(copies[n] for n in layer.inputs[number]))
            call.meta["val"] = tuple(iteration[position].meta.get("val") for position in layer.outputs)
            written.iterations[call] = iteration
            for place, position in enumerate(layer.outputs):
                original = iteration[position]
                if any(user not in own for user in original.users):
                    copy = graph.create_node("call_function", operator.getitem, (call, place), name=original.name)
                    copy.meta.update(original.meta)
                    copies[original], written.originals[copy] = copy, original
        elif node not in inside:
            copies[node] = copy_node(graph, node, copies.__getitem__)
            written.originals[copies[node]] = node
    return graph, written


# ----------------------------------------------------------------------------------------------------------------------
# Finding them
# ----------------------------------------------------------------------------------------------------------------------


def written_once(gm: fx.GraphModule, chains: bool = False) -> Repeats | None:
    """The graph's code with its layers written once, and its chains as calls if asked for; None for a graph that has
    neither."""
    found = with_equal_parts(gm, chains)
    if found is None:
        return None
    outer, written = found
    return Repeats(outer, lambda: written, finish_with_ours if chains else finish)


def with_equal_parts(gm: fx.GraphModule, chains: bool) -> tuple[fx.GraphModule, Written] | None:
    """The graph with calls for its layers, and for its chains if asked for; None for one that has neither."""
    chained = with_chains(gm) if chains else None
    outer, written = chained or (gm, None)
    layers = list(find_layers(worked(outer.graph), SHORTEST if chained is None else SHORTEST_CHAINED))
    if not layers:
        return chained
    graph, called = with_calls(outer, layers, [LayerCall(write_body(outer, layer)) for layer in layers])
    return Draft(outer, graph), called if written is None else written.behind(called)


def with_chains(gm: fx.GraphModule) -> tuple[fx.GraphModule, Written] | None:
    """The graph with one call for each chain and each region; None for one without."""
    chains, regions = find_chains(gm.graph), find_regions(gm)
    if not chains and not regions:
        return None
    ends = {nodes[-1]: (call, inputs, nodes) for call, nodes, inputs in chains}
    inside = {node for _, nodes, _ in chains for node in nodes}
    inside |= {body for node in regions for body in node.all_input_nodes if is_only_for(body, regions)}
    graph, copies, written = fx.Graph(), dict[fx.Node, fx.Node](), Written(gm, {}, {})
    for node in gm.graph.nodes:
        if node in ends:
            target, inputs, nodes = ends[node]
            written.chains[graph.call_function(target, tuple(copies[n] for n in inputs))] = nodes
        elif node in regions:
            region, given = regions[node]
            copies[node] = graph.call_function(region, fx.map_arg(tuple(given), copies.__getitem__))
            copies[node].meta.update(node.meta)
            written.originals[copies[node]] = node
        elif node not in inside:
            copies[node] = copy_node(graph, node, copies.__getitem__)
            written.originals[copies[node]] = node
    return Draft(gm, graph), written


def is_only_for(node: fx.Node, users: Collection[fx.Node]) -> bool:
    """Whether a node is a body that nobody but these calls."""
    return node.op == "get_attr" and all(user in users for user in node.users)


def worked(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def find_layers(nodes: list[fx.Node], shortest: int = SHORTEST) -> Iterator[Layer]:
    """Stretches of the nodes that are equal, and each uses of the others only what comes before it."""
    kinds: dict[Any, int] = {}
    signs = [kinds.setdefault((n.op, n.target, len(n.args), len(n.kwargs)), len(kinds)) for n in nodes]
    calls = [place for place, node in enumerate(nodes) if isinstance(node.target, LayerCall)]  # in no other layer
    pending = list(zip([0, *(place + 1 for place in calls)], [*calls, len(nodes)], strict=True))
    while pending:
        low, high = pending.pop()
        if high - low < shortest * FEWEST:
            continue
        run = longest_run(signs, low, high, shortest)
        if run is None:
            continue
        begin, length, count = run
        iterations = [nodes[begin + k * length : begin + (k + 1) * length] for k in range(count)]
        layer = equal_iterations(iterations) or equal_iterations(iterations[1:])
        if layer is not None:
            yield layer
        pending += [(low, begin), (begin + length * count, high)]


def longest_run(signs: list[int], low: int, high: int, shortest: int) -> tuple[int, int, int] | None:
    """Where a stretch of operators begins that comes again and again, its length, and how often it comes."""
    places: dict[int, list[int]] = collections.defaultdict(list)
    for place in range(low, high):
        places[signs[place]].append(place)
    best: tuple[int, int, int] | None = None
    rare = sorted((p for p in places.values() if len(p) >= FEWEST), key=len)
    for found in rare[:CANDIDATES]:
        gaps = collections.Counter(b - a for a, b in itertools.pairwise(found))
        length, often = gaps.most_common(1)[0]
        if length < shortest or often < FEWEST - 1:
            continue
        start = next(a for a, b in itertools.pairwise(found) if b - a == length)
        begin, end = start, start
        while begin > low and signs[begin - 1] == signs[begin - 1 + length]:
            begin -= 1
        while end + length < high and signs[end] == signs[end + length]:
            end += 1
        count = (end + length - begin) // length
        if count >= FEWEST and (best is None or count * length > best[1] * best[2]):
            best = begin, length, count
    return best


def equal_iterations(iterations: list[list[fx.Node]]) -> Layer | None:
    """The iterations from the first on that do what the first one does, if they are enough."""
    if len(iterations) < FEWEST:
        return None
    first = {node: i for i, node in enumerate(iterations[0])}
    order: dict[fx.Node, fx.Node] = {}
    layer = Layer([iterations[0]], [])
    for iteration in iterations:
        places = first if iteration is iterations[0] else {node: i for i, node in enumerate(iteration)}
        given: dict[fx.Node, fx.Node] = {}
        for a, b in zip(iterations[0], iteration, strict=True):
            if a.target is not b.target or not same_items(a.args, b.args, first, places, given):
                return enough(layer)
            if (a.kwargs or b.kwargs) and not same(a.kwargs, b.kwargs, first, places, given):
                return enough(layer)
        order = order or given
        layer.inputs.append([given[node] for node in order])
        if iteration is not iterations[0]:
            layer.iterations.append(iteration)
    return enough(layer)


def enough(layer: Layer) -> Layer | None:
    """The layer with its outputs, if it comes often enough."""
    if len(layer.iterations) < FEWEST:
        return None
    used: set[int] = set()
    for iteration in layer.iterations:
        own = set(iteration)
        used |= {i for i, node in enumerate(iteration) if any(user not in own for user in node.users)}
    layer.outputs = sorted(used)
    return layer
