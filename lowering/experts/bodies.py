"""The body of a loop or branch, rewritten. It is capture's, and that of equal layers: what changes is a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from moebius.lowering.contract import Work
from moebius.lowering.operators import added_body, loop_body
from moebius.lowering.values import copy_node, stands_at


def rewrite_body(work: Work, loop: fx.Node, word: str, rewrite: Callable[[Work], bool]) -> None:
    """Give a loop another body, if ``rewrite`` changes it. word: what its name begins with."""
    body, graph, table = loop_body(loop), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in body.graph.nodes:
        table[node] = copy_node(graph, node, table.__getitem__)
    inner = replace(work, gm=fx.GraphModule(body, graph), loose=[])
    if not rewrite(inner):
        return
    inner.gm.recompile()
    with work.gm.graph.inserting_before(loop):
        given = stands_at(work.gm.graph.get_attr(added_body(work.gm, word, inner.gm)), loop)
    given.meta["val"] = None
    work.loose += [one for one in loop.all_input_nodes if one.op == "get_attr"]
    loop.args = (given, *loop.args[1:])
