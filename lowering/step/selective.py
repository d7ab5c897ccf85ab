"""Selective activation checkpointing: which operators' results a checkpointed body keeps, and does not compute again.

The user's policy was asked while tracing, of each operator in turn; what it said stands at the nodes of the graph. Here
it is told to torch's own contexts by a policy of ours, which knows by marks in the body which node is being run. What
stands at no node, as it came with lowering, is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from moebius.lowering.values import put_before

KEPT = "kept"  # in a node's meta: for each operator that the node runs, its name, and whether the policy keeps it
Answers = Sequence[tuple[str, bool]]
Place = tuple[tuple[str, tuple[bool, ...]], ...]
NOWHERE = -1


class Keeper:
    """The policy of one checkpointed call. places: for each marked node by operator, which of its iterations are kept.

    A single answer holds for every iteration: of a node that runs a loop.
    """

    def __init__(self, allow_mutation: bool, places: Sequence[Place]):
        self.allow_mutation, self.places = allow_mutation, [dict(place) for place in places]
        self.here: dict[str, tuple[bool, ...]] = {}
        self.loops = False
        self.iterations: dict[str, int] = {}

    def at(self, place: int, loops: bool) -> None:
        """The node at this place is next."""
        self.here, self.loops, self.iterations = self.places[place] if place != NOWHERE else {}, loops, {}

    def __call__(self, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operator)
        answers = self.here.get(name, ())
        iteration = self.iterations[name] = self.iterations.get(name, -1) + 1
        kept = answers[0] if answers and self.loops else iteration < len(answers) and answers[iteration]
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:
        """What ``context_fn`` gives."""
        return create_selective_checkpoint_contexts(self, self.allow_mutation)


def keeper(allow_mutation: bool, places: Sequence[Place]) -> Keeper:
    """A policy for one run of the body."""
    return Keeper(allow_mutation, places)


def keep_at(policy: Keeper, place: int, loops: bool) -> None:
    """A mark before a node of the body."""
    policy.at(place, loops)


def mark_places(begin: fx.Node, inside: list[fx.Node], allow_mutation: bool) -> fx.Node:
    """Marks among the nodes of a body. Returns the node that makes their policy, which stands before the body."""
    policy = put_before(inside[0], keeper, (), begin, None)
    places: list[Place] = []
    marked: list[fx.Node] = []
    last: tuple[int, bool] | None = None
    for node in inside:
        loops = any(True for _ in bodies_of(node))
        place = place_of(answers_of(node), loops)
        if place:
            places.append(place)
        now = (len(places) - 1, loops) if place else (NOWHERE, False)
        if now != last and (place or node.op != "get_attr"):
            marked.append(put_before(node, keep_at, (policy, *now), begin, None))
            last = now
        marked.append(node)
    policy.args = (allow_mutation, tuple(places))
    inside[:] = marked
    return policy


def bodies_of(node: fx.Node, modules: Mapping[str, fx.GraphModule] | None = None) -> Sequence[fx.GraphModule]:
    """The graphs that a node runs in forward: a loop's body, an autograd.Function's first. modules: by name, of a graph
    that has no module yet."""
    first = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, fx.Node) or first.op != "get_attr":
        return ()
    owner = node.graph.owning_module
    body = modules.get(str(first.target)) if modules is not None else getattr(owner, str(first.target), None)
    return (body,) if isinstance(body, fx.GraphModule) else ()


def answers_of(node: fx.Node) -> Answers:
    """What the policy said of the operators that a node runs, in their order."""
    found = list(node.meta.get(KEPT, ()))
    for body in bodies_of(node):
        for inner in body.graph.nodes:
            found += answers_of(inner)
    return found


def place_of(answers: Answers, loops: bool) -> Place:
    """By operator, what is kept; nothing where nothing is. Of one in a loop, all iterations or none."""
    by_name: dict[str, list[bool]] = {}
    for name, kept in answers:
        by_name.setdefault(name, []).append(kept)
    if loops:
        return tuple((name, (True,)) for name, iterations in by_name.items() if all(iterations))
    return tuple((name, tuple(iterations)) for name, iterations in by_name.items() if any(iterations))


for _name in ("keeper", "keep_at"):
    fx.wrap(_name)
