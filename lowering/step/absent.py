"""The rest of a step whose batch left parameters without gradients: an expert of its own module that no token chose.

The graph was captured with a gradient for each parameter. Python would leave those without one out of clipping and of
the optimizer, and so does this: what follows ``backward()`` runs node by node, and what belongs to such a parameter is
skipped, or taken out of the lists that operators get. Which nodes those are is known before any of them runs. It is
only done where all code that asked for gradients is torch's own, which treats each parameter by itself; where a node
of another kind would need what is not there, nothing is run and the caller has to find another way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from moebius.lowering.step.branches import require_branch
from moebius.lowering.step.gradients import MissingGradientError, gradient_of, require_gradients, set_gradient
from moebius.lowering.values import apply

OPTIMIZERS = frozenset(
    "adadelta adagrad adam adamax adamw nadam optimizer radam rmsprop rprop sgd _adafactor _muon".split()
)
OPTIM, CLIP = Path(torch.optim.__file__).parent, torch.nn.utils.clip_grad.__file__
LISTS = ("_foreach_", "_fused_")  # operators that take parallel lists
JOINS = frozenset({torch.stack, torch.cat})
BACKWARD = frozenset({"backward", "backward_with_hooks", "grad"})


@functools.cache
def is_optimizer(file: str) -> bool:
    """Whether the code of torch's optimizers that treat each parameter by itself is in this file."""
    path = Path(file)
    return path.parent == OPTIM and path.stem in OPTIMIZERS


def treats_each_alone(file: str) -> bool:
    """Whether the code in this file that asks for gradients treats each parameter by itself."""
    return file == CLIP or is_optimizer(file)


def is_backward(node: fx.Node) -> bool:
    """Whether autograd runs: it may write into every ``.grad``."""
    return getattr(node.target, "__name__", node.target) in BACKWARD


ROLES = ("optimizer", "clipping", "helper")


def role_of(node: fx.Node) -> str:
    """What code a node is of: "optimizer" or "clipping" (torch's own), "helper" (called by an optimizer), or "" (else).

    A graph from a file says it in the nodes' meta."""
    if "role" in node.meta:
        return str(node.meta["role"])
    files = [place[0] for place in node.meta.get("stack") or ()]
    if files and is_optimizer(files[-1]):
        return "optimizer"
    if files and files[-1] == CLIP:
        return "clipping"
    return "helper" if any(map(is_optimizer, files)) else ""


class Unplanned(Exception):
    """A node needs a gradient that is not there, and Python might have done something else."""


class Plan:
    """What to leave out after ``at``. missing: the parameters' nodes. owners: of optimizer state, by input name."""

    def __init__(self, at: fx.Node, missing: set[fx.Node], owners: Mapping[str, str]):
        names = {node.name for node in missing}
        graph = at.graph
        self.state = {n for n in graph.find_nodes(op="placeholder") if owners.get(n.name) in names}
        self.missing, self.absent = missing, set[fx.Node]()
        self.partial: dict[fx.Node, frozenset[int]] = {}  # positions that are absent in a list, by its node
        self.drops: dict[fx.Node, frozenset[int]] = {}  # positions that an operator's lists go without
        nodes = list(graph.nodes)
        self.rest = nodes[nodes.index(at) + 1 :]
        for node in self.rest:
            self.consider(node)
        self.frees: dict[fx.Node, list[fx.Node]] = {}  # what nobody needs any more after a node
        needed: set[fx.Node] = set()
        for node in reversed(self.rest):
            if node not in self.absent:
                self.frees[node] = [n for n in (node, *node.all_input_nodes) if n not in needed]
                needed.update(self.frees[node])

    def consider(self, node: fx.Node) -> None:
        """Decide over one node. Raises Unplanned."""
        role = role_of(node)
        own, alone = role == "optimizer", role in ("optimizer", "clipping")
        if is_backward(node) or (node.target is require_gradients and node.args):
            raise Unplanned(f"{node.name} runs backward again")
        if node.target is gradient_of:
            if node.args[0] in self.missing:
                self.absent.add(node)
            return
        if node.target is set_gradient and node.args[1] is None:
            return
        if node.target is operator.getitem and node.args[0] in self.partial:
            if not isinstance(node.args[1], int):
                raise Unplanned(f"{node.name} takes a part of a list")
            if node.args[1] in self.partial[node.args[0]]:  # type: ignore[index]
                self.absent.add(node)
            return
        inputs = node.all_input_nodes
        if role == "helper" and not self.missing.isdisjoint(inputs):
            raise Unplanned(f"{node.name} is a helper of an optimizer's")
        gone = {n for n in inputs if n in self.absent or n in self.state or (own and n in self.missing)}
        if node.target is require_branch and alone and node.args[0] not in gone:
            raise Unplanned(f"{node.name} would go on in the optimizer, with the lists of all parameters")
        if not gone and self.partial.keys().isdisjoint(inputs):
            return
        if not alone or node.op == "output":
            raise Unplanned(f"{node.name} needs a gradient that is not there")
        arguments = [*node.args, *node.kwargs.values()]
        if any(isinstance(a, fx.Node) and a in gone for a in arguments):
            self.absent.add(node)
            return
        self.lists(node, arguments, gone, getattr(node.target, "__name__", str(node.target)))

    def lists(self, node: fx.Node, arguments: list[Any], gone: set[fx.Node], name: str) -> None:
        """An operator that takes lists: they go without what is not there."""
        positions: set[int] = set()
        lengths = set()
        for argument in arguments:
            if isinstance(argument, fx.Node) and argument in self.partial:
                raise Unplanned(f"{node.name} takes a list as one")
            if isinstance(argument, list | tuple):
                lengths |= {len(argument)} - {0}  # optional lists are empty
                positions |= {i for i, item in enumerate(argument) if isinstance(item, fx.Node) and item in gone}
        if len(lengths) != 1:
            raise Unplanned(f"{node.name} takes lists that are not parallel")
        every = len(positions) == lengths.pop()
        if name.startswith(LISTS) and every:
            self.absent.add(node)
        elif name.startswith(LISTS):
            self.drops[node] = self.partial[node] = frozenset(positions)
        elif node.target in JOINS and not every:
            self.drops[node] = frozenset(positions)
        else:
            raise Unplanned(f"{node.name} needs a gradient that is not there")

    def run(self, values: dict[fx.Node, Any]) -> tuple[Any, ...]:
        """Run the rest on the values that the graph had, which it empties; its outputs."""
        for node in values.keys() - {n for freed in self.frees.values() for n in freed}:
            del values[node]
        for node in self.rest:
            if node in self.absent:
                continue
            if node.op == "output":
                return tuple(fx.map_arg(node.args[0], values.__getitem__))
            if node.op == "get_attr":
                assert node.graph.owning_module is not None
                values[node] = operator.attrgetter(str(node.target))(node.graph.owning_module)
                continue
            dropped = self.drops.get(node, frozenset())
            args, kwargs = node.args, node.kwargs
            if dropped:
                args = tuple(shorter(a, dropped) for a in args)
                kwargs = {name: shorter(a, dropped) for name, a in kwargs.items()}
            given, named = fx.map_arg(args, values.__getitem__), fx.map_arg(kwargs, values.__getitem__)
            result = apply(node, given, named)
            if dropped and isinstance(result, list | tuple):
                kept = iter(result)
                result = [None if i in dropped else next(kept) for i in range(len(result) + len(dropped))]
            values[node] = result
            del given, named, result
            for free in self.frees[node]:
                values.pop(free, None)
        raise AssertionError("a graph without an output")


def shorter(argument: Any, dropped: frozenset[int]) -> Any:
    """A list without what is at the dropped positions; anything else as it is."""
    if not isinstance(argument, list | tuple):
        return argument
    return [item for i, item in enumerate(argument) if i not in dropped]


class Plans:
    """The plans for one graph, by the parameters that were left without a gradient."""

    def __init__(self, owners: Mapping[str, str]):
        self.owners = owners
        self.known: dict[tuple[fx.Node, ...], Plan | None] = {}

    def find(self, at: fx.Node, values: Mapping[fx.Node, Any]) -> Plan | None:
        """What to do after a check of gradients that found some missing; None where only Python can say."""
        parameters = [a for a in at.args if isinstance(a, fx.Node)]
        if at.target is not require_gradients or any(p not in values for p in parameters):
            return None
        missing = tuple(p for p in parameters if values[p].grad is None)
        if missing not in self.known:
            if len(self.known) == KEPT:
                self.known.pop(next(iter(self.known)))
            self.known[missing] = self.make(at, missing, values)
        return self.known[missing]

    def make(self, at: fx.Node, missing: tuple[fx.Node, ...], values: Mapping[fx.Node, Any]) -> Plan | None:
        try:
            plan = Plan(at, set(missing), self.owners)
        except Unplanned:
            return None
        needed = {n for node in plan.rest if node not in plan.absent for n in node.all_input_nodes}
        return plan if needed <= set(plan.rest) | set(values) else None


KEPT = 64  # plans: batches leave out the same few experts, or others each time
Located = Callable[[BaseException], "tuple[fx.Node, dict[fx.Node, Any]] | None"]


def going_on(
    fn: Callable[..., tuple], locate: Located, owners: Mapping[str, str], done: Callable[[], None]
) -> Callable[..., tuple]:
    """``fn``, the code of a graph; where gradients are missing that it was captured with, the rest runs without them.

    locate: the node that raised an error, and the values that were there. done: called when that has been so.
    """

    plans = Plans(owners)

    def run(*inputs: Any) -> tuple:
        try:
            return fn(*inputs)
        except MissingGradientError as error:
            found = locate(error)
            plan = None if found is None else plans.find(*found)
            if found is None or plan is None:
                raise
            values = found[1]
            del found
        outputs = plan.run(values)
        done()
        return outputs

    return run
