"""What in the user's program keeps experts a loop: the expressions without which they would be one operator.

A refusal names the first step of the proof that fails. What a user wants to know is what to change, and whether that is
all. So it is tried: an expression is taken out of a copy of the graph (what it computed is what it was given), and the
passes run again. What is named here was taken out, and the loop became an operator; nothing smaller did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from moebius.lowering.aliasing import only_computes, writes_into
from moebius.lowering.draft import copy_graph
from moebius.lowering.experts.missed_experts import DIFFERENT
from moebius.lowering.graph import CapturedGraph, ExpertRegion, LoweringOptions
from moebius.lowering.operators import PRODUCTS, call_name, loop_body
from moebius.lowering.pipeline import run_passes
from moebius.lowering.torch_private import quiet_fakes
from moebius.lowering.values import (
    Where,
    certain,
    copy_node,
    infer,
    is_floating,
    same_shape,
    shape_of,
    stands_at,
    tensor_of,
    users_place,
)

MOST = 4  # expressions that may have to go together

Function = tuple[str, str]  # file and name
Expression = tuple[str, int, int]  # file, line and, where the instruction is known, its offset in the code


def expression_of(node: fx.Node) -> Expression:
    """The user's expression that a node stands for, in the innermost frame that is not torch's."""
    return key_of(users_place(node))


def key_of(place: Where) -> Expression:
    return (*place[:2], getattr(place, "offset", -1))


@dataclass(frozen=True)
class Blocking:
    """What keeps experts a loop. refusal: the first step of the proof that fails. places: (file, line, function) of the
    expressions without which, all of them together, it is one operator."""

    refusal: str
    places: tuple[Where, ...]


class Blockers:
    """Looks for what keeps the refused regions of a captured graph loops. options: those that it was lowered with.

    A mesh and other backends have rules of their own, and are not tried."""

    def __init__(self, captured: CapturedGraph, options: LoweringOptions):
        self.captured, self.options = captured, options
        self.searches: dict[Function, Search] = {}

    def of(self, region: ExpertRegion, seconds: float) -> Blocking | None:
        """What keeps a region a loop; None where nothing was found that does it. seconds: of CPU time, to look for."""
        if self.options.backend != "moebius" or self.options.mesh is not None or region.lowered:
            return None
        function = function_of(self.captured.gm, region)
        search = self.searches.setdefault(function, Search(self.captured, self.options, function))
        search.until = time.thread_time() + seconds
        with quiet_fakes():
            try:
                return search.find(region)
            except TimeoutError:
                return None


@dataclass
class Outcome:
    """What the passes made of a graph: how many layers of experts are operators, and what is said of the others."""

    lowered: int
    refused: list[ExpertRegion]

    @property
    def reasons(self) -> set[str | None]:
        return {one.refusal for one in self.refused}

    def has(self, region: ExpertRegion) -> bool:
        return any((one.file, one.line) == (region.file, region.line) for one in self.refused)


class Search:
    """Looks for the fewest expressions without which a region of a function is lowered. until: when it gives up."""

    until = 0.0

    def __init__(self, captured: CapturedGraph, options: LoweringOptions, function: Function):
        self.options, self.function = options, function
        self.captured = captured
        self.known: dict[frozenset[Expression], Outcome | None] = {}
        self.places: dict[Expression, Where] | None = None

    def begin(self, region: ExpertRegion) -> None:
        """Choose what is looked at: of the graph the part that the function has, if that is refused as the whole is."""
        part = part_of(self.captured, self.function)
        found = self.passes(part.gm, part)
        if found is not None and (region.refusal in found.reasons or len(found.refused) == 1):
            self.captured, self.known[frozenset()] = part, found
        self.products = products_of(self.captured.gm)
        self.places = {}
        for node in nodes_of(self.captured.gm):
            if self.function in frames_of(node) and removable(node):
                self.places.setdefault(expression_of(node), users_place(node))

    def find(self, region: ExpertRegion) -> Blocking | None:
        """The expressions, and what is said of the region while they are there."""
        if self.places is None:
            self.begin(region)
        start = last = self.outcome(frozenset())
        if start is None or last is None or not start.refused:
            return None
        about = region if start.has(region) else start.refused[0]  # (capture may have told it where the loop begins)

        def is_done(found: Outcome) -> bool:
            return found.lowered > start.lowered and not found.has(about)

        taken = frozenset[Expression]()
        while not is_done(last):
            step = self.step(taken, last, is_done) if len(taken) < MOST else None
            taken, last = self.without_all() if step is None else step
            if step is None and not is_done(last):
                return None
        places = [certain(self.places)[one] for one in sorted(self.needed(taken, is_done))]
        refusal = region.refusal or ""
        if about is not region:  # (capture told what it was unrolled for: without that, it is another graph)
            told = region.blocker
            if told is None or told[:2] not in {where[:2] for where in places}:
                refusal = f"{DIFFERENT}: the proof does not follow what they compute ({places[0][0]}:{places[0][1]})"
            elif len(places) > 1:
                return None
        return Blocking(refusal, tuple(places))

    def step(
        self, taken: frozenset[Expression], last: Outcome, is_done: Callable[[Outcome], bool]
    ) -> tuple[frozenset[Expression], Outcome] | None:
        """One expression more: that without which it is lowered, or else the first that the refusal is about."""
        said = {one.blocker[:2] for one in last.refused if one.blocker is not None}
        onwards = None
        for one in sorted(certain(self.places).keys() - taken, key=lambda one: (one[:2] not in said, one)):
            found = self.outcome(taken | {one})
            if found is None:
                continue
            if is_done(found):
                return taken | {one}, found
            if onwards is None and found.refused and found.reasons != last.reasons:
                onwards = taken | {one}, found
        return onwards

    def without_all(self) -> tuple[frozenset[Expression], Outcome]:
        """Where no expression leads on alone: all that can go, together."""
        taken, last = frozenset[Expression](), certain(self.outcome(frozenset()))
        for one in sorted(certain(self.places)):
            if (found := self.outcome(taken | {one})) is not None:
                taken, last = taken | {one}, found
        return taken, last

    def needed(self, taken: frozenset[Expression], is_done: Callable[[Outcome], bool]) -> frozenset[Expression]:
        """Of the expressions without which it is lowered, those that have to go."""
        for one in sorted(taken) if len(taken) > 1 else ():
            found = self.outcome(taken - {one})
            if found is not None and is_done(found):
                taken -= {one}
        return taken

    def outcome(self, gone: frozenset[Expression]) -> Outcome | None:
        """What becomes of the graph without these expressions; None where they cannot be taken out."""
        if gone not in self.known:
            gm = without(self.captured.gm, gone)
            there = gm is not None and products_of(gm) >= self.products
            self.known[gone] = self.passes(certain(gm), self.captured) if there else None
        return self.known[gone]

    def passes(self, gm: fx.GraphModule, of: CapturedGraph) -> Outcome | None:
        if time.thread_time() > self.until:
            raise TimeoutError
        try:
            regions = run_passes(replace(of, gm=gm), self.options).regions
        except Exception:  # a graph that nobody wrote: what the passes make of it is no fault of the program's
            return None
        return Outcome(sum(one.lowered for one in regions), [one for one in regions if not one.lowered])


# ----------------------------------------------------------------------------------------------------------------------
# A graph without an expression
# ----------------------------------------------------------------------------------------------------------------------


def nodes_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of a graph and of the loops' bodies in it."""
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            yield node
            if (body := body_of(node)) is not None:
                yield from nodes_of(body)


def body_of(node: fx.Node) -> fx.GraphModule | None:
    return loop_body(node) if call_name(node) == "expert_loop" else None


def removable(node: fx.Node) -> bool:
    """Whether what it computes is like something that it was given."""
    return body_of(node) is None and (not node.users or stand_in(node, {node}) is not None)


def stand_in(node: fx.Node, gone: set[fx.Node]) -> fx.Node | None:
    """What is in a node's place when it is taken out: the first value like it that it was given."""
    value, pending, seen = tensor_of(node), list(node.all_input_nodes), set[fx.Node]()
    while pending and value is not None:
        one = pending.pop(0)
        if one in gone:
            pending[:0] = () if one in seen else one.all_input_nodes
        elif (given := tensor_of(one)) is not None and given.dtype == value.dtype:
            if given.dim() == value.dim() and all(map(may_be_equal, given.shape, value.shape)):
                return one
        seen.add(one)
    return None


def may_be_equal(a: object, b: object) -> bool:
    """Whether sizes are equal, or only the running step knows."""
    return type(a) is not int or type(b) is not int or a == b


def without(gm: fx.GraphModule, gone: frozenset[Expression]) -> fx.GraphModule | None:
    """A copy of a graph in which some expressions give what they were given; None where one was given nothing like."""
    made = copy_graph(gm)
    nodes = [node for node in made.graph.nodes if node.op.startswith("call_")]
    for node in nodes:
        body = body_of(node)
        if body is not None and any(expression_of(one) in gone for one in nodes_of(body)):
            if (inside := without(body, gone)) is None:
                return None
            for name in [name for name, module in made.named_children() if module is body]:
                setattr(made, name, inside)
    taken = {node for node in nodes if expression_of(node) in gone and body_of(node) is None}
    changed, left = set[fx.Node](), set(nodes)
    for node in reversed(nodes):
        if node not in taken or node not in left:
            continue
        if node.users:
            if (instead := stand_in(node, taken)) is None:
                return None
            changed.update(() if same_shape(shape_of(instead), shape_of(node)) else node.users)
            node.replace_all_uses_with(instead)
        erase(node, left)
    return made if infer_again(made.graph, changed) else None


def erase(node: fx.Node, left: set[fx.Node]) -> None:
    """Take a node out, and what was computed for it alone. left: those that are there."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    left.discard(node)
    for one in inputs:
        if one in left and not one.users and not writes_into(one):
            erase(one, left)


def products_of(gm: fx.GraphModule) -> int:
    """How many products somebody needs: without what adds their rows up, experts are no experts."""
    live, count = set[fx.Node](), 0
    for node in reversed(gm.graph.nodes):
        if node in live or node.op == "output" or not only_computes(node):
            live.update(node.all_input_nodes)
            body = body_of(node)
            count += products_of(body) if body is not None else call_name(node) in PRODUCTS
    return count


def infer_again(graph: fx.Graph, changed: set[fx.Node]) -> bool:
    """Give values to what is computed of nodes whose inputs have other sizes now; whether all of them have one."""
    for node in graph.nodes if changed else ():
        if node.op.startswith("call_") and (node in changed or not changed.isdisjoint(node.all_input_nodes)):
            try:
                node.meta["val"] = infer(node)
            except Exception:  # it takes no such sizes
                return False
            changed.add(node)
    return True


# ----------------------------------------------------------------------------------------------------------------------
# The part of a graph that a region stands in
# ----------------------------------------------------------------------------------------------------------------------

def frames_of(node: fx.Node) -> set[Function]:
    return {(file, name) for file, _, name in node.meta.get("stack") or [node.meta.get("where") or ("", 0, "")]}


def function_of(gm: fx.GraphModule, region: ExpertRegion) -> Function:
    """The function that a region stands in: that of the first line from its own on of which there are nodes."""
    places = [place for node in nodes_of(gm) for place in node.meta.get("stack", ())]
    after = [place for place in places if place[0] == region.file and place[1] >= region.line]
    found = min(after, key=lambda place: place[1], default=(region.file, 0, ""))
    return found[0], found[2]


def part_of(captured: CapturedGraph, function: Function) -> CapturedGraph:
    """What a function's first call has in the graph, as a graph: what it reads is given, what is read of it is given
    out. Where nothing else stands between two calls they are one part."""
    nodes = [node for node in captured.gm.graph.nodes if node.op.startswith("call_")]
    inside = [function in frames_of(node) for node in nodes]
    if True not in inside:
        return captured
    first = inside.index(True)
    length = next((n for n, within in enumerate(inside[first:]) if not within), len(nodes) - first)
    part = dict.fromkeys(nodes[first : first + length])
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = dict.fromkeys(one for node in part for one in node.all_input_nodes if one not in part)
    for node in sorted(inputs, key=lambda node: node.op.startswith("call_")):
        if node.op in ("placeholder", "get_attr"):
            copies[node] = copy_node(graph, node, copies.__getitem__)
    given = [node for node in inputs if node not in copies]
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in given:
        if tensor_of(node) is not None and is_floating(node):  # (what is given is a parameter for who asks)
            copies[node] = stands_at(graph.call_function(torch.clone, (copies[node],)), node)
            copies[node].meta["val"] = node.meta["val"]
    for node in part:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part if any(user not in part for user in node.users)))
    gm = fx.GraphModule(captured.gm, graph)
    return replace(captured, gm=gm)
