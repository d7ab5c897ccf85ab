"""The loop nodes of a graph, whether they can be read, and how they are written, for people."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from moebius.lowering.graph import ExpertRegion, expert_loop
from moebius.lowering.operators import PRODUCTS, behind, loop_body, read_call, target_name
from moebius.lowering.values import stands_at, where_of

OURS = "of any dtype"  # says of a sum that it is no line of the program: the operator gives the dtype that is wanted


def find_loops(gm: fx.GraphModule) -> list[fx.Node]:
    """The expert_loop nodes, in order. One of a single iteration is a branch, not a loop over experts."""
    return loops_among(gm.graph.nodes)


def loops_among(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    loops = (node for node in nodes if node.op == "call_function" and node.target is expert_loop)
    return [loop for loop in loops if loop.args[1] != 1 and multiplies(loop)]


def multiplies(loop: fx.Node) -> bool:
    """Whether an iteration has a product, or what may be one: others count tokens, or sum losses, and run no expert."""
    for node in loop_body(loop).graph.nodes:
        call = read_call(node)
        if call is None and node.op.startswith("call_"):
            return True
        if call is not None and (call.name in PRODUCTS or (call.name == "expert_loop" and multiplies(node))):
            return True
    return False


def unlowered_region(loop: fx.Node, reason: str | None) -> ExpertRegion:
    """The region of a loop that runs as a loop."""
    file, line, _ = where_of(loop)
    return ExpertRegion(file, line, idiom_of(loop), refusal=reason)


def idiom_of(loop: fx.Node) -> str:
    """How the loop is written, for people."""
    source = loop.args[1] if len(loop.args) > 1 else loop.kwargs["source"]
    if isinstance(source, int):
        return f"for expert in range({source})"
    assert isinstance(source, fx.Node)
    node = behind(source, lambda call: call.name in ("squeeze", "flatten", "reshape", "getitem", "cast"))
    name = node.name if node.op == "placeholder" else target_name(node).removeprefix("Tensor.").removeprefix("torch.")
    return f"for row in {name}(…)"


def loops_are_readable(gm: fx.GraphModule) -> str | None:
    """Every expert_loop node has a body graph with a placeholder for each operand, and known shapes."""
    for loop in find_loops(gm):
        call = read_call(loop)
        if call is None:
            return f"{loop.name} has arguments that expert_loop does not take"
        placeholders = [node for node in loop_body(loop).graph.nodes if node.op == "placeholder"]
        operands = 1 + len(call["carried"]) + len(call["captures"])
        if len(placeholders) != operands:
            return f"the body of {loop.name} has {len(placeholders)} placeholders for {operands} operands"
        if not isinstance(loop_body(loop).graph.output_node().args[0], tuple | list):
            return f"the body of {loop.name} does not return a tuple"
    return None


def add_rows(state: fx.Node, token: fx.Node, rows: fx.Node, at: fx.Node) -> None:
    """The end of a body that no line of the program adds up: the sum [S, D] with these rows, of any dtype."""
    added = stands_at(state.graph.call_function(torch.index_add, (state, 0, token, rows)), at)
    added.meta |= {"val": state.meta["val"], OURS: True}
    state.graph.output((added,))
