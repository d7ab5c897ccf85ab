"""Experts as batched products, with the weights of all of them or with a copy of them for each row: found, not lowered.

Nothing loops there, so there are no turns to prove anything of. The report has a region for them all the same, which
says at which line the products are and why they stay.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from moebius.lowering.graph import ExpertRegion
from moebius.lowering.operators import read_call, target_name
from moebius.lowering.values import describe_where, shape_of, tensor_of, where_of

PRODUCTS = frozenset(
    {torch.bmm, torch.baddbmm, torch.einsum, torch.matmul, operator.matmul, "bmm", "baddbmm", "matmul"}
)
STOPS = frozenset({"linear", "matmul", "addmm", "expert_loop"})
VIEWS = frozenset({"transpose", "permute", "T", "mT", "cast", "contiguous", "chunk", "split"})
FAR = 64  # nodes looked at between two products


@dataclass(frozen=True)
class Weight:
    """The weights [E, …] that a product is with; gathered: a copy for each row."""

    parameter: fx.Node
    experts: int
    sizes: frozenset[int]
    gathered: bool


def batched_regions(graph: fx.Graph) -> list[ExpertRegion]:
    """A region for each product with expert weights that reads another one: the down-projection of an expert layer."""
    products = {node: weight for node in graph.nodes if (weight := weight_of(node)) is not None}
    regions = []
    for down, weight in products.items():
        if not any(goes_with(products[up], weight) for up in products_before(down, products)):
            continue
        file, line, _ = where_of(down)
        if weight.gathered:
            idiom, why = "weights gathered for each row", "multiplies each row with a copy of its expert's weights"
        else:
            idiom, why = "experts as batched products", "multiplies the weights of all experts at once"
        refusal = f"batched experts: {target_name(down)} {why}, and there is no loop to prove ({describe_where(down)})"
        regions.append(ExpertRegion(file, line, idiom, refusal=refusal))
    return regions


def weight_of(node: fx.Node) -> Weight | None:
    """The expert weights that a product of the graph is with."""
    if node.op not in ("call_function", "call_method") or node.target not in PRODUCTS:
        return None
    for operand in node.all_input_nodes:
        value = tensor_of(operand)
        found = parameter_of(operand) if value is not None and value.dim() > 2 else None
        if found is not None:
            return found
    return None


def parameter_of(node: fx.Node) -> Weight | None:
    """The parameter [E, a, b] that a tensor of three axes or more is a view of, or rows of."""
    gathered = False
    while node.op != "placeholder":
        call = read_call(node)
        if call is None:
            return None
        rows = call.args.get("index") if call.name in ("getitem", "index_select") else None
        index = tensor_of(rows) if isinstance(rows, fx.Node) else None
        if index is not None and not index.dtype.is_floating_point and index.dim() > 0:
            gathered = True
        elif call.name not in VIEWS and not (call.name == "getitem" and type(call["index"]) is int):
            return None
        if not isinstance(call["input"], fx.Node):
            return None
        node = call["input"]
    value, shape = tensor_of(node), shape_of(node)
    if value is None or shape is None or len(shape) != 3 or not value.requires_grad:
        return None
    if not all(type(size) is int and size > 1 for size in shape):
        return None
    return Weight(node, shape[0], frozenset(shape[1:]), gathered)


def products_before(down: fx.Node, products: dict[fx.Node, Weight]) -> list[fx.Node]:
    """The products with expert weights that this one's rows are made of, no other product standing between."""
    found, seen, pending = [], {down}, list(down.all_input_nodes)
    while pending and len(seen) < FAR:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in products:
            found.append(node)
            continue
        call = read_call(node)
        if node.op != "placeholder" and node.target not in PRODUCTS and (call is None or call.name not in STOPS):
            pending += node.all_input_nodes
    return found


def goes_with(up: Weight, down: Weight) -> bool:
    """Whether the two are weights of one layer: as many experts, and the width that x has."""
    return (
        up.parameter is not down.parameter
        and (up.experts, up.gathered) == (down.experts, down.gathered)
        and bool(up.sizes & down.sizes)
    )
