"""Experts behind branches, taken out of them: ``if n == 0: continue`` … ``parts.append(expert(rows))``.

The branch is a node whose body computes the expert. Here its expert stands in the graph beside the others: on its rows
where the branch is taken, and on none where it is not (:func:`rows_if`), which costs and gives nothing. What else the
branch does stays a branch where it was, which is given the expert's result: it may read the sum that it adds to, as it
reads the same there. Whether the experts then become one operator is found out by module_reuse.py as for all experts
that stand one after another; if not, the branches are put back as they were. An expert whose branch was not taken gets
no gradient, as in eager (``Opened.asked``).

Rows that the branch itself looks up are looked up before it where it is left out for no other reason than that there
are none (``if token.numel() == 0: continue``): a lookup of none cannot fail.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.contract import Work
from moebius.lowering.experts.blocks import expert_rows, inside
from moebius.lowering.experts.dense import NoExperts
from moebius.lowering.experts.stacking import experts_that_ran, rows_if
from moebius.lowering.experts.unrolled_loops import (
    OPENED,
    Differ,
    Place,
    adds_to_rows,
    drawn_for_nothing,
    draws,
    is_branch,
    place_in_branch,
)
from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import call_operands, is_pure, is_size, loop_body, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import computed_of, copy_node, same_shape, shape_of, stands_at, tensor_of, value_of, where_of

VIEWS = frozenset({"getitem", "cast", "contiguous", "size", "numel"})  # what cannot fail


@dataclass
class Opened:
    """One branch that was opened. down: its expert's last product, in the graph. asked: the condition on which it does
    not run. results: what the branch gave, each with what stands for it. made: all new nodes. rest: of a branch that
    adds in place, what stands for it already: two of them would add twice."""

    branch: fx.Node
    down: fx.Node
    asked: fx.Node
    results: list[tuple[fx.Node, fx.Node]]
    made: list[fx.Node]
    module: str | None = None
    rest: fx.Node | None = None

    def __post_init__(self) -> None:
        self.arguments, self.branch_inputs = self.branch.args, self.branch.all_input_nodes


def open_branches(work: Work) -> tuple[list[Opened], list[Differ]]:
    """Opens every branch that has one expert in it and gives rows. Returns also why others were not opened."""
    found, refused = [], []
    for node in [node for node in work.gm.graph.nodes if is_branch(node)]:
        before = set(work.gm.graph.nodes)
        try:
            found.append(Opening(work, node).opened())
        except (Differ, NoExperts) as difference:
            if not isinstance(difference, NoExperts):
                if not where_of(difference.node)[0]:  # arithmetic on sizes
                    difference.node = node
                refused.append(difference)
            for new in [new for new in reversed(work.gm.graph.nodes) if new not in before]:
                work.gm.graph.erase_node(new)
    return found, refused


def settle(work: Work, opened: list[Opened]) -> None:
    """Those whose expert became part of an operator lose their branch; the others are as they were."""
    replaced = set(work.loose)
    for one in opened:
        lowered = one.down in replaced
        for result, new in one.results:
            if not lowered:
                new.replace_all_uses_with(result)
            else:
                work.gm.graph.erase_node(result)
        if lowered:
            work.loose += one.branch_inputs
            if one.rest is None:
                work.gm.graph.erase_node(one.branch)
            continue
        one.branch.meta.pop(OPENED, None)
        if one.rest is not None:
            with work.gm.graph.inserting_before(one.rest):
                again = work.gm.graph.call_function(expert_loop, one.arguments)
            again.meta.update(one.rest.meta)
        for node in reversed(one.made):
            work.gm.graph.erase_node(node)
        if one.module is not None:
            delattr(work.gm, one.module)


def skip_unused(downs: list[fx.Node], opened: Sequence[Opened], stacked: list[fx.Node]) -> None:
    """Experts whose branch was not taken get no gradient. stacked: the nodes that stack the experts' parameters, behind
    the conditions."""
    asked = {one.down: one.asked for one in opened}
    if not stacked or not any(down in asked for down in downs):
        return
    graph, first = stacked[0].graph, min(stacked)
    with graph.inserting_before(first):
        ran = graph.call_function(experts_that_ran, tuple(asked.get(down, False) for down in downs))
    stands_at(ran, first).meta["val"] = None
    for node in stacked:
        node.args = (ran, *node.args[1:])


class Opening:
    """Opens one branch. Raises NoExperts."""

    def __init__(self, work: Work, branch: fx.Node):
        call = read_call(branch)
        assert call is not None
        self.work, self.branch, self.body = work, branch, loop_body(branch).graph
        self.table: dict[fx.Node, Any] = dict(
            zip(self.body.find_nodes(op="placeholder"), call_operands(call), strict=True)
        )
        self.made: list[fx.Node] = []
        calls = [node for node in self.body.nodes if node.op in ("call_function", "call_method")]
        downs = [node for node in calls if expert_rows(node)]
        self.skips = [node for node in self.body.nodes if is_skip(node)]
        self.place: Place | None = None if call["carried"] else place_in_branch(branch)  # it adds in place
        if len(downs) != 1 or len(self.skips) != 1 or not (call["carried"] or (self.place and not branch.users)):
            raise NoExperts("the branch has no expert, or several", branch)
        self.down = downs[0]
        inner = None if self.place is None else self.place.inner
        self.adding = [node for node in self.body.nodes if inner and (node is inner or adds_to_rows(node))]

    def opened(self) -> Opened:
        for node in self.body.nodes:
            plain = node.op in ("placeholder", "output") or node in self.skips or node in self.adding
            if not plain and not is_pure(node) and not is_size(node) and not draws(node):
                raise Differ(f"{target_name(node)} behind a branch may have effects", node)
        idle = drawn_for_nothing(self.body)
        if idle is not None:
            raise Differ("an iteration draws random numbers for a value that it does not add", idle)
        asked = self.outer(self.skips[0].args[0])
        if not isinstance(asked, fx.Node):
            raise Differ("the branch is decided", self.branch)
        for rows in expert_rows(self.down) or ():
            self.table[rows] = self.add(self.graph.call_function(rows_if, (self.outer(rows), asked)), rows)
        for node in [node for node in self.body.nodes if node in inside(self.down)]:
            if node not in self.table:
                self.copy(node)
        down = self.table[self.down]
        results = [user for user in self.branch.users if user.target is operator.getitem]
        if len(results) != len(self.branch.users):
            raise Differ("the branch's results are used as a whole", self.branch)
        given: Any = self.body.output_node().args[0]
        only = self.place is None and all(given[r.args[1]] is self.down for r in results)
        rest = None if only else self.rest(down)
        pairs = []
        for result in results:
            new = down
            if rest is not None:
                new = self.add(self.graph.call_function(operator.getitem, (rest[0], result.args[1])), result)
            pairs.append((result, new))
        for result, new in pairs:
            result.replace_all_uses_with(new)
        made = Opened(self.branch, down, asked, pairs, self.made, rest and rest[1])
        if self.place is not None and rest is not None:
            made.rest = rest[0]
            self.graph.erase_node(self.branch)
        else:
            self.branch.meta[OPENED] = True
        return made

    @property
    def graph(self) -> fx.Graph:
        return self.work.gm.graph

    def add(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A new node of the graph, before the branch."""
        self.branch.prepend(node)
        stands_at(node, like).meta["val"] = like.meta.get("val")
        self.made.append(node)
        return node

    def outer(self, node: Any) -> Any:
        """A node of the body, made of views and of Python's numbers, as one of the graph."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.table:
            call = read_call(node)
            plain = is_size(node) or (call is not None and call.name in VIEWS and not call.op.inplace)
            if call is not None and call.name == "getitem" and any(
                (value := tensor_of(argument)) is not None and value.dim() for argument in node.all_input_nodes[1:]
            ):
                # (else only the branch vouches for the index)
                plain = is_mask_of(call["index"], call["input"]) or self.is_empty_unless_taken(call["index"])
            if not plain and not (call is not None and call.name in ("logical_not", "not")):
                raise Differ(f"{target_name(node)} makes rows that only the branch vouches for", node)
            for argument in node.all_input_nodes:
                self.outer(argument)
            self.copy(node)
        return self.table[node]

    def is_empty_unless_taken(self, index: Any) -> bool:
        """Whether the branch is left out only where this index picks no rows."""
        wanted = self.table.get(index, index) if isinstance(index, fx.Node) else None
        if not isinstance(wanted, fx.Node):
            return False
        node, taken_if = self.skips[0].args[0], False
        while isinstance(node, fx.Node) and (call := self.read(node)) is not None:
            if call.name in ("logical_not", "not"):
                node, taken_if = call["input"], not taken_if
            elif call.name in ("eq", "ne") and self.is_cut(wanted, call["input"], call["other"]):
                return taken_if is (call.name == "ne")
            elif call.name in ("eq", "le", "ne", "gt") and call["other"] == 0 and type(call["other"]) is int:
                return taken_if is (call.name in ("ne", "gt")) and self.counts(call["input"], wanted)
            elif call.name in ("ge", "lt") and call["other"] == 1 and type(call["other"]) is int:
                return taken_if is (call.name == "ge") and self.counts(call["input"], wanted)
            elif call.name == "any" and call["dim"] is None:
                return taken_if and self.table.get(call["input"], call["input"]) is wanted
            else:
                return taken_if and self.counts(node, wanted)
        return False

    def read(self, node: fx.Node) -> Any:
        outer = self.table.get(node)
        return read_call(outer if isinstance(outer, fx.Node) else node)

    def is_cut(self, index: fx.Node, one: Any, other: Any) -> bool:
        """Whether an index is ``token[one:other]``, of which nothing is left where the two are equal."""
        call = read_call(index)
        key = call["index"] if call is not None and call.name == "getitem" else None
        if not isinstance(key, slice) or key.step is not None:
            return False
        ends = [0 if key.start is None else key.start, key.stop]
        found, asked = ([self.table.get(end, end) if isinstance(end, fx.Node) else end for end in pair]
                        for pair in (ends, (one, other)))  # fmt: skip
        plain = all(isinstance(end, fx.Node) or type(end) is int for end in (*found, *asked))
        return plain and (found == asked or found == asked[::-1])

    def counts(self, number: Any, index: fx.Node) -> bool:
        """Whether a number is how many rows an index has."""
        value, size = tensor_of(index), value_of(number)
        call = self.read(number) if isinstance(number, fx.Node) else None
        while call is not None and call.name == "item" and isinstance(call["input"], fx.Node):
            call = self.read(call["input"])
        if call is not None and call.name == "sum" and value is not None and value.dtype is torch.bool:
            plain = call["dim"] is None and call["dtype"] is None  # (a count in 8 bits may wrap around to zero)
            return plain and self.table.get(call["input"], call["input"]) is index
        if value is None or value.dim() != 1 or value.dtype is not torch.int64 or not isinstance(size, torch.SymInt):
            return False
        return same_size(size, value.shape[0])

    def copy(self, node: fx.Node) -> None:
        made = self.graph.create_node(
            node.op, node.target, fx.map_arg(node.args, self.placed), fx.map_arg(node.kwargs, self.placed)
        )
        self.table[node] = self.add(made, node)
        made.meta.update(node.meta)

    def placed(self, node: fx.Node) -> Any:
        if node not in self.table:
            raise Differ(f"the expert uses {node.name}, which the branch computes", self.down)
        return self.table[node]

    def rest(self, down: fx.Node) -> tuple[fx.Node, str]:
        """The branch without its expert, whose result it is given: (the node, the name of its body)."""
        body, table = fx.Graph(), dict[fx.Node, fx.Node]()
        ends = [self.body.output_node(), *self.skips, *self.adding]
        needed = computed_of(ends, lambda node: () if node is self.down else node.all_input_nodes)
        drawn = [node for node in needed if node is not self.down and draws(node)]
        if drawn and set(drawn) & inside(self.down):
            raise Differ("what dropout gives is used beside the expert's result", drawn[0])
        for node in self.body.find_nodes(op="placeholder"):
            table[node] = copy_node(body, node, table.__getitem__)
        table[self.down] = body.placeholder("rows")
        table[self.down].meta.update(self.down.meta)
        for node in self.body.nodes:
            if node in needed and node not in table:
                table[node] = copy_node(body, node, table.__getitem__)
        gm = self.work.gm
        name = next(n for n in (f"rest_{i}" for i in range(len(gm._modules) + 1)) if n not in gm._modules)
        gm.add_module(name, fx.GraphModule(torch.nn.Module(), body))
        get_body = self.add(self.graph.get_attr(name), self.branch)
        get_body.meta["val"] = None
        _, source, carried, captures = self.branch.args
        assert isinstance(captures, tuple)
        loop = self.graph.call_function(expert_loop, (get_body, source, carried, (*captures, down)))
        return self.add(loop, self.branch), name


def is_mask_of(key: Any, tensor: Any) -> bool:
    """Whether it is a mask of the first axes of a tensor: it picks rows that are there."""
    value, axes = tensor_of(key), shape_of(key) or ()
    return value is not None and value.dtype is torch.bool and same_shape(axes, (shape_of(tensor) or ())[: len(axes)])


def is_skip(node: fx.Node) -> bool:
    call = read_call(node)
    return call is not None and call.name == "skip_iteration"
