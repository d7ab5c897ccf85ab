"""A graph as the page draws it: each operator with its phase, its line and what it takes, as compact data."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..bytecode.expressions import users_place
from .words import place

if TYPE_CHECKING:
    from moebius.lowering.graph import CapturedGraph

PHASES = ("forward", "backward", "optimizer")
OPTIMIZER = os.path.join("torch", "optim", "")
SHOWN_INPUTS = 12  # of one operator: an optimizer's takes all parameters


def drawing(graph: CapturedGraph) -> dict[str, Any]:
    """places: of the user's lines. nodes: [operator, name, place, phase, the nodes whose results it takes]; inputs and
    what only hands on (attributes, the output) are no nodes. What a loop or branch runs hangs below it."""
    places: dict[str, int] = {}
    nodes: list[list[Any]] = []

    def add(module: Any, phase: int, below: list[int]) -> None:
        at: dict[Any, int] = {}
        for node in module.graph.nodes:
            if not node.op.startswith("call_"):
                continue
            stack = node.meta.get("stack") or ()
            found = users_place(stack) or node.meta.get("where") or ("", 0)
            phase = phase_of(operator_name(node), stack, phase)
            line = places.setdefault(place(found[0], found[1]), len(places))
            takes = [at[one] for one in node.all_input_nodes if one in at] or below
            at[node] = len(nodes)
            nodes.append([operator_name(node), node.name, line, phase, takes[:SHOWN_INPUTS]])
            for one in node.all_input_nodes:
                inner = getattr(module, one.target, None) if one.op == "get_attr" else None
                if getattr(inner, "graph", None) is not None:
                    add(inner, phase, [at[node]])

    add(graph.gm, 0, [])
    return {"places": list(places), "nodes": nodes}


def phase_of(operator: str, stack: Any, before: int) -> int:
    """Of an operator: the optimizer's is what torch.optim asks for; backward begins with a call of backward and lasts
    until the optimizer."""
    if any(OPTIMIZER in file for file, *_ in stack):
        return 2 if before else 0  # (what zero_grad does before backward belongs to the forward part)
    if operator in ("backward", "grad"):
        return 1
    return before if before == 1 else 0


def operator_name(node: Any) -> str:
    """What an operator is called."""
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target)).removeprefix("aten::")
