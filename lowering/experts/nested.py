"""Experts within a branch: a layer of experts of which each is a layer of experts (``out[t] = layer(x[t])``).

What the branch runs is a graph, and its experts are looked for as in any other. What its inputs share is known there,
as the graph around it says; and what the new operators keep for backward is written by nothing outside until then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from moebius.kernels import experts
from moebius.lowering.aliasing import Storage, storage_now
from moebius.lowering.contract import Work
from moebius.lowering.dead_code import drop_dead_code
from moebius.lowering.experts.saved_for_backward import writer_before_backward
from moebius.lowering.experts.unrolled_loops import is_branch
from moebius.lowering.graph import ExpertRegion
from moebius.lowering.operators import PRODUCTS, call_name, given_to, loop_body, put_body, target_name
from moebius.lowering.step import checkpoint, inference, is_backward
from moebius.lowering.values import copy_node, refuse

WRITTEN = "kept unchanged"  # the step of the proof


def replace_nested(work: Work, replace_all: Callable[[Work], None]) -> None:
    """The experts of each branch that has some, by ``replace_all`` on a copy of what it runs."""
    if work.options.mesh is not None or checkpoint.is_marked(work.gm) or inference.marks_of(work.gm.graph):
        return
    for branch in [node for node in work.gm.graph.nodes if is_branch(node) and may_have_experts(loop_body(node).graph)]:
        inner = copied(branch, storage_now(work.gm.graph))
        if inner is None:
            continue
        before = set(inner.graph.nodes)
        own = Work(inner, work.captured, work.options, by_rows=work.by_rows, known=work.known)
        replace_all(own)
        drop_dead_code(own)
        if not any(region.lowered for region in own.regions):
            work.regions += own.regions
            continue
        kept = kept_from_outside(branch, inner.graph, before)
        writer = writer_before_backward(storage_now(work.gm.graph), branch, kept, kept, branch)
        if writer is not None:
            work.regions += [ExpertRegion(one.file, one.line, one.idiom) for one in own.regions]
            for region in work.regions[-len(own.regions) :]:
                refuse(region, f"{WRITTEN}: {target_name(writer)} changes what the experts of a branch keep", writer)
            continue
        inner.recompile()
        work.loose += put_body(work.gm, "nested", inner, branch)
        work.regions += own.regions


def may_have_experts(body: fx.Graph) -> bool:
    """Whether it has several products or branches, all of them behind where it may end early, and one result: of
    several, some may be read by nobody, and their experts get no gradients."""
    ends = [node for node in body.nodes if call_name(node) == "skip_iteration"]
    parts = [node for node in body.nodes if call_name(node) in PRODUCTS | {"expert_loop"}]
    plain = not any(node.target is experts or is_backward(node) for node in body.nodes)
    results = body.output_node().args[0]
    whole = isinstance(results, tuple | list) and len(results) < 2
    return plain and whole and len(parts) > 2 and not any(min(parts) < end for end in ends)


def copied(branch: fx.Node, storage: Storage) -> fx.GraphModule | None:
    """What the branch runs, its inputs marked by the memory that they share. None where that is not known."""
    body, graph, table = loop_body(branch), fx.Graph(), dict[fx.Node, fx.Node]()
    given, shared = given_to(branch), dict[fx.Node, list[fx.Node]]()
    for node in body.graph.nodes:
        copy = table[node] = copy_node(graph, node, table.__getitem__)
        outer = given.get(node)
        if not isinstance(outer, fx.Node):
            continue
        others = [other for other in given.values() if isinstance(other, fx.Node) and storage.share(outer, other)]
        shared[outer] = others
        if storage.is_known(outer):
            copy.meta["memory"] = min(storage.roots[outer]).name
        elif any(other is not outer for other in others):
            return None
    for outer, others in shared.items():  # (one name for all that share, and for nothing else)
        if any(storage.roots[other] != storage.roots[outer] for other in others):
            return None
    return fx.GraphModule(body, graph)


def kept_from_outside(branch: fx.Node, body: fx.Graph, before: set[fx.Node]) -> list[fx.Node]:
    """What the branch is given and new operators in its body read as it is."""
    storage, given = Storage(body), list(given_to(branch).values())
    inputs = dict(zip(body.find_nodes(op="placeholder"), given, strict=False))
    made = [node for node in body.nodes if node not in before and not is_branch(node)]  # (what is left of a branch does
    read = [argument for node in made for argument in node.all_input_nodes]  # what it did, to what it did)
    roots = dict.fromkeys(root for argument in read for root in storage.roots[argument])
    return [outer for root in roots if isinstance(outer := inputs.get(root), fx.Node)]
