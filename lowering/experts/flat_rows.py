"""Experts on rows with several axes, ``expert(slots[e])`` of [batch, slots, D], as experts on a matrix of these rows.

A projection and what stands between two of them work on the last axis alone, so the axes before it may be one. So
written, the experts may become an operator (module_reuse.py); where they do not, they are as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.operators import ELEMENTWISE, PRODUCTS, Call, read_call
from moebius.lowering.values import add_call, infer, shape_of, stands_at

ROWS_FIRST = PRODUCTS - {"addmm"}  # the rows are the first operand
FAR = 64


def flatten_rows(work: Work) -> list[Provisional]:
    """Writes the experts of one line so, two or more of them."""
    lines: dict[Any, list[fx.Node]] = {}
    for node in work.gm.graph.nodes:
        call = read_call(node)
        if call is not None and call.name in ROWS_FIRST and not call.op.inplace and len(shape_of(node) or ()) > 2:
            lines.setdefault((node.meta.get("where"), node.target), []).append(node)
    found: list[Provisional] = []
    lines = {line: nodes for line, nodes in lines.items() if len(nodes) > 1}
    storage = Storage(work.gm.graph) if lines else None
    for nodes in lines.values():
        between = [(node, *one) for node in nodes if (one := inside(node)) is not None]
        between = [one for one in between if storage is not None and is_quiet(one[1], one[2], storage)]
        if len({rows for _, rows, _ in between}) == len(between) > 1:  # (all on the same rows: nobody routes these)
            found += [flat for one in between if (flat := written(*one)) is not None]
    return found


def inside(down: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(the rows, the nodes from them to the down-projection), None where one is not known to go row by row."""
    call = read_call(down)
    assert call is not None
    nodes: list[fx.Node] = []
    rows: set[fx.Node] = set()
    pending, seen = [call["input"]], {down}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        made = read_call(node)
        if made is None or made.op.inplace or made.args.get("inplace") or len(seen) > FAR:
            return None
        if made.name in ROWS_FIRST and is_projection(made):
            rows.add(made["input"])
        elif made.name in ELEMENTWISE or is_part(made) or made.name == "cast" or is_switched_off(made):
            wide = [n for n in node.all_input_nodes if len(shape_of(n) or ()) > 1 or shape_of(n) is None]
            pending += wide
        else:
            return None
        nodes.append(node)
    if len(rows) != 1 or not is_projection(call):
        return None
    (source,) = rows
    return (source, sorted(nodes)) if len(shape_of(source) or ()) == len(shape_of(down) or ()) else None


def is_quiet(rows: fx.Node, nodes: list[fx.Node], storage: Storage) -> bool:
    """Whether nothing is written in place into the rows or what is made of them, from the first projection on."""
    return not any(
        nodes[0] < writer and any(storage.share(target, node) for target in targets for node in (rows, *nodes))
        for writer, targets in storage.writers.items()
    )


def is_projection(call: Call) -> bool:
    """Whether it multiplies the last axis of rows with a matrix."""
    weight = call["weight"] if call.name == "linear" else call["other"]
    rows = call["input"]
    return isinstance(rows, fx.Node) and isinstance(weight, fx.Node) and len(shape_of(weight) or ()) == 2


def is_switched_off(call: Call) -> bool:
    """Whether it is dropout that draws nothing: it would be drawn twice."""
    return call.name == "dropout" and (call["p"] == 0 or call["training"] is False)


def is_part(call: Call) -> bool:
    """``h.chunk(2, -1)``, ``h.split(n, -1)`` and a part of either."""
    if call.name == "getitem":
        return type(call["index"]) is int and isinstance(call["input"], fx.Node) and shape_of(call["input"]) is None
    return call.name in ("chunk", "split") and call["dim"] == -1


def written(down: fx.Node, rows: fx.Node, nodes: list[fx.Node]) -> Provisional | None:
    """The same computation on a matrix, before each node its own."""
    graph, sizes = down.graph, shape_of(rows) or ()
    if type(sizes[-1]) is not int:
        return None
    with graph.inserting_before(nodes[0]):
        matrix = add_call(graph, rows, torch.reshape, rows, (-1, sizes[-1]))
    same: dict[fx.Node, fx.Node] = {rows: matrix}
    made = [matrix]
    for node in (*nodes, down):
        with graph.inserting_before(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
            copy = stands_at(graph.create_node(node.op, node.target, args, kwargs), node)
        made.append(copy)
        try:
            copy.meta["val"] = infer(copy)
        except Exception:  # a part of another axis, rows of another rank: it stays as it is
            for one in reversed(made):
                graph.erase_node(one)
            return None
        same[node] = copy
    with graph.inserting_before(down):
        given = [n if type(n) is int else add_call(graph, down, "size", rows, i) for i, n in enumerate(sizes[:-1])]
        whole = add_call(graph, down, torch.reshape, same[down], (*given, (shape_of(down) or ())[-1]))
    down.replace_all_uses_with(whole)
    return Provisional(down, whole, same[down])
