"""``torch.einsum("nd,df->nf", rows, w)``: an einsum of rows and one matrix, as the product that it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.nn.functional import linear

from moebius.lowering.contract import Work
from moebius.lowering.experts.bodies import rewrite_body
from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import loop_body
from moebius.lowering.values import shape_of, stands_at


def write_products(work: Work) -> bool:
    """Each such einsum of the graph, and of the bodies of loops and branches. Returns whether there was one."""
    before = list(work.gm.graph.nodes)
    for loop in work.gm.graph.find_nodes(op="call_function", target=expert_loop):
        if holds_one(loop):
            rewrite_body(work, loop, "products", write_products)
    for node in work.gm.graph.find_nodes(op="call_function", target=torch.einsum):
        if (product := product_of(node)) is None:
            continue
        with work.gm.graph.inserting_before(node):
            made = stands_at(work.gm.graph.call_function(product, node.args[1:]), node)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        work.gm.graph.erase_node(node)
    return before != list(work.gm.graph.nodes)


def holds_one(loop: fx.Node) -> bool:
    graph = loop_body(loop).graph
    found = map(product_of, graph.find_nodes(op="call_function", target=torch.einsum))
    return any(found) or any(map(holds_one, graph.find_nodes(op="call_function", target=expert_loop)))


def product_of(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    """``torch.matmul`` or ``linear``, whichever it is."""
    text, *operands = node.args
    if type(text) is not str or text.count("->") != 1 or text.count(",") != 1 or len(operands) != 2 or node.kwargs:
        return None
    parts, result = text.replace(" ", "").split("->")
    rows, matrix = parts.split(",")
    letters, inner = rows.replace("...", ""), rows[-1:]
    outer = matrix.replace(inner, "") if inner.isalpha() else ""
    if len(shape_of(operands[1]) or ()) != 2 or len(matrix) != 2 or len(outer) != 1 or outer in rows:
        return None
    if len(set(letters)) != len(letters) or result != rows[:-1] + outer:
        return None
    return torch.matmul if matrix[0] == inner else linear
