"""Graphs that passes work on."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx

from moebius.lowering.values import copy_node


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
