"""Experts behind branches, taken out of them: ``if n == 0: continue`` … ``parts.append(expert(rows))``.

The branch is a node whose body computes the expert. Here its expert stands in the graph beside the others: on its rows
where the branch is taken, and on none where it is not (:func:`rows_if`), which costs and gives nothing. What else the
branch does stays a branch where it was, which is given the expert's result: it may read the sum that it adds to, as it
reads the same there. Whether the experts then become one operator is found out by module_reuse.py as for all experts
that stand one after another; if not, the branches are put back as they were. An expert whose branch was not taken gets
no gradient, as in eager (``Opened.asked``).

Rows that the branch itself looks up are looked up before it by a list that is empty where the branch is not taken: a
lookup of none cannot fail.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.contract import Work
from moebius.lowering.experts.blocks import expert_rows, inside
from moebius.lowering.experts.dense import NoExperts
from moebius.lowering.experts.exits import CALM, Cut, is_list, is_mask_of
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
from moebius.lowering.values import computed_of, copy_node, shape_of, stands_at, where_of


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


def skip_unused(downs: list[fx.Node], opened: Sequence[Opened | Cut], stacked: list[fx.Node]) -> None:
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
        self.asked: Any = None  # the condition, once it is known outside
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
        self.asked = asked = self.outer(self.skips[0].args[0])
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
        """A node of the body, made of views, lookups and Python's numbers, as one of the graph."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self.table:
            call = read_call(node)
            known = call is not None and not call.op.inplace and call.name in CALM
            if not known and not is_size(node):
                raise Differ(f"{target_name(node)} is more than a lookup of rows, and may fail before the branch", node)
            for argument in node.all_input_nodes:
                self.outer(argument)
            keys = node.all_input_nodes[1:] if call is not None and call.name == "getitem" else []
            cut = {key: self.cut(key, node) for key in keys if shape_of(key)}
            self.copy(node, lambda argument: cut.get(argument) or self.placed(argument))
        return self.table[node]

    def cut(self, key: fx.Node, lookup: fx.Node) -> Any:
        """What ``x[key]`` is looked up by before the branch, which alone vouches for a list of rows: none of them where
        it is not taken. (A mask of the first axes picks rows that are there.)"""
        if is_mask_of(key, lookup.args[0]):
            return self.placed(key)
        if not is_list(key) or self.asked is None:
            raise Differ(f"{target_name(lookup)} makes rows that only the branch vouches for", lookup)
        return self.add(self.graph.call_function(rows_if, (self.placed(key), self.asked)), key)

    def copy(self, node: fx.Node, place: Callable[[fx.Node], Any] | None = None) -> None:
        args, kwargs = (fx.map_arg(given, place or self.placed) for given in (node.args, node.kwargs))
        made = self.graph.create_node(node.op, node.target, args, kwargs)  # type: ignore[arg-type]
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


def is_skip(node: fx.Node) -> bool:
    call = read_call(node)
    return call is not None and call.name == "skip_iteration"
