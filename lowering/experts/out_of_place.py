"""``h = torch.bmm(x, w1); h += b1`` of experts, as ``h = h + b1``, where nothing else sees that ``h``, or what it is a
view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.dead_code import is_switch
from moebius.lowering.experts.batched import weight_of
from moebius.lowering.experts.blocks import expert_rows, source_of
from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import PRODUCTS, loop_body, put_body, read_call
from moebius.lowering.values import add_call, copy_node, nodes_between, same_shape, shape_of, tensor_of

FORMS: dict[str, Callable[..., Any]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


def write_out_of_place(work: Work) -> None:
    """Replaces each such write into what an expert gives, in loops and behind branches too."""
    functional(work.gm.graph)
    for node in work.gm.graph.find_nodes(op="call_function", target=expert_loop):
        if any(map(may_be_one, loop_body(node).graph.nodes)):
            rewrite_body(work, node)


def rewrite_body(work: Work, loop: fx.Node) -> None:
    """The same in a body, which is capture's, and that of equal layers: what changes is a copy."""
    body, graph, table = loop_body(loop), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in body.graph.nodes:
        table[node] = copy_node(graph, node, table.__getitem__)
    inner = fx.GraphModule(body, graph)
    if not functional(inner.graph):
        return
    inner.recompile()
    work.loose += put_body(work.gm, "functional", inner, loop)


def may_be_one(node: fx.Node) -> bool:
    """Whether it writes into what an expert gives."""
    call = read_call(node)
    if call is None or not call.op.inplace or call.name not in FORMS or not isinstance(node.args[0], fx.Node):
        return False
    target = views_of_one(node.args[0])[-1]
    product = read_call(target)
    if product is None or product.name not in PRODUCTS or not isinstance(product.args.get("input"), fx.Node):
        return weight_of(target) is not None
    rows = expert_rows(target) or [product["input"]]
    return weight_of(target) is not None or source_of(rows[0]) is not None


def views_of_one(node: fx.Node) -> list[fx.Node]:
    """A tensor, and what it is a view of: each by the one that reads it alone (``torch.bmm(w, x).squeeze(-1)``)."""
    found = [node]
    while (call := read_call(node)) is not None and call.op.alias and call.name not in PRODUCTS:
        source = call.args.get("input")
        if not isinstance(source, fx.Node) or list(source.users) != [node]:
            break
        node = source
        found.append(node)
    return found


def functional(graph: fx.Graph) -> bool:
    """Whether there was such a write in a graph."""
    storage: Storage | None = None
    made: set[fx.Node] = set()
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None or not call.op.inplace or call.name not in FORMS:
            continue
        target: Any = node.args[0]
        if target not in made and not may_be_one(node):
            continue
        storage = storage or Storage(graph)
        if not is_alone(target, node, storage):
            continue
        with graph.inserting_before(node):
            new = add_call(graph, node, FORMS[call.name], *node.args, **node.kwargs)
        # (h += wider would be an error, and h += numbers of another dtype a cast)
        if not alike(new, target) or is_without_grad(target, node):
            graph.erase_node(new)
            continue
        for user in list(target.users):
            if user is not new:
                user.replace_input_with(target, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        made.add(new)
        storage = None
    return bool(made)


def is_without_grad(target: fx.Node, write: fx.Node) -> bool:
    """Whether a switch of the grad mode stands between, or before a view: a sum that is made there may have no
    history."""
    return any(map(is_switch, nodes_between(views_of_one(target)[-1], write)))


def is_alone(target: fx.Node, write: fx.Node, storage: Storage) -> bool:
    """Whether the write is the first thing that happens to a tensor, and nothing else leads to its memory."""
    own = views_of_one(target)
    earlier = [other for other in storage.family(target) if other not in own and other < write]
    return not earlier and storage.is_fresh(target) and not any(user < write for user in target.users)


def alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether the two have one dtype and the same sizes."""
    one, other = tensor_of(a), tensor_of(b)
    return one is not None and other is not None and one.dtype == other.dtype and same_shape(shape_of(a), shape_of(b))
