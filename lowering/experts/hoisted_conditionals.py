"""Experts behind branches, taken out of them: ``if n == 0: continue`` … ``parts.append(expert(rows))``.

The branch is a node whose body computes the expert. Here its expert stands in the graph beside the others: on its rows
where the branch is taken, and on none where it is not (:func:`rows_if`), which costs and gives nothing. What else the
branch does stays a branch where it was, which is given the expert's result: it may read the sum that it adds to, as it
reads the same there. Whether the experts then become one operator is found out by blocks.py as for all experts
that stand one after another; if not, the branches are put back as they were. An expert whose branch was not taken gets
no gradient, as in eager (``Opened.asked``).

Rows that the branch itself looks up are looked up before it by a list that is empty where the branch is not taken: a
lookup of none cannot fail.

Or data decide a branch of Python's between the experts, at which the step may be left: ``if start == len(rows):
break``. It is a node that holds the step to the way that was captured (step/branches.py). Experts behind it may run
before it, on no rows if the step will be left there, if what decides is known before the first expert.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage, computes, storage_of, writes_into
from moebius.lowering.contract import Work
from moebius.lowering.experts.batched import INTEGERS
from moebius.lowering.experts.blocks import EXITS, all_are_read, expert_rows, in_front, inside, runs
from moebius.lowering.experts.provisional import Provisional
from moebius.lowering.experts.stacking import experts_that_ran, is_left, rows_if
from moebius.lowering.experts.unrolled_loops import (
    OPENED,
    Differ,
    NoExperts,
    drawn_for_nothing,
)
from moebius.lowering.experts.views import TURNED, sized_one
from moebius.lowering.graph import expert_loop
from moebius.lowering.operators import (
    ELEMENTWISE,
    NEVER_FAILING,
    Call,
    added_body,
    call_name,
    draws,
    given_to,
    is_size,
    loop_body,
    read_call,
    target_name,
)
from moebius.lowering.step.branches import require_branch
from moebius.lowering.step.checkpoint import MARKS, calls_around, calls_in, marked
from moebius.lowering.torch_private import same_size, unbacked_symbols
from moebius.lowering.values import (
    certain,
    computed_of,
    copy_node,
    dtype_of,
    erase_new,
    is_floating,
    put_before,
    rank_of,
    same_shape,
    shape_of,
    stands_at,
    tensor_of,
    value_of,
    where_of,
)

DIVIDES = frozenset({"div", "floor_divide", "remainder"})
POINTWISE = ELEMENTWISE | {"not", "logical_not", "eq", "ne", "gt", "ge", "lt", "le", "where", "masked_fill", *DIVIDES}
CALM = POINTWISE | TURNED | frozenset(
    {"getitem", "cast", "contiguous", "clone", "detach", "size", "numel", "item", "tolist", "sum", "any", "nonzero",
     "argwhere", "split", "unbind", "squeeze", "unsqueeze", "permute", "flatten", "reshape", "full"}
)  # fmt: skip


def may_fail(node: fx.Node) -> bool:
    """Whether a view, a lookup or Python's arithmetic may fail where a branch is not taken that alone vouches for sizes
    and numbers that data say. (Of lists of rows that are looked up, who asks sees to that.)"""
    call, data = read_call(node), any(map(said_by_data, node.all_input_nodes))
    if is_size(node):
        piece = node.target is operator.getitem and type(node.args[1]) is int
        return data and not (piece or node.target in NEVER_FAILING or divides_by_a_number(node))
    if call is None or call.op.inplace or call.name not in CALM or (call.name in ELEMENTWISE and is_floating(node)):
        return True
    if call.name in DIVIDES and not is_floating(call["input"]) and not (type(call["other"]) is int and call["other"]):
        return True
    return data and fails_for_some_sizes(call)


def fails_for_some_sizes(call: Call) -> bool:
    own = shape_of(call.args.get("input")) or ()
    match call.name:
        case "getitem" if own:
            keys = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            if all(type(key) in (int, slice) for key in keys):  # (each key is of one axis)
                return not all(type(key) is slice or is_there(key, size) for key, size in zip(keys, own, strict=False))
            return any(type(key) is int or (isinstance(key, fx.Node) and shape_of(key) is None) for key in keys)
        case "reshape":
            first, *rest = [size for size in call["shape"] if not sized_one(size)] or [0]
            return first != -1 or not all(rest) or not same_shape(tuple(rest), own[len(own) - len(rest) :])
        case "squeeze" if own and type(call["dim"]) is int:
            return type(own[call["dim"]]) is not int
        case "unbind":
            return not own or type(own[call["dim"]]) is not int
    if call.name in POINTWISE:
        return not fit([shape for one in call.node.all_input_nodes if (shape := shape_of(one)) is not None])
    return call.name in ("item", "split", "squeeze", "full")


def is_there(key: int, size: Any) -> bool:
    return type(size) is int and -size <= key < size


def said_by_data(node: fx.Node) -> bool:
    """Whether it is a number, or has sizes, that only the running step knows."""
    value = value_of(node)
    values = value if isinstance(value, tuple | list) else (value,)
    return any(one is None or unbacked_symbols(one) for one in values)


def divides_by_a_number(node: fx.Node) -> bool:
    divides = node.target in (operator.floordiv, operator.mod, operator.truediv)
    return divides and type(node.args[1]) in (int, float) and bool(node.args[1] != 0)


def fit(shapes: list[tuple]) -> bool:
    """Whether tensors of these sizes certainly go together, element by element."""
    for place in range(1, max(map(len, shapes), default=0) + 1):
        sizes = [shape[-place] for shape in shapes if len(shape) >= place and not sized_one(shape[-place])]
        if not all(same_size(sizes[0], size) for size in sizes[1:]):
            return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Experts behind branches at which the step may be left
# ----------------------------------------------------------------------------------------------------------------------


def cut_behind_exits(work: Work) -> tuple[list[Provisional], dict[fx.Node, Any]]:
    """Cuts the rows of all experts that stand behind such a branch and have others before it: (the rows, by down-
    projection whether the step is left before it)."""
    graph = work.gm.graph
    exits = graph.find_nodes(op="call_function", target=require_branch)
    found, asked = list[Provisional](), dict[fx.Node, Any]()
    for downs in runs(graph) if exits else ():
        between = [node for node in exits if downs[0] < node < downs[-1]]
        storage = Storage(graph) if between and not calls_around(downs[0]) else None
        if storage is None or not all(is_known(node.args[0], downs[0], storage) for node in between):
            continue
        first, later = downs[0], [down for down in downs if between[0] < down]
        if not all(is_known(rows, between[0], storage) for down in later for rows in expert_rows(down) or ()):
            continue
        for one in sorted(set().union(*(made_since(node.args[0], first) for node in between))):
            first.prepend(one)
        for down in later:
            before = [node for node in between if node < down]
            conditions = tuple(one for node in before for one in node.args[:2])
            asked[down] = put_before(first, is_left, conditions, before[0], None)
            for rows in dict.fromkeys(expert_rows(down) or ()):
                now = cut(rows, asked[down], first)
                now.meta[EXITS] = before
                for user in [user for user in rows.users if user in inside(down) or user is down]:
                    user.replace_input_with(rows, now)
                found.append(Provisional(rows, now, down))
    return found, asked


def made_since(node: Any, first: fx.Node) -> set[fx.Node]:
    """What a value is computed of from a node on."""
    if not isinstance(node, fx.Node) or node < first:
        return set()
    return computed_of([node], lambda one: [argument for argument in one.all_input_nodes if first < argument])


def is_known(node: Any, first: fx.Node, storage: Storage) -> bool:
    """Whether a value may be computed before ``first``: nothing there may fail, but for a lookup in itself, which will
    be of no rows; and nothing that it is made of is written by then."""
    made = made_since(node, first)
    for one in made:
        call = read_call(one)
        keys = one.all_input_nodes[1:] if call is not None and call.name == "getitem" else []
        lists = [key for key in keys if shape_of(key) and not is_mask_of(key, one.args[0])]
        if may_fail(one) or (lists and not (one is node and all(map(is_list, lists)))):
            return False
    read = made | {argument for one in made for argument in one.all_input_nodes}
    return not made or storage.writer_into(read, max(made)) is None


def is_list(key: fx.Node) -> bool:
    return rank_of(key) == 1 and dtype_of(key) in INTEGERS


def is_mask_of(key: fx.Node, tensor: Any) -> bool:
    """Whether it is a mask of the first axes of a tensor, which picks rows that are there."""
    axes = shape_of(key) or ()
    return dtype_of(key) is torch.bool and same_shape(axes, (shape_of(tensor) or ())[: len(axes)])


def cut(rows: fx.Node, asked: fx.Node, first: fx.Node) -> fx.Node:
    """None of the rows where the step is left: behind them, and behind what is asked before ``first``."""
    graph, keys = rows.graph, [key for key in rows.all_input_nodes[1:] if shape_of(key)]
    at = rows.next if first < rows else first
    if not keys or not all(map(is_list, keys)) or (call := read_call(rows)) is None or call.name != "getitem":
        return put_before(at, rows_if, (rows, asked), rows, rows.meta["val"])
    few = {key: put_before(at, rows_if, (key, asked), rows, key.meta["val"]) for key in keys}
    with graph.inserting_before(at):
        return graph.node_copy(rows, lambda argument: few.get(argument, argument))


# ----------------------------------------------------------------------------------------------------------------------
# Experts behind branches
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """One branch that was opened. down: its expert's last product, in the graph. asked: the condition on which it does
    not run. results: what the branch gave, where that is the expert's rows alone. made: all new nodes. rest: what
    stands for a branch that does more: two of them would write twice. modules: the new bodies."""

    branch: fx.Node
    down: fx.Node
    asked: fx.Node
    results: list[fx.Node]
    made: list[fx.Node]
    rest: fx.Node | None = None
    modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arguments, self.branch_inputs = self.branch.args, self.branch.all_input_nodes


def open_branches(work: Work, branches: list[fx.Node]) -> tuple[list[Opened], dict[fx.Node, Differ]]:
    """Opens every branch that has one expert in it. Returns also why others were not opened."""
    found, refused = list[Opened](), dict[fx.Node, Differ]()
    for node in branches:
        before = set(work.gm.graph.nodes)
        try:
            found.append(Opening(work, node).opened())
        except Differ as difference:
            if not isinstance(difference, NoExperts):
                if not where_of(difference.node)[0]:  # arithmetic on sizes
                    difference.node = node
                refused[node] = difference
            erase_new(work.gm.graph, before)
    return found, refused


def settle_branches(work: Work, opened: list[Opened], replaced: set[fx.Node]) -> None:
    """Those whose expert became part of an operator lose their branch; the others are as they were. replaced: what
    operators took the place of."""
    there = set(work.gm.graph.nodes if opened else ())
    for one in opened:
        lowered = one.down in replaced
        for result in one.results:
            if lowered:
                work.gm.graph.erase_node(result)
            else:
                one.down.replace_all_uses_with(result)
        if lowered:
            work.loose += [node for node in one.branch_inputs if node in there]
            if one.rest is None:
                work.gm.graph.erase_node(one.branch)
            continue
        one.branch.meta.pop(OPENED, None)
        if one.rest is not None:
            with work.gm.graph.inserting_before(one.rest):
                again = work.gm.graph.call_function(expert_loop, one.arguments)
            again.meta.update(one.rest.meta)
            one.rest.replace_all_uses_with(again)
        for node in reversed(one.made):
            work.gm.graph.erase_node(node)
        for name in one.modules:
            delattr(work.gm, name)


def skip_unused(downs: list[fx.Node], asked: dict[fx.Node, Any], stacked: list[fx.Node]) -> None:
    """Experts whose branch was not taken get no gradient. asked: by down-projection, the condition on which it does not
    run. stacked: the nodes that stack the experts' parameters, behind the conditions."""
    if not stacked or not any(down in asked for down in downs):
        return
    first = min(stacked)
    calls_of = calls_in(first.graph)
    for condition in filter(None, map(asked.get, downs)):
        if first < condition:  # (what it is found with is there, as the rows are)
            place = in_front(first, calls_of(first), calls_of(condition))
            (first if any(place < one for one in condition.all_input_nodes) else place).prepend(condition)
    ran = put_before(first, experts_that_ran, tuple(asked.get(down, False) for down in downs), first, None)
    for node in stacked:
        node.args = (ran, *node.args[1:])


def rows_of(down: fx.Node) -> list[fx.Node] | None:
    """The rows behind a down-projection, however many axes they have."""
    return expert_rows(down, rank_of(down))


class Opening:
    """Opens one branch. Raises NoExperts."""

    def __init__(self, work: Work, branch: fx.Node):
        call = certain(read_call(branch))
        self.work, self.branch, self.body = work, branch, loop_body(branch).graph
        self.table: dict[fx.Node, Any] = given_to(branch)
        self.made: list[fx.Node] = []
        self.modules: list[str] = []
        self.asked: Any = None  # the condition, once it is known outside
        calls = [node for node in self.body.nodes if node.op in ("call_function", "call_method")]
        downs = [node for node in calls if rows_of(node)]
        self.skips = [node for node in self.body.nodes if call_name(node) == "skip_iteration"]
        self.writes = [node for node in calls if writes_into(node)]
        self.marks = marked(self.body, MARKS)
        if len(downs) != 1 or not self.skips or not (call["carried"] or self.writes):
            raise NoExperts("the branch has no expert, or several", branch)
        self.down = downs[0]

    def opened(self) -> Opened:
        for node in self.body.nodes:
            plain = node.op in ("placeholder", "output", "get_attr") or node in (*self.skips, *self.writes, *self.marks)
            if not plain and not computes(node) and not draws(node):
                raise Differ(f"{target_name(node)} behind a branch may have effects", node)
        if self.marks and not (len(self.marks) == 2 and self.marks[0] < self.down < self.marks[1]):
            raise Differ("a checkpointed call behind a branch is not around one expert", self.marks[0])
        needed, last = computed_of([self.down, *self.skips]), max(self.down, *self.skips)
        storage, wanted = storage_of(self.body), rows_of(self.down) or []
        kept = inside(self.down, rows_of).union(wanted) - {self.down}  # (by plain autograd)
        writer = storage.writer_into(needed, last) or storage.writer_into(kept, self.body.output_node())
        if writer is not None:
            raise Differ(f"{target_name(writer)} changes what the expert is computed of, or what a branch asks", writer)
        for write in self.writes:
            if write < self.skips[-1] and self.down in computed_of([write]):
                raise Differ("an iteration may end behind what adds the expert's rows", write)
        drawn = next((node for node in self.body.nodes if draws(node) and node < self.skips[-1]), None)
        if drawn is not None:
            raise Differ("an iteration may end behind what draws random numbers", drawn)
        all_are_read(self.body, [self.down], {})
        idle = drawn_for_nothing(self.body)
        if idle is not None:
            raise Differ("an iteration draws random numbers for a value that it does not add", idle)
        before, table = len(self.made), dict(self.table)
        try:
            self.ask()
            for rows in wanted:
                self.table[rows] = self.add(self.graph.call_function(rows_if, (self.outer(rows), self.asked)), rows)
        except Differ as difference:
            for node in reversed(self.made[before:]):
                self.graph.erase_node(node)
            self.made, self.table = self.made[:before], table
            if not self.find(wanted):
                raise difference
        asked = self.asked
        for node in [node for node in self.body.nodes if node in inside(self.down, rows_of) or node in self.marks]:
            if node in self.marks:  # (what it was given and the expert does not use is kept as it is)
                self.copy(node, lambda given: self.table.get(given))
            elif node not in self.table:
                self.copy(node)
        down = self.table[self.down]
        results = [user for user in self.branch.users if user.target is operator.getitem]
        if len(results) != len(self.branch.users):
            raise Differ("the branch's results are used as a whole", self.branch)
        given: Any = self.body.output_node().args[0]
        if not self.writes and all(given[r.args[1]] is self.down for r in results):
            for result in results:
                result.replace_all_uses_with(down)
            self.branch.meta[OPENED] = True
            return Opened(self.branch, down, asked, results, self.made, None, self.modules)
        rest = self.rest(down, storage)
        made = Opened(self.branch, down, asked, [], self.made, rest, self.modules)
        self.branch.replace_all_uses_with(rest)
        self.graph.erase_node(self.branch)
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
            if may_fail(node) and (self.asked is not None or not computes(node)):
                raise Differ(f"{target_name(node)} is more than a lookup of rows, and may fail before the branch", node)
            for argument in node.all_input_nodes:
                self.outer(argument)
            keys = node.all_input_nodes[1:] if call is not None and call.name == "getitem" else []
            cut = {key: self.cut(key, node) for key in keys if shape_of(key)}
            self.copy(node, lambda argument: cut.get(argument) or self.placed(argument))
        return self.table[node]

    def cut(self, key: fx.Node, lookup: fx.Node) -> Any:
        """What ``x[key]`` is looked up by before the branch, which alone vouches for a list of rows: none of them where
        it is not taken. (A mask of the first axes picks rows that are there; what is looked up before the branch asks
        is looked up anyway.)"""
        if self.asked is None or is_mask_of(key, lookup.args[0]):
            return self.placed(key)
        if not is_list(key):
            raise Differ(f"{target_name(lookup)} makes rows that only the branch vouches for", lookup)
        return self.add(self.graph.call_function(rows_if, (self.placed(key), self.asked)), key)

    def copy(self, node: fx.Node, place: Callable[[fx.Node], Any] | None = None) -> None:
        args, kwargs = (fx.map_arg(given, place or self.placed) for given in (node.args, node.kwargs))
        target = node.target
        if node.op == "get_attr":  # the body of a loop
            target = added_body(self.work.gm, "inner", loop_body(self.branch).get_submodule(str(node.target)))  # type: ignore[arg-type]
            self.modules.append(target)
        made = self.graph.create_node(node.op, target, args, kwargs)  # type: ignore[arg-type]
        self.table[node] = self.add(made, node)
        made.meta.update(node.meta)

    def placed(self, node: fx.Node) -> Any:
        if node not in self.table:
            raise Differ(f"the expert uses {node.name}, which the branch computes", self.down)
        return self.table[node]

    def ask(self) -> None:
        """What the branch asks, before it."""
        conditions = list[fx.Node]()
        for skip in self.skips:
            self.asked = self.outer(skip.args[0])
            if not isinstance(self.asked, fx.Node):
                raise Differ("the branch is decided", self.branch)
            conditions.append(self.asked)
        if len(conditions) > 1:
            pairs = tuple(part for condition in conditions for part in (condition, False))
            self.asked = self.add(self.graph.call_function(is_left, pairs), self.skips[-1])
            self.asked.meta["val"] = None

    def find(self, wanted: list[fx.Node]) -> bool:
        """The same and the expert's rows, by a branch of their own, as finding them may fail where it is not taken.
        False where it would do anything else."""
        inputs, likes = self.body.find_nodes(op="placeholder"), list(map(tensor_of, wanted))
        needed = computed_of([*wanted, *self.skips], lambda node: node.all_input_nodes)
        known = [like for like in likes if like is not None and all(type(size) is int for size in like.shape[1:])]
        plain = all(node in self.skips or (computes(node) and not draws(node)) for node in needed - set(inputs))
        if not plain or self.down in needed or len(known) != len(wanted):
            return False
        body, table = fx.Graph(), dict[fx.Node, fx.Node]()
        for place in range(len(wanted) + 2):
            body.placeholder(f"begin_{place}").meta["val"] = None
        for node in [*(node for node in inputs if node in needed), *sorted(needed - set(inputs))]:
            table[node] = copy_node(body, node, table.__getitem__)
        body.output((*(table[rows] for rows in wanted), False))
        none = list[fx.Node]()
        for like, rows in zip(known, wanted, strict=True):
            options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
            none.append(self.add(self.graph.call_function(torch.zeros, ((0, *like.shape[1:]),), options), rows))
        given = given_to(self.branch)
        found = self.loop("rows", body, (*none, True), tuple(given[node] for node in inputs if node in needed))
        for place, rows in enumerate(wanted):
            self.table[rows] = self.add(self.graph.call_function(operator.getitem, (found, place)), rows)
        self.asked = self.add(self.graph.call_function(operator.getitem, (found, len(wanted))), self.skips[-1])
        self.asked.meta["val"] = None
        return True

    def loop(self, word: str, body: fx.Graph, carried: tuple[Any, ...], captures: tuple[Any, ...]) -> fx.Node:
        """A branch with a new body, where the branch stands."""
        self.modules.append(added_body(self.work.gm, word, fx.GraphModule(loop_body(self.branch), body)))
        get_body = self.add(self.graph.get_attr(self.modules[-1]), self.branch)
        get_body.meta["val"] = None
        return self.add(self.graph.call_function(expert_loop, (get_body, 1, carried, captures)), self.branch)

    def rest(self, down: fx.Node, storage: Storage) -> fx.Node:
        """The branch without its expert, whose result it is given: no rows where it ends early, so that what is made of
        them comes behind its last end."""
        body, table = fx.Graph(), dict[fx.Node, fx.Node]()
        ends = [self.body.output_node(), *self.skips, *self.writes]
        needed = computed_of(ends, lambda node: () if node is self.down else node.all_input_nodes)
        drawn = [node for node in needed if node is not self.down and draws(node)]
        if drawn and set(drawn) & inside(self.down, rows_of):
            raise Differ("what dropout gives is used beside the expert's result", drawn[0])
        last, ready = self.skips[-1], computed_of(self.skips)
        late = [n for n in needed - ready - {self.down} if n < last and self.down in computed_of([n])]
        writer = storage.writer_into({given for node in late for given in node.all_input_nodes}, last)
        if writer is not None:
            raise Differ(f"{target_name(writer)} changes what the expert's rows meet before an iteration ends", writer)
        for node in self.body.find_nodes(op="placeholder"):
            table[node] = copy_node(body, node, table.__getitem__)
        table[self.down] = body.placeholder("rows")
        table[self.down].meta.update(self.down.meta)
        for node in (one for one in self.body.nodes if one in needed and one not in table and one not in late):
            table[node] = copy_node(body, node, table.__getitem__)
            for one in sorted(late) if node is last else ():
                table[one] = copy_node(body, one, table.__getitem__)
        call = certain(read_call(self.branch))
        return self.loop("rest", body, tuple(call["carried"]), (*call["captures"], down))
