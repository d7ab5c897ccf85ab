"""The passes, in order, each held to its Contract."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx

from moebius.lowering import dead_code, placement
from moebius.lowering.contract import Contract, Work
from moebius.lowering.errors import LoweringError
from moebius.lowering.experts import joining, rewrite
from moebius.lowering.graph import CapturedGraph, LoweringOptions
from moebius.lowering.memo import remembering
from moebius.lowering.step import checkpoint, observed
from moebius.lowering.values import copy_node

PASSES: tuple[Contract, ...] = (
    rewrite.CONTRACT,
    dead_code.CONTRACT,
    placement.CONTRACT,
    joining.CONTRACT,
    checkpoint.CONTRACT,
)

HOOKED = "a gradient hook or retain_grad() looks at a value that the loop's turns compute or use"


def run_passes(captured: CapturedGraph, options: LoweringOptions, passes: tuple[Contract, ...] = PASSES) -> Work:
    """A copy of the captured graph, after all passes, without code yet. The captured graph stays as it is.

    A gradient that somebody looks at halfway must go the way that it goes in the captured graph.
    """
    seen = observed(captured.gm)
    for why in (None, HOOKED):
        work = Work(copy_graph(captured.gm), captured, options, keep_loops=why)
        with remembering():
            for contract in passes:
                contract.apply(work)
        if all(users == observed(work.gm).get(name) for name, users in seen.items()):
            break
    else:
        raise LoweringError("a pass took the users of a value whose gradient is looked at")
    return work


class Draft(fx.GraphModule):
    """A graph that passes work on: its Python code is made when somebody wants it, and not for each change."""

    drafting = True

    def recompile(self) -> Any:
        return None if self.drafting else super().recompile()

    @property
    def code(self) -> str:
        """The source of its ``forward``."""
        finish(self)
        return fx.GraphModule.code.fget(self)  # type: ignore[attr-defined]

    def forward(self, *args: Any) -> Any:
        """Until there is code: somebody runs the draft as it is."""
        finish(self)
        return self(*args)


def finish(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph stays as it is: make its code, if it has none yet."""
    if isinstance(gm, Draft) and gm.drafting:
        gm.drafting = False
        gm.recompile()
    return gm


def copy_graph(gm: fx.GraphModule) -> Draft:
    """The same graph in new nodes, for passes to work on; values in ``meta`` and submodules are shared."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copied[node] = copy_node(graph, node, copied.__getitem__)
    made = Draft(gm, graph, class_name=type(gm).__name__)
    made.meta = copy.copy(gm.meta)
    return made
