"""A loop over range(n), its iterations written out one after another: experts on rows that the loop's proof cannot name
may still be found as experts that stand one after another (blocks.py).

A branch in the body that the iteration's number decides is taken or left out. What values decide stays a branch, which
is opened as any other that has an expert in it (hoisted_conditionals.py); a ``continue`` makes one of the iteration.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import CONTROL, added_body, is_size, loop_body, read_call
from moebius.lowering.values import certain, copy_node, stands_at, value_of

UNROLLED = 512  # iterations


def write_out(gm: fx.GraphModule, loop: fx.Node) -> Written | None:
    """The iterations before the loop; None where they cannot be written out (new nodes may be left then)."""
    call = certain(read_call(loop))
    count = call["source"]
    if not isinstance(count, int) or not 2 <= count <= UNROLLED:
        return None
    written = Written(gm, loop)
    try:
        for iteration in range(count):
            written.carried = written.iteration(loop_body(loop), iteration, written.carried, call["captures"])
    except Open:
        return None
    return written


class Open(Exception):
    """An iteration does something besides."""


class Undecided(Exception):
    """Values decide whether it ends early."""


class Written:
    """Iterations of a loop as nodes before it. carried: what the loop gives. branches: those that values decide."""

    def __init__(self, gm: fx.GraphModule, loop: fx.Node):
        self.gm, self.graph, self.loop = gm, loop.graph, loop
        self.nodes: list[fx.Node] = []
        self.branches: list[fx.Node] = []
        self.carried: list[Any] = list(certain(read_call(loop))["carried"])
        self.bodies: dict[fx.GraphModule, str] = {}

    def take_out(self, first: int) -> None:
        """Of the graph, what was written from a node on."""
        gone = self.nodes[first:]
        for node in reversed(gone):
            self.graph.erase_node(node)
        self.nodes, self.branches = self.nodes[:first], [node for node in self.branches if node not in gone]

    def iteration(self, body: fx.GraphModule, row: Any, carried: list[Any], captures: Any) -> list[Any]:
        """The carried values after an iteration, or after a branch. Raises Open."""
        first = len(self.nodes)
        try:
            return self.inline(body, row, carried, captures)
        except Undecided:
            self.take_out(first)
            return self.branch(body, row, carried, captures)

    def inline(self, body: fx.GraphModule, row: Any, carried: list[Any], captures: Any) -> list[Any]:
        placeholders = body.graph.find_nodes(op="placeholder")
        table: dict[fx.Node, Any] = dict(zip(placeholders, [row, *carried, *captures], strict=True))
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            call = read_call(node)
            if call is not None and call.name == "expert_loop" and call["source"] == 1:
                given, outer = (fx.map_arg(call[part], table.__getitem__) for part in ("carried", "captures"))
                table[node] = tuple(self.iteration(loop_body(node), 0, list(given), outer))
            elif call is not None and call.name == "skip_iteration":
                condition = fx.map_arg(node.args[0], table.__getitem__)
                if not isinstance(condition, bool | int):
                    raise Undecided
                if condition:
                    return carried
            elif call is not None and call.name in CONTROL - {"dropout"}:
                raise Open
            elif node.op != "get_attr":
                table[node] = self.value(node, table)
            elif not any(user.target is expert_loop for user in node.users):
                raise Open
        results: Any = body.graph.output_node().args[0]
        return [table[value] if isinstance(value, fx.Node) else value for value in results]

    def branch(self, body: fx.GraphModule, row: Any, carried: list[Any], captures: Any) -> list[Any]:
        """An iteration as a branch: its number is one of the values that it is given."""
        if body not in self.bodies:
            self.bodies[body] = added_body(self.gm, "iteration", numbered(body))
        graph, values = self.graph, tuple(map(value_of, carried))
        given = self.put(graph.get_attr(self.bodies[body]), None)
        node = self.put(graph.call_function(expert_loop, (given, 1, tuple(carried), (row, *captures))), values)
        self.branches.append(node)
        return [self.put(graph.call_function(operator.getitem, (node, i)), value) for i, value in enumerate(values)]

    def put(self, node: fx.Node, value: Any) -> fx.Node:
        """A new node, just before the loop."""
        self.loop.prepend(node)
        stands_at(node, self.loop).meta["val"] = value
        self.nodes.append(node)
        return node

    def value(self, node: fx.Node, table: dict[fx.Node, Any]) -> Any:
        """The node before the loop; or its value, where it is Python's arithmetic on the iteration's number."""
        args, kwargs = fx.map_arg(node.args, table.__getitem__), fx.map_arg(node.kwargs, table.__getitem__)
        if is_size(node) and not kwargs and all(isinstance(v, bool | int | float) for v in args):
            return node.target(*args)  # type: ignore[operator]
        if node.target is operator.getitem and isinstance(args[0], tuple) and isinstance(args[1], int):
            return args[0][args[1]]  # what a branch that was taken carries on
        with self.graph.inserting_before(self.loop):
            made = self.graph.create_node(node.op, node.target, args, kwargs)
        made.meta.update(node.meta)
        self.nodes.append(made)
        return made


def numbered(body: fx.GraphModule) -> fx.GraphModule:
    """The same body, its iteration's number behind the carried values, as the first that it captures."""
    graph, table = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.placeholder("once").meta["val"] = 0
    row, *others = body.graph.find_nodes(op="placeholder")
    results: Any = body.graph.output_node().args[0]
    order = [*others[: len(results)], row, *others[len(results) :]]
    for node in [*order, *(node for node in body.graph.nodes if node.op != "placeholder")]:
        table[node] = copy_node(graph, node, table.__getitem__)
    return fx.GraphModule(body, graph)
