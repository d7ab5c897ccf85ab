"""Branches on values that say less than they are written as, written as what they say.

    if n == 0: y = out                         y = out; if n != 0: y = f(out)           (one side gives what was there)
    else:      y = f(out)
    if len(x) > k: x = x[:k]                   x = x[:k]                                (there are no more than k then)

Each holds by itself, whatever becomes of the rest. Capture writes ``if … else …`` as two branches, of which one runs:
the first one begins with None, and the second one with what the first one gave (two_sides.py). k may be computed of
sizes, in the branch: twice, as what is asked and as what cuts.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from moebius.lowering.aliasing import only_computes
from moebius.lowering.contract import Work
from moebius.lowering.dead_code import drop_dead_code
from moebius.lowering.experts.bodies import rewrite_body
from moebius.lowering.experts.unrolled_loops import is_branch
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.operators import call_operands, given_to, is_size, loop_body, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import certain, infer, put_before, shape_of, stands_at, value_of


def plainly(work: Work) -> bool:
    """Every such branch of the graph, those in the bodies of loops and branches first. Returns whether any changed."""
    before = list(work.gm.graph.nodes)
    for node in work.gm.graph.find_nodes(op="call_function", target=expert_loop):
        if loop_body(node).graph.find_nodes(op="call_function", target=expert_loop):
            rewrite_body(work, node, "plain", plainly)
    for node in list(filter(is_branch, work.gm.graph.nodes)):
        left = as_one(work, Side(node)) if node.users else None  # (one that is gone has none)
        if left is not None:
            cut_off(work, left)
    if work.loose:
        drop_dead_code(work)
    return before != list(work.gm.graph.nodes)


class Side:
    """A branch: what its results begin as, what it gives for them, and who takes these, by number."""

    def __init__(self, node: fx.Node):
        call = certain(read_call(node))
        self.node, self.body, self.begins = node, loop_body(node).graph, list(call["carried"])
        self.outer = given_to(node)
        gives: Any = self.body.output_node().args[0]
        self.gives: list[Any] = list(gives)
        self.items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        self.skips = [one for one in self.body.nodes if one.target is skip_iteration]

    @property
    def only_asks(self) -> bool:
        """Whether nothing happens in it."""
        return len(self.skips) == 1 and all(
            one.op in ("placeholder", "output") or one in self.skips or only_computes(one) or is_size(one)
            for one in self.body.nodes
        )

    def resolve(self, value: Any) -> Any:
        """What stands outside for a value of the body; None for what it computes."""
        return self.outer.get(value) if isinstance(value, fx.Node) else value

    def written(self, number: Any) -> Any:
        """How a number of the body is computed of what stands outside, the same for equal ones; else None."""
        if not isinstance(number, fx.Node):
            return (int, number) if type(number) is int else (float, number.hex()) if type(number) is float else None
        if number in self.outer:
            return self.outer[number]
        parts = tuple(map(self.written, number.args))
        return None if number.kwargs or not is_size(number) or None in parts else (number.target, *parts)

    def outside(self, number: Any, graph: fx.Graph) -> Any:
        """The same number, which ``written`` knows, computed outside."""
        if not isinstance(number, fx.Node) or number in self.outer:
            return self.resolve(number)
        parts = tuple(self.outside(part, graph) for part in number.args)
        made = graph.create_node("call_function", number.target, parts)
        made.meta["val"] = infer(made)
        return stands_at(made, number)


def as_one(work: Work, first: Side) -> Side | None:
    """The branch that is left of two, where one of them gives what was there before it; else the first one. None where
    it is the second of two."""
    if not first.begins or first.begins[0] is not None or len(first.items) != len(first.begins):
        return first if first.begins and isinstance(first.begins[0], fx.Node) else None
    seconds = {user for item in first.items.values() for user in item.users}
    second = Side(seconds.pop()) if len(seconds) == 1 and all(map(is_branch, seconds)) else None
    results = [first.items[i] for i in range(len(first.begins))]
    if second is None or second.begins != results or len(second.items) != len(second.node.users):
        return None
    if any(value in results for value in call_operands(read_call(second.node))[1 + len(results) :]):  # type: ignore[arg-type]
        return None
    for idle, stays in ((first, second), (second, first)):
        there = [idle.resolve(value) for value in idle.gives]
        if not idle.only_asks or not all(isinstance(value, fx.Node) and value < first.node for value in there):
            continue
        body, source, _, captures = stays.node.args
        stays.node.args = (body, source, tuple(there), captures)
        for number, result in stays.items.items() if stays is first else ():
            if number in second.items:
                result.meta["val"] = second.items[number].meta["val"]
                second.items[number].replace_all_uses_with(result)
        work.loose += [n for n in idle.node.all_input_nodes if n not in results]
        for gone in (*idle.items.values(), idle.node):
            work.gm.graph.erase_node(gone)
        return Side(stays.node)
    return None


def cut_off(work: Work, branch: Side) -> None:
    """``x[:k]`` of those that the branch cuts to k rows where there are more."""
    asked = branch.skips[0].args[0] if len(branch.skips) == 1 else None
    kept, most = at_most(branch, asked)
    if most is None or not branch.only_asks:
        return
    for number, result in list(branch.items.items()):
        given, was = read_call(branch.gives[number]), branch.begins[number]
        key = given["index"] if given is not None and given.name == "getitem" else None
        if not isinstance(key, slice) or key.start not in (None, 0) or key.step not in (None, 1):
            continue
        rows = (shape_of(was) or (None,))[0]
        if branch.resolve(given["input"]) is not was or branch.written(key.stop) != most:  # type: ignore[index]
            continue
        if rows is None or not same_size(value_of(kept), rows):
            continue
        with work.gm.graph.inserting_before(result):
            first_rows = (was, slice(None, branch.outside(key.stop, work.gm.graph), None))
        cut = put_before(result, operator.getitem, first_rows, branch.gives[number], result.meta["val"])
        result.replace_all_uses_with(cut)
        work.gm.graph.erase_node(result)
    if not branch.node.users:
        work.loose += branch.node.all_input_nodes
        work.gm.graph.erase_node(branch.node)


def at_most(branch: Side, asked: Any) -> tuple[Any, Any]:
    """(n, k) of a branch that is taken where n > k, or n >= k, k as it is ``written``; else (None, None)."""
    skips = True
    while (call := read_call(asked)) is not None and call.name in ("not", "logical_not"):
        asked, skips = call["input"], not skips
    if call is None or call.name not in ("gt", "ge", "lt", "le"):
        return None, None
    sides = [call["input"], call["other"]]
    kept, most = sides if (call.name in ("lt", "le")) is skips else sides[::-1]
    return branch.resolve(kept), branch.written(most)
