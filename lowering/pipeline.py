"""The passes, in order, each held to its Contract."""

from __future__ import annotations

import copy

from torch import fx

from moebius.lowering import dead_code, placement
from moebius.lowering.contract import Contract, Work
from moebius.lowering.experts import rewrite
from moebius.lowering.graph import CapturedGraph, LoweringOptions
from moebius.lowering.step import checkpoint

PASSES: tuple[Contract, ...] = (rewrite.CONTRACT, dead_code.CONTRACT, placement.CONTRACT, checkpoint.CONTRACT)


def run_passes(captured: CapturedGraph, options: LoweringOptions, passes: tuple[Contract, ...] = PASSES) -> Work:
    """A copy of the captured graph, after all passes. The captured graph stays as it is."""
    work = Work(copy_graph(captured.gm), captured, options)
    for contract in passes:
        contract.apply(work)
    work.gm.recompile()
    return work


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph in new nodes; values in ``meta`` and submodules are shared."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        # (arguments are set afterwards: those given to create_node are searched for symbols, each time)
        new = copied[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        new.args = fx.map_arg(node.args, copied.__getitem__)
        new.kwargs = fx.map_arg(node.kwargs, copied.__getitem__)
        new.meta = copy.copy(node.meta)
    made = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    made.meta = copy.copy(gm.meta)
    return made
