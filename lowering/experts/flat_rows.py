"""Experts on rows with several axes, ``expert(slots[e])`` of [batch, slots, D], as experts on a matrix of these rows.

A projection and what stands between two of them work on the last axis alone, so the axes before it may be one
(dense_raised.py). So written, the experts may become an operator (blocks.py); where they do not, they are as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.blocks import expert_rows
from moebius.lowering.experts.dense import NoExperts
from moebius.lowering.experts.dense_raised import Flat, behind
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.operators import PRODUCTS, read_call
from moebius.lowering.values import add_call, shape_of


def flatten_rows(work: Work) -> list[Provisional]:
    """Writes the experts of one line so, two or more of them."""
    graph = work.gm.graph
    lines: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        call = read_call(node)
        if call is not None and call.name in PRODUCTS and len(shape_of(node) or ()) > 2:
            lines.setdefault((node.meta.get("where"), node.target), []).append(node)
    found: list[Provisional] = []
    lines = {line: nodes for line, nodes in lines.items() if len(nodes) > 1}
    storage = Storage(graph) if lines else None
    for nodes in lines.values():
        own = {node: set(expert_rows(node, len(shape_of(node) or ())) or ()) for node in nodes}
        alone = {node: rows.pop() for node, rows in own.items() if len(rows) == 1}
        if storage is not None and len(set(alone.values())) == len(alone) > 1:  # (else nobody routes these)
            found += [flat for down, rows in alone.items() if (flat := written(down, rows, storage)) is not None]
    return found


def written(down: fx.Node, rows: fx.Node, storage: Storage) -> Provisional | None:
    """The same computation on a matrix, before each node its own."""
    graph = down.graph
    before = set(graph.nodes)
    try:
        if storage.writer_between(rows, graph.output_node()) is not None:
            raise NoExperts("the rows are changed in place", rows)
        flat = Flat(rows, {rows}, min(node for node in behind(down, {rows}) if rows < node), storage)
        core = flat.of(down)
        with graph.inserting_before(down):
            whole = add_call(graph, down, torch.reshape, core, (*flat.sizes(down), (shape_of(down) or ())[-1]))
    except NoExperts:
        for node in [node for node in reversed(graph.nodes) if node not in before]:
            graph.erase_node(node)
        return None
    for node in [node for node in graph.nodes if node not in before]:  # what another product may read
        storage.add(node)
    down.replace_all_uses_with(whole)
    return Provisional(down, whole, core)
