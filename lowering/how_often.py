"""How often the loops and branches of a captured graph run for some inputs: what a report of a call tells.

It is asked before the graph runs, and is computed beside it: the operators on which the conditions and the rows depend,
on copies of what these write to. Where more than operators would run, nobody is told.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx

from moebius.lowering.aliasing import Storage, computes, graphs_given, is_torchs, schema_of
from moebius.lowering.graph import SkipTurn, expert_loop
from moebius.lowering.memo import remembering
from moebius.lowering.operators import call_name, draws, loop_body, read_call
from moebius.lowering.step.checkpoint import MARKS, modes_put_back
from moebius.lowering.step.draws import draw, draw_array, draw_below, draw_numpy
from moebius.lowering.step.functions import autograd_function, backward_place, set_backward
from moebius.lowering.step.hooks import backward_with_hooks
from moebius.lowering.step.whole import GRADIENTS, SWITCHES, is_backward
from moebius.lowering.torch_private import default_saved_tensors_hooks, draws_numbers, set_grad_enabled
from moebius.lowering.values import apply

BODY = "body"  # in the meta of a loop's node: the number under which it counts
# By these numbers, then by how many conditions an iteration has passed, and whether the last one ended it.
Found = dict[int, dict[tuple[int, bool], int]]
DRAWS = (draw, draw_below, draw_numpy, draw_array)
NO_RESULT = ("require_branch",)  # what it asks for is not needed here
RUN_GRAPHS = (autograd_function, backward_place, set_backward, backward_with_hooks)
OF_GRADIENTS = frozenset((*GRADIENTS, *MARKS, *RUN_GRAPHS, torch.autograd.grad, "requires_grad_"))


class UnknownRuns(Exception):
    """What decides is computed by a node that may do more than compute."""


def how_often(gm: fx.GraphModule, inputs: tuple[Any, ...]) -> Found:
    """By the numbers of the graph's loops, how often each part of an iteration runs. One that is not there is not
    known."""
    found: Found = {}
    if dist.is_available() and dist.is_initialized():
        return found  # (ranks that are not asked would not take part in an exchange)
    try:
        devices = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
        with remembering(), restored_random_state(), modes_put_back({"cpu", *devices}, always=True):
            plan = Plan(gm.graph)
            if plan.by_autograd and default_saved_tensors_hooks() is not None:
                raise UnknownRuns("the program sees what is saved for backward")
            copies = with_gradients(inputs) if plan.by_autograd else plan.copies(inputs)
            torch.set_grad_enabled(plan.by_autograd and torch.is_grad_enabled())
            Walk(found).run(gm, copies, plan)
    except Exception:  # (the graph itself may fail for these inputs)
        return {}
    return found


def with_gradients(inputs: Iterable[Any]) -> list[Any]:
    """Copies, for a backward to write their gradients to: one of these may be an input itself."""
    copies: dict[int, Any] = {}

    def copy_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            if not value.is_leaf:
                raise UnknownRuns("a backward would run what was computed before the graph")
            copy = copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
            copy.grad = copy_of(value.grad)
        return copies[id(value)]

    return [copy_of(value) for value in inputs]


@contextlib.contextmanager
def restored_random_state() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Plan:
    """What is run of a graph: all of it, or what decides how often its loops run; where gradients decide, all that is
    before. nodes: these, in order. loops: of them, those of which no result is needed. written: the inputs that are
    written to. by_autograd: whether gradients are computed."""

    def __init__(self, graph: fx.Graph, whole: bool = False):
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.results: Any = graph.output_node().args[0]
        self.storage = Storage(graph)
        every = [node for node in graph.nodes if call_name(node) not in NO_RESULT]
        self.reached = [node for node in every if node.target is not set_grad_enabled]
        loops = [node for node in self.reached if node.target is expert_loop]
        asked = [*loops, *(node for node in self.reached if call_name(node) == "skip_iteration")]
        last = max(asked) if asked else None
        if not whole:
            self.reached = [node for node in self.reached if last is not None and not last < node]
        self.needed: set[fx.Node] = set()
        self.need(self.reached if whole else (arg for node in asked for arg in node.all_input_nodes))
        self.need(node for node in loops if Plan(loop_body(node).graph).needs_results)
        if any(map(may_draw, self.needed)):  # all that draw, in their order
            self.need(node for node in self.reached if may_draw(node))
        if self.needed:
            self.need(node for node in self.reached if node.target in SWITCHES)
        self.by_autograd = any(map(is_of_gradients, self.needed))
        if self.by_autograd:
            self.reached = [node for node in every if last is not None and not last < node]
            self.need(self.reached)
        for node in self.needed:
            refuse_effects(node)
        self.loops = set(loops) - self.needed
        kept = self.needed | set(asked)
        self.nodes = [node for node in self.reached if node in kept]
        self.written = self.inputs_written(self.needed)
        memory = Counter(node.meta.get("memory", node) for node in self.inputs)
        if any(memory[node.meta.get("memory", node)] > 1 for node in self.written):
            raise UnknownRuns("an input that overlaps another one is written to")

    def need(self, nodes: Iterable[fx.Node]) -> None:
        """These, what they are made of, and what writes into that."""
        found, reached = [*nodes], set(self.reached)
        while found:
            node = found.pop()
            if node not in self.needed:
                self.needed.add(node)
                found += node.all_input_nodes
                found += [writer for writer in self.storage.writers_of((node,)) if writer in reached]

    def inputs_written(self, writers: Iterable[fx.Node]) -> set[fx.Node]:
        storage = self.storage
        targets = [target for writer in writers for target in storage.writers.get(writer, ())]
        return {root for target in targets for root in storage.roots[target] if root.op == "placeholder"}

    def copies(self, inputs: Iterable[Any]) -> list[Any]:
        """The inputs, those that are written to copied."""
        written = [node in self.written for node in self.inputs]
        tensors = zip(inputs, written, strict=True)
        return [x.detach().clone() if w and isinstance(x, torch.Tensor) else x for x, w in tensors]

    @property
    def needs_results(self) -> bool:
        """Of an iteration: whether what decides in it depends on what iterations before it have changed."""
        carried = self.inputs[1 : 1 + len(self.results)]
        read = {root for node in self.needed for root in self.storage.roots[node]}
        return not self.needed.isdisjoint(carried) or not read.isdisjoint(self.inputs_written(self.storage.writers))


def is_of_gradients(node: fx.Node) -> bool:
    return is_backward(node) or node.target in OF_GRADIENTS


def may_draw(node: fx.Node) -> bool:
    """Whether it may draw random numbers."""
    if node.op in ("placeholder", "output", "get_attr") or node.target in OF_GRADIENTS:
        return False
    call = read_call(node)
    if call is None or call.name == "dropout":
        return not computes(node)
    return call.name == "expert_loop" and any(map(may_draw, loop_body(node).graph.nodes))


def only_draws(node: fx.Node) -> bool:
    """Whether it is an operator of torch's that draws from the random numbers of the device, or a function that draws
    from Python's or numpy's."""
    if node.target in DRAWS:
        return True
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    ours = node.op == "call_method" or is_torchs(node, name)
    return ours and draws_numbers(name) and not node.kwargs.keys() & {"generator", "out"}


def refuse_effects(node: fx.Node) -> None:
    """Raises UnknownRuns for a node that may do more than compute, draw from torch's random numbers and write into
    tensors."""
    call = read_call(node)
    if node.op in ("placeholder", "output", "get_attr") or computes(node) or draws(node) or only_draws(node):
        return
    if node.target in RUN_GRAPHS:
        for inner in (inner for graph in graphs_given(node) for inner in graph.nodes):
            refuse_effects(inner)
    if is_of_gradients(node) or node.target in SWITCHES or getattr(node.target, "writes", None) == ():
        return
    name = str(getattr(node.target, "__name__", node.target))
    if (node.op == "call_method" or is_torchs(node, name)) and schema_of(node) and not draws_numbers(name):
        return
    if getattr(torch.nn.functional, name, None) is node.target and "generator" not in node.kwargs:
        return  # (it is made of such operators)
    if call is None or not (call.op.inplace or call.name == "expert_loop"):
        raise UnknownRuns(node.name)
    if call.name == "expert_loop":
        for inner in loop_body(node).graph.nodes:
            refuse_effects(inner)


class Walk:
    """Runs what plans say, and counts."""

    def __init__(self, found: Found):
        self.found = found
        self.plans: dict[tuple[fx.Graph, bool], Plan] = {}

    def plan(self, graph: fx.Graph, whole: bool) -> Plan:
        if (graph, whole) not in self.plans:
            self.plans[graph, whole] = Plan(graph, whole)
        return self.plans[graph, whole]

    def run(self, gm: fx.GraphModule, inputs: Iterable[Any], plan: Plan, passed: Callable[[bool], Any] = bool) -> Any:
        """What the graph gives, where all of it runs. passed: told of each condition, and whether it ends this."""
        values = dict(zip(plan.inputs, inputs, strict=True))
        for node in (node for node in plan.nodes if node.target is expert_loop):
            self.enter(node)
        kept = set(plan.nodes)
        users = {node: sum(user in kept for user in node.users) for node in kept}
        result: Any = None
        for node in plan.nodes:
            if node.op == "placeholder":
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                result = args[0]
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(gm)
            elif call_name(node) == "skip_iteration":
                passed(skips := bool(next(iter((*args, *kwargs.values())))))
                if skips:
                    raise SkipTurn
            elif node.target is expert_loop:
                values[node] = self.loop(node, node not in plan.loops, *args, **kwargs)
            else:
                values[node] = apply(node, args, kwargs)
            for read in node.all_input_nodes:
                users[read] -= 1
                if not users[read]:
                    del values[read]
        return result

    def enter(self, node: fx.Node) -> None:
        """It is known of a loop, and of those in it, how often they run: not at all so far."""
        if BODY in node.meta:
            self.found.setdefault(node.meta[BODY], {})
        for inner in loop_body(node).graph.find_nodes(op="call_function", target=expert_loop):
            self.enter(inner)

    def loop(
        self, node: fx.Node, whole: bool, body: fx.GraphModule, source: Any, carried: Any = (), captures: Any = ()
    ) -> tuple:
        state, counts = tuple(carried), self.found.get(node.meta.get(BODY, 0), {})
        plan = self.plan(body.graph, whole)
        for row in range(source) if isinstance(source, int) else source:
            conditions = Conditions(counts)
            with contextlib.suppress(SkipTurn):
                results = self.run(body, (row, *state, *captures), plan, conditions)
                state = tuple(results) if whole else state
        return state


class Conditions:
    """Of one iteration: counts what it passes."""

    def __init__(self, counts: dict[tuple[int, bool], int]):
        self.counts, self.passed = counts, 0
        self.count(0, False)

    def count(self, *part: Any) -> None:
        self.counts[part] = self.counts.get(part, 0) + 1

    def __call__(self, ends: bool) -> None:
        self.passed += not ends
        self.count(self.passed, ends)
