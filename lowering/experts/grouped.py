"""Products of rows that are sorted by expert, ``torch._grouped_mm(rows, w, offs=ends)``, as products with a copy of the
weights gathered for each row.

Row r is multiplied with the matrix of the expert whose part of the rows it is in. Where the parts end is
``cumsum(how many slots each expert has)`` (counting.py); so the expert of row r is the r-th of the slots' experts,
sorted. Written so, the products are those with ``w[index]``, and go their way (batched.py). The copies are never made:
what became part of no operator is put back as it was.
"""

from __future__ import annotations

import operator
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.autocast import autocast_at
from moebius.lowering.contract import Work
from moebius.lowering.errors import defect
from moebius.lowering.experts.counting import Counted, Counting
from moebius.lowering.experts.positions import computed_since_the_choice, is_sorted, root_of
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.experts.routing import INDICES
from moebius.lowering.operators import read_call, target_name
from moebius.lowering.values import add_call, dtype_of, rank_of, same_shape, shape_of

IDIOM = "grouped products of sorted rows"
UNKNOWN = (
    "it is not known which expert each row is of (what is known: the cumsum of how many positions in an axis of "
    "experts are of each expert, counted by histc, bincount, one_hot, scatter_add or a comparison)"
)
CAST = "autocast leaves grouped products alone, and would cast the operator's"
NO_LAYER = "they are not two or three projections, one after another, with the weights of as many experts"
Operands = tuple[fx.Node, fx.Node, fx.Node]  # rows [S, D], weights [E, D, N], where each expert's rows end [E]


@dataclass
class Gathered:
    """found: the grouped products written so. why: what keeps the others as they are."""

    found: list[Provisional] = field(default_factory=list)
    why: dict[fx.Node, str] = field(default_factory=dict)


def gather_weights(work: Work) -> Gathered:
    """Writes the grouped products so, where it is known which row is of which expert."""
    graph, result = work.gm.graph, Gathered()
    products = [(node, operands) for node in graph.nodes if (operands := grouped(node)) is not None]
    if any(is_cast(node) for node, _ in products):
        result.why = dict.fromkeys((node for node, _ in products), CAST)
    elif products:
        try:
            write_gathered(graph, products, result)
        except Exception as error:  # they stay, whatever went wrong
            result.why = {node: defect(error) for node, _ in products}
    return result


def write_gathered(graph: fx.Graph, products: list[tuple[fx.Node, Operands]], gathered: Gathered) -> None:
    storage = Storage(graph)
    known: dict[fx.Node, tuple[fx.Node, Counted] | None] = {}
    sorts = defaultdict[fx.Node, list[fx.Node]](list)
    for node in filter(is_sorted, graph.nodes):
        sorts[root_of(node)].append(node)
    for node, (rows, weight, ends) in products:
        if ends not in known:
            known[ends] = expert_of_each_row(ends, (shape_of(weight) or (0,))[0], node, storage, sorts)
        one = known[ends]
        if one is None or not same_shape((shape_of(rows) or (0,))[:1], shape_of(one[0])):
            gathered.why[node] = UNKNOWN
            continue
        index, counted = one
        own = set().union(*map(storage.family, counted.own))  # (of these it is known who writes into them)
        passed = computed_since_the_choice((ends, index, *counted.through)) - own
        writer = storage.writer_into(passed, node)
        writer = writer or storage.writer_between(ends, graph.output_node())  # backward reads it in plain Python
        if writer is not None:
            gathered.why[node] = f"{target_name(writer)} changes what says which expert each row is of"
            continue
        with graph.inserting_before(node):
            copies = add_call(graph, node, operator.getitem, weight, index)
            result = add_call(graph, node, torch.einsum, "sd,sdn->sn", rows, copies)
        node.replace_all_uses_with(result)
        gathered.found.append(Provisional(node, result, result))


def is_cast(product: fx.Node) -> bool:
    """Whether autocast, which leaves grouped products alone, would cast the product that takes its place."""
    return any(to != dtype_of(product) for _, to in autocast_at(product))


def left_over(graph: fx.Graph) -> list[list[fx.Node]]:
    """The grouped products that are still there, those of the same rows together: two or more of them are a layer."""
    layers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if (operands := grouped(node)) is not None:
            layers.setdefault(operands[2], []).append(node)
    return [products for products in layers.values() if len(products) > 1]


def grouped(node: fx.Node) -> Operands | None:
    """The operands of a grouped product, nothing added."""
    call = read_call(node)
    if call is None or call.name != "grouped_mm":
        return None
    rows, weight, ends, *options = call.args.values()
    ranks = [rank_of(operand) if isinstance(operand, fx.Node) else 0 for operand in (rows, weight, ends)]
    return (rows, weight, ends) if ranks == [2, 3, 1] and not any(o is not None for o in options) else None


def expert_of_each_row(
    ends: fx.Node, experts: Any, at: fx.Node, storage: Storage, sorts: dict[fx.Node, list[fx.Node]]
) -> tuple[fx.Node, Counted] | None:
    """The experts of the slots, sorted, and what was counted, where ``ends`` is where each expert's rows end. sorts:
    what is sorted so far, in the order of the graph, by what it is of."""
    counted = Counting(experts, storage, at).by_ends(ends)
    if counted is None:
        return None
    for node in sorts[root_of(counted.slots)]:
        if node < at and dtype_of(node) in INDICES:
            return node, counted
    with at.graph.inserting_before(at):
        flat = add_call(at.graph, at, "reshape", counted.slots, -1)
        whole = add_call(at.graph, at, "to", flat, torch.int64)
        made = add_call(at.graph, at, torch.sort, whole)
        index = add_call(at.graph, at, operator.getitem, made, 0)
    for one in (flat, whole, made, index):
        storage.add(one)
    insort(sorts[root_of(index)], index)
    return index, counted
