"""Regions that run once, as calls of their code: a branch on what the running step knows stands in a graph as a loop of
one iteration, and an optimizer has one for each parameter.

The lowered graph stays as it is, as with ``chains``. Equal regions have one call, so that the layers, or parameters,
that they are in are equal for ``repeats`` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from moebius.lowering.equal_nodes import same
from moebius.lowering.graph import SkipTurn, code_of, expert_loop
from moebius.lowering.operators import Call, call_operands, loop_body, read_call


class RegionCall:
    """Called with the region's carried values, then what it reads: gives the carried values after it."""

    def __init__(self, body: fx.GraphModule, carried: int):
        self.body, self.carried = body, carried
        self.run = code_of(body)
        self.__name__ = self.__qualname__ = "region"  # what fx calls it in code

    def __call__(self, *inputs: Any) -> tuple:
        try:
            return self.run(0, *inputs)
        except SkipTurn:
            return inputs[: self.carried]


def find_regions(gm: fx.GraphModule) -> dict[fx.Node, tuple[RegionCall, list[Any]]]:
    """What is called for each node that is a region of one iteration, and with what."""
    found: dict[fx.Node, tuple[RegionCall, list[Any]]] = {}
    calls: dict[Any, list[RegionCall]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=expert_loop):
        call = read_call(node)
        if call is None or not runs_once(call):
            continue
        body, carried = loop_body(node), len(call["carried"])
        signs = tuple((n.op, n.op == "placeholder" or n.target) for n in body.graph.nodes)
        known = calls.setdefault((carried, signs), [])
        made = next((other for other in known if equal_bodies(other.body, body)), None)
        if made is None:
            made = RegionCall(body, carried)
            known.append(made)
        found[node] = made, call_operands(call)[1:]
    return found


def runs_once(call: Call) -> bool:
    """Whether the loop is ``range(1)``."""
    return type(call["source"]) is int and call["source"] == 1


def equal_bodies(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Whether two graphs of equal operators do the same. One with attributes of its own is equal to itself only."""
    if a is b:
        return True
    nodes: Sequence[fx.Node] = list(a.graph.nodes)
    others: Sequence[fx.Node] = list(b.graph.nodes)
    if any(node.op in ("get_attr", "call_module") for node in nodes):
        return False
    first, second = ({node: i for i, node in enumerate(row)} for row in (nodes, others))
    pairs = [(n, m) for n, m in zip(nodes, others, strict=True) if n.op != "placeholder"]
    return all(same((n.args, n.kwargs), (m.args, m.kwargs), first, second, {}) for n, m in pairs)
