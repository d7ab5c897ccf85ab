"""One expert after another, each on rows of its own: ``expert_0(rows_0)``, ``expert_1(rows_1)``, …

Whatever the rows are (slices of sorted tokens, the best tokens of each expert, those up to a capacity) and whatever
becomes of the results (``torch.cat``, ``y[mask] = …``, ``index_add``): if the E computations are the same function of
rows and of expert e's weights, row by row, they are one experts operator on the blocks of rows put together. It is
proven as every expert loop is (proof.py): as the loop of ``out.index_add(0, rows of e, expert_e(x[rows of e]))`` over
the joined rows x and the expert of each row. What is proven here is only that all rows may be computed before the
first expert runs. What stands around the experts stays as it was written.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage, computes, only_computes, part_of_loop, writes_into
from moebius.lowering.experts.layout import WithoutGrad
from moebius.lowering.experts.loops import add_rows
from moebius.lowering.experts.routed import looked_up_rows
from moebius.lowering.experts.rules_computed import NORMS
from moebius.lowering.experts.stacking import block_experts, blocks_apart, join_blocks
from moebius.lowering.experts.unrolled_loops import (
    Builder,
    Differ,
    NoExperts,
    Place,
    Unrolled,
    loop_of,
)
from moebius.lowering.experts.views import sized_one
from moebius.lowering.graph import expert_loop, skip_iteration
from moebius.lowering.operators import (
    ELEMENTWISE,
    PRODUCTS,
    Call,
    call_name,
    given_to,
    is_size,
    loop_body,
    operator_name,
    read_call,
    target_name,
)
from moebius.lowering.step import is_backward
from moebius.lowering.step.branches import require_branch
from moebius.lowering.step.checkpoint import calls_in
from moebius.lowering.torch_private import same_size, sizes_key
from moebius.lowering.values import (
    add_call,
    certain,
    computed_of,
    dtype_of,
    is_floating,
    put_before,
    rank_of,
    reaches,
    shape_of,
    tensor_of,
    value_of,
)

INSIDE = ELEMENTWISE | {"getitem", "chunk", "split", "reshape", "cast", "contiguous", "narrow", "dropout", "unbind"}
VIEWS = frozenset({"cast", "contiguous", "clone", "reshape", "squeeze", "unsqueeze", "flatten", "select"})
LOOKUPS = frozenset({"rows_if", "getitem", "index_select", "gather", "narrow", "split", "unbind", "chunk"})
MOST = 4096  # blocks looked at together
EXITS = "none if the step is left at"  # in the meta of rows
RowsOf = Callable[[fx.Node], "list[fx.Node] | None"]  # the rows behind what an expert gives


# ----------------------------------------------------------------------------------------------------------------------
# Which nodes may be such experts
# ----------------------------------------------------------------------------------------------------------------------


def expert_rows(
    down: fx.Node, rank: int = 2, ups: set[fx.Node] | None = None, columns: list[fx.Node] | None = None
) -> list[fx.Node] | None:
    """The rows [S, D] that the projections behind a down-projection read, each its own node; None for other products.

    Between the two lie elementwise operators and views only, and numbers of the rows that were known before, [S, 1].
    rank: of the rows, where they have more axes. ups: gets the projections; columns: those numbers."""
    call = read_call(down)
    if call is None or call.name not in PRODUCTS or not isinstance(call["input"], fx.Node) or call.op.inplace:
        return None
    rows: list[fx.Node] = []
    products: list[fx.Node] = []
    beside: list[fx.Node] = []

    def onwards(node: fx.Node) -> list[fx.Node]:
        made = read_call(node)
        if len(shape_of(node) or (0, 0)) < 2:
            return []  # a vector of the features: ``+ b[e]``
        if may_be_of_rows(node):
            beside.append(node)
            return []
        if made is None or (made.op.inplace and made.name not in ELEMENTWISE):
            raise NoRows
        if made.name in INSIDE:
            return node.all_input_nodes
        if made.name not in PRODUCTS or rank_of(made["input"]) != rank:
            raise NoRows
        rows.append(made["input"])
        products.append(node)
        return []

    found = found_rows(rows, call["input"], onwards)
    if found is not None and beside:
        length = certain(shape_of(found[0]))[0]
        if not all(same_size(certain(shape_of(node))[0], length) for node in beside):
            return None
        if reaches(set(beside), set(products), min(products)):
            return None  # a number that the expert has computed
    if found is not None and ups is not None:
        ups.update(products)
    if columns is not None:
        columns += beside
    return found


def may_be_of_rows(node: fx.Node) -> bool:
    """Whether it may be a number of each row, looked up before: a view of a piece of a longer column. (One number for
    all rows is the expert's own.)"""
    shape, call = shape_of(node), read_call(node)
    if shape is None or len(shape) != 2 or not sized_one(shape[1]) or sized_one(shape[0]):
        return False
    return call is not None and call.name in VIEWS | LOOKUPS


class NoRows(Exception):
    """Something else than rows is behind what an expert gives."""


def found_rows(
    rows: list[fx.Node], end: fx.Node, onwards: Callable[[fx.Node], list[fx.Node]]
) -> list[fx.Node] | None:
    """The rows that ``onwards`` has come upon, going back from a node; None where it gave up, or there are none."""
    try:
        computed_of([end], onwards)
    except NoRows:
        return None
    return rows or None


def source_of(rows: fx.Node, in_branch: bool = False) -> fx.Node | None:
    """The tensor that rows were looked up in, before any view of it. in_branch: they are what a branch gives, which may
    have done something to each row since."""
    node, chosen = rows, in_branch
    while (call := read_call(node)) is not None and not call.op.inplace and isinstance(call.args.get("input"), fx.Node):
        if call.name == "mul" or (in_branch and call.name in NORMS | ELEMENTWISE):  # by a weight of each row
            parts = node.all_input_nodes
            wide = [n for n in parts if rank_of(n) > int(in_branch) and certain(shape_of(n))[-1] != 1]
            if len(wide) != 1 or not (in_branch or len(parts) == 2):
                return node if chosen and node is not rows else None
            node = wide[0]
            continue
        if call.name not in VIEWS | LOOKUPS:
            break
        if call.name == "getitem" and part_of_loop(call) is not None:
            outer = source_in_branch(*certain(part_of_loop(call)))
            if outer is None:
                break
            node, chosen = outer, True
            continue
        chosen = chosen or any(rank_of(key) > 0 for key in node.all_input_nodes if key is not call["input"])
        node = call["input"]
    return node if node is not rows else None


def source_in_branch(branch: Call, part: int) -> fx.Node | None:
    """The same of rows that a branch looks up: what it was given for it."""
    results: Any = loop_body(branch.node).graph.output_node().args[0]
    inner = source_of(results[part], in_branch=True) if isinstance(results[part], fx.Node) else None
    outer = None if inner is None else given_to(branch.node).get(inner)
    return outer if isinstance(outer, fx.Node) else None


def products_by_line(graph: fx.Graph, rank: int = 0) -> list[list[fx.Node]]:
    """Products that are of one line, two or more. rank: of what each gives, at least."""
    lines = defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if (call := read_call(node)) is not None and call.name in PRODUCTS and rank_of(node) >= rank:
            lines[node.meta.get("where"), node.target].append(node)
    return [nodes for nodes in lines.values() if len(nodes) > 1]


def runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """Down-projections of one line that need nothing of one another, two or more, on rows of one tensor."""
    found, several = [], products_by_line(graph)
    wanted = reaching_gradients(graph) if several else ()  # (an expert that nobody reads gets no gradient)
    for nodes in several:
        nodes = [node for node in nodes if node in wanted] or nodes
        ups: set[fx.Node] = set()  # (of one line too, where a module runs its layers in a loop)
        every = {node: rows for node in nodes if len(nodes) > 1 and (rows := expert_rows(node, ups=ups))}
        ups &= every.keys()
        downs = {
            node: rows for node, rows in every.items() if node not in ups and (not ups or is_routed(node, rows))
        }
        if len(downs) > 1:
            found += independent(graph, downs)
    return found


def is_routed(down: fx.Node, rows: list[fx.Node]) -> bool:
    """Whether data say which rows an expert has, or its results are joined with others'."""
    joined = any(operator_name(user.target) in ("cat", "stack") for user in down.users)
    found = [call for one in rows if (call := read_call(one)) is not None and call.name == "getitem"]
    return joined or any(map(part_of_loop, found)) or any(looked_up_rows(one, down) for one in rows)


def reaching_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that gradients may come back to: what leads to a result, a backward or an effect, past no detach() and
    while gradients are recorded."""
    unrecorded = without_history(graph)
    ends = [node for node in graph.nodes if node not in unrecorded and not only_computes(node)]
    return computed_of(ends, lambda node: [one for one in node.all_input_nodes if one not in unrecorded])


def without_history(graph: fx.Graph) -> set[fx.Node]:
    """What is detached, or computed while no gradients are recorded."""
    quiet = WithoutGrad(graph)
    return {node for node in graph.nodes if operator_name(node.target) == "detach" or node in quiet}


def certain_of_gradients(graph: fx.Graph, asked: Mapping[fx.Node, Any] = MappingProxyType({})) -> set[fx.Node]:
    """Those of them that gradients come back to whatever branches are taken. asked: experts that get none where the
    branch that reads them is left."""
    unrecorded = without_history(graph)
    branches = list(map(Side, graph.find_nodes(op="call_function", target=expert_loop)))
    reads = dict[fx.Node, set[Any]]()
    for side in branches:
        reads[side.node] = {side.outer[one] for one in certain_of_gradients(side.body) & side.outer.keys()}
    questions = {side.node: side.written(side.skips[0].args[0]) for side in branches if len(side.skips) == 1}
    by_question = {question: reads[node] for node, question in questions.items() if question is not None}

    def is_other_side(passed: Any, loop: fx.Node) -> bool:
        """Whether what goes past a branch is there where that is not taken: ``if …: y = … else: y = …``."""
        one = asked.get(passed, passed)
        made: Any = one.args[0] if isinstance(one, fx.Node) and one.target is operator.getitem else None
        found = questions[made] if made in questions else written(one)
        return found is not None and found == opposite(questions.get(loop))

    def onwards(node: fx.Node) -> list[fx.Node]:
        read = node.all_input_nodes
        if node in reads:
            other = by_question.get(opposite(questions.get(node)), set())  # the side that runs where this one does not
            skips = any(one.target is skip_iteration for one in loop_body(node).graph.nodes)
            certainly = reads[node] & (other.union(asked) if skips else reads[node])
            read = [one for one in read if one in certainly]
        elif node.target is operator.getitem and read[0] in reads:
            loop, place = node.args
            assert isinstance(loop, fx.Node)
            passed = certain(read_call(loop))["carried"][place]  # what it is where the branch is not taken
            read = [loop, passed] if passed in reads[loop] or is_other_side(passed, loop) else [loop]
        return [one for one in read if one not in unrecorded and not is_number(one)]

    # (a tuple holds the results of a loop that is being written out)
    leaves = (node for node in graph.nodes if node.op == "output" or node.target is tuple)
    ends = [*leaves, *(node for node in graph.nodes if is_backward(node) or writes_into(node))]
    return computed_of([node for node in ends if node not in unrecorded and not is_number(node)], onwards)


class Side:
    """A branch on values: its body, what stands outside for what that is given, and where it is left. (Capture writes
    ``if … else …`` as two of them, of which one runs.)"""

    def __init__(self, node: fx.Node):
        self.node, self.body, self.outer = node, loop_body(node).graph, given_to(node)
        self.skips = [one for one in self.body.nodes if one.target is skip_iteration]

    def written(self, number: Any) -> Any:
        """How a number of the body is computed of what stands outside, the same for equal ones; else None."""
        if not isinstance(number, fx.Node):
            return (int, number) if type(number) is int else (float, number.hex()) if type(number) is float else None
        if number in self.outer:
            return self.outer[number]
        parts = tuple(map(self.written, number.args))
        return None if number.kwargs or not is_size(number) or None in parts else (number.target, *parts)


def written(node: Any) -> Any:
    """The same (``Side.written``) of what stands outside."""
    if not isinstance(node, fx.Node) or node.kwargs or not is_size(node):
        return None
    return (node.target, *((type(part), part) if type(part) is int else part for part in node.args))


OPPOSITE: dict[Any, Any] = {operator.gt: operator.le, operator.lt: operator.ge, operator.eq: operator.ne}
OPPOSITE |= {other: one for one, other in OPPOSITE.items()}


def opposite(question: Any) -> Any:
    """What is asked (``Side.written``) where the answer is the other one."""
    asked, *operands = question if isinstance(question, tuple) else (None,)
    if asked is operator.not_:
        return operands[0]
    return (OPPOSITE[asked], *operands) if asked in OPPOSITE else (operator.not_, question)


def all_are_read(graph: fx.Graph, downs: list[fx.Node], asked: Mapping[fx.Node, Any]) -> None:
    """Raises Differ where a branch that is not opened decides whether an expert gets a gradient."""
    branches = graph.find_nodes(op="call_function", target=expert_loop)
    unsure = set(downs) - certain_of_gradients(graph, asked) if branches else set[fx.Node]()
    if unsure and (unsure := unsure & reaching_gradients(graph)):
        raise Differ("a branch on values decides whether what it gives is read, and it gets a gradient", min(unsure))


def is_number(node: fx.Node) -> bool:
    """Whether it has no gradient whatever it is computed of."""
    told = is_size(node) or call_name(node) in ("item", "tolist")
    return told or (tensor_of(node) is not None and not is_floating(node))


def independent(graph: fx.Graph, downs: dict[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
    """Stretches of the projections whose rows, and numbers of rows, are not made of what another one gave."""
    found: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    source: fx.Node | None = None
    tainted: set[fx.Node] = set()
    for node in graph.nodes:
        if node in downs:
            own = source_of(downs[node][0])
            beside: list[fx.Node] = []
            expert_rows(node, columns=beside)
            if not tainted.isdisjoint((*downs[node], *beside)) or own is None or own is not source:
                found.append(run)
                run, tainted, source = [], set(), own
            run.append(node)
            tainted.add(node)
        elif tainted and any(argument in tainted for argument in node.all_input_nodes):
            tainted.add(node)
    found.append(run)
    return [stretch for stretch in found if 2 <= len(stretch) <= MOST]


def in_front(first: fx.Node, calls: list[fx.Node], own: list[fx.Node]) -> fx.Node:
    """Where a node may stand, before the first expert: what no checkpointed call is around stays out of that expert's,
    which backward runs again when what the node is made of may be another. calls, own: those around both."""
    return next((call for call in calls if call not in own), first) if set(own) <= set(calls) else first


# ----------------------------------------------------------------------------------------------------------------------
# As one loop
# ----------------------------------------------------------------------------------------------------------------------


class Blocks(Builder):
    """Builds the body of the loop over the joined rows, out of the graphs between the rows and ``downs``."""

    def __init__(self, gm: fx.GraphModule, downs: list[fx.Node], storage: Storage, rows_of: RowsOf):
        self.downs, self.rows_of = downs, rows_of
        self.rows = [self.one(node) for node in downs]
        self.columns = columns_of(downs) if rows_of is expert_rows else []
        self.fault: Differ | None = None  # raised once it is known that these are experts
        try:
            self.hoist(gm.graph, storage)
        except Differ as difference:
            self.fault = difference
        x, index, zeros = self.join(downs[0])
        joined = [self.joined_column(column, downs[0]) for column in self.columns]
        for node in (x, index, zeros, *joined):
            storage.add(node)
        super().__init__(gm, [Place(node, node, zeros) for node in downs], storage)
        self.x, self.index, self.joined = x, index, joined
        self.own: tuple[set[fx.Node], ...] = tuple(set(rows_of(node) or ()) for node in downs)
        self.inputs: fx.Node | None = None
        self.token: fx.Node | None = None

    def one(self, down: fx.Node) -> fx.Node:
        """The rows; where they are looked up twice (for gate and up), the first of the two."""
        rows = certain(self.rows_of(down))
        first = min(rows)
        if not all(same_lookup(first, other) for other in rows):
            raise NoExperts("the projections read different rows", down)
        return first

    def hoist(self, graph: fx.Graph, storage: Storage) -> None:
        """Moves what all rows are made of before the first expert. Raises Differ where that would read other values."""
        first, last = self.downs[0], self.downs[-1]

        def onwards(node: fx.Node) -> list[fx.Node]:
            if not computes(node):
                raise Differ(f"{target_name(node)} makes rows of a later expert, and may have effects", node)
            return [one for one in node.all_input_nodes if first < one]

        looked_up = [*self.rows, *(node for column in self.columns for node in column)]
        wanted = computed_of([node for node in looked_up if first < node], onwards)
        self.check_written(wanted, storage)
        for node in graph.nodes:
            if first < node < last and call_name(node) == "set_grad_enabled":
                raise Differ("gradients are switched between the experts", node)
            if node.target is require_branch and first < node < last and not self.is_passed(node):
                raise Differ("the step may be left between the experts, at a branch on data", node)
        calls_of = calls_in(graph)
        for node in [node for node in graph.nodes if node in wanted]:
            place = in_front(first, calls_of(first), calls_of(node))
            if any(place < argument for argument in node.all_input_nodes):
                raise Differ("what a later expert is given is made in the first one's checkpointed call", node)
            place.prepend(node)

    def is_passed(self, exit: fx.Node) -> bool:
        """Whether all experts behind it have no rows where the step is left there (hoisted_conditionals.py)."""
        experts = zip(self.downs, self.rows, strict=True)
        return all(exit in rows.meta.get(EXITS, ()) for down, rows in experts if exit < down)

    def check_written(self, wanted: set[fx.Node], storage: Storage) -> None:
        """Whatever stands between the experts may read what it likes, the sum that iterations add to as well: it stays
        where it is. But nothing there writes what the rows are made of, or what an expert computes with them."""
        first, last = self.downs[0], self.downs[-1]
        computed = {node for down in self.downs for node in inside(down, self.rows_of)}
        own = wanted | set(self.rows) | {node for column in self.columns for node in column}
        read = [(reader, node) for reader in own | computed for node in reader.all_input_nodes]
        read += [(last, node) for node in own]
        for writer, targets in storage.writers.items():
            if first < writer < last and writer not in computed:
                later = ((one, node) for one, node in read if writer < one and not are_apart(writer, one))
                if any(storage.share(target, node) for _, node in later for target in targets):
                    raise Differ(f"{target_name(writer)} changes what a later expert reads", writer)
                if not all(map(storage.is_known, targets)):
                    raise Differ("a tensor from outside is written, and may be read by another name", writer)
        for writer, targets in storage.writers.items():
            if writer not in computed and any(storage.share(target, down) for target in targets for down in self.downs):
                raise Differ("an expert's result is changed in place", writer)

    def join(self, first: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        values = [tensor_of(node) for node in self.rows]
        shapes = [value.shape for value in values if value is not None]
        kinds = {(sizes_key(value.shape[1:]), value.dtype, value.device) for value in values if value is not None}
        if len(shapes) != len(values) or len(kinds) != 1:
            raise NoExperts("the rows differ in width or dtype", first)
        example = certain(values[0])
        total = sum(shape[0] for shape in shapes)
        whole = whole_split(self.rows)

        def made(target: Any, args: tuple, value: Any) -> fx.Node:
            return put_before(first, target, args, first, value)

        if whole is not None and rank_of(whole) == 2:
            x, total = whole, (shape_of(whole) or (total,))[0]
        elif whole is not None:
            joined = like(example, (total, *example.shape[1:]), example.dtype)
            x = made(torch.reshape, (whole, (-1, example.shape[1])), joined)
        else:
            x = made(join_blocks, tuple(self.rows), like(example, (total, *example.shape[1:]), example.dtype))
        index = made(block_experts, tuple(self.rows), like(example, (total,), torch.int64))
        width = (shape_of(first) or (0, 0))[-1]
        of_zeros = like(example, (total, width), example.dtype)
        if same_size(width, example.shape[-1]):
            return x, index, made(torch.zeros_like, (x,), of_zeros)
        length = total if isinstance(total, int) else made("size", (x, 0), total)
        return x, index, made("new_zeros", (x, (length, width)), of_zeros)

    def joined_column(self, column: tuple[fx.Node, ...], first: fx.Node) -> fx.Node:
        """Numbers of the rows of all experts, one under another."""
        example, total = certain(tensor_of(column[0])), sum(certain(shape_of(rows))[0] for rows in self.rows)
        return put_before(first, join_blocks, column, first, like(example, (total, 1), example.dtype))

    def build(self) -> fx.GraphModule:
        index = self.capture(self.index)
        chosen = add_call(self.body, self.first, torch.eq, index, self.row)
        places = add_call(self.body, self.first, torch.where, chosen)
        self.token = add_call(self.body, self.first, operator.getitem, places, 0)
        self.inputs = add_call(self.body, self.first, operator.getitem, self.capture(self.x), self.token)
        self.inputs.meta["val"] = self.rows[0].meta["val"]
        try:
            result = self.node(tuple(self.downs), sum_too=True)
        except Differ as difference:
            raise NoExperts(difference.reason, difference.node) from None
        if not self.uses_row:
            raise NoExperts("nothing says which expert it is", self.first)
        add_rows(self.state, self.token, result, self.first)
        if self.fault is not None:
            raise self.fault
        self.check_draws(set(self.downs))
        return fx.GraphModule(torch.nn.Module(), self.body)

    def make(self, nodes: tuple[fx.Node, ...], sum_too: bool) -> Any:
        if all(node in own for node, own in zip(nodes, self.own, strict=True)):
            return self.inputs
        if nodes in self.columns:
            column = self.joined[self.columns.index(nodes)]
            found = add_call(self.body, self.first, operator.getitem, self.capture(column), self.token)
            found.meta["val"] = nodes[0].meta["val"]
            return found
        return super().make(nodes, sum_too)


def columns_of(downs: list[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The numbers of rows between the projections: of each kind that of each expert. Raises NoExperts."""
    found: list[list[fx.Node]] = [[] for _ in downs]
    for down, columns in zip(downs, found, strict=True):
        expert_rows(down, columns=columns)
    if len({len(columns) for columns in found}) != 1:
        raise NoExperts("the rows of some experts have numbers that those of others have not", downs[0])
    return list(zip(*found, strict=True))


def are_apart(write: fx.Node, read: fx.Node) -> bool:
    """Whether ``x[0, token] = …`` writes other places of a tensor than ``x[1, token]`` reads."""
    pair = (write, read)
    if [node.target for node in pair] != [operator.setitem, operator.getitem] or write.args[0] is not read.args[0]:
        return False
    keys = [node.args[1] for node in pair]
    a, b = (key[0] if isinstance(key, tuple) and key else key for key in keys)
    size = (shape_of(write.args[0]) or (None,))[0]
    return type(a) is type(b) is type(size) is int and a % size != b % size


def like(example: torch.Tensor, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        return example.new_empty(shape, dtype=dtype)


def inside(down: fx.Node, rows_of: RowsOf = expert_rows) -> set[fx.Node]:
    """The nodes from the rows (not these) to the down-projection, weights' views included as far as they are views."""
    rows = set(rows_of(down) or ())

    def onwards(node: fx.Node) -> list[fx.Node]:
        return [one for one in node.all_input_nodes if one.op != "placeholder" and one not in rows]

    found = computed_of([down], onwards)
    if len(found) > 200:
        raise NoExperts("too much is between the rows and the product", down)
    return found


def same_lookup(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are the same operator on the same arguments, or the same piece of such splits."""
    if a is b:
        return True
    if a.op != b.op or a.target != b.target or a.kwargs != b.kwargs:
        return False
    if a.target is operator.getitem and a.args[1:] == b.args[1:]:
        calls = [read_call(node.args[0]) for node in (a, b)]
        if all(call is not None and call.name in ("split", "chunk", "unbind") for call in calls):
            return same_lookup(a.args[0], b.args[0])  # type: ignore[arg-type]
    return a.args == b.args


def whole_split(rows: list[fx.Node]) -> fx.Node | None:
    """The tensor whose pieces along its first axis, all of them and in order, the rows are, each as a matrix or as it
    is: ``x.split(sizes)``, ``for rows in x``."""
    pieces = [piece_of(node) for node in rows]
    calls = [read_call(node) for node in pieces]
    if any(call is None or call.name != "getitem" or call["index"] != i for i, call in enumerate(calls)):
        return None
    inputs = {call["input"] for call in calls if call is not None}
    made = read_call(inputs.pop()) if len(inputs) == 1 else None
    if made is None or made.name not in ("split", "chunk", "unbind") or made["dim"] != 0:
        return None
    every, whole = value_of(made.node), made["input"]  # (the sizes may be one number)
    there = isinstance(every, tuple | list) and len(every) == len(rows) and isinstance(whole, fx.Node)
    return whole if there else None


def piece_of(rows: fx.Node) -> fx.Node:
    """What rows are a matrix of, if they are viewed so."""
    call = read_call(rows)
    source = call["input"] if call is not None and call.name == "reshape" else None
    same = isinstance(source, fx.Node) and same_size((shape_of(source) or (0,))[-1], (shape_of(rows) or (1,))[-1])
    return source if isinstance(source, fx.Node) and same else rows


def build_blocks(
    gm: fx.GraphModule, downs: list[fx.Node], storage: Storage, rows_of: RowsOf = expert_rows
) -> tuple[Unrolled, list[fx.Node]]:
    """(the loop, the blocks of its result) before the first projection. Raises Differ, NoExperts."""
    builder = Blocks(gm, downs, storage, rows_of)
    iterations, first = loop_of(gm, builder, builder.build()), downs[0]
    total, own = certain(iterations.total), dtype_of(first)
    if own is not None and dtype_of(total) not in (None, own):
        with gm.graph.inserting_before(first):
            total = add_call(gm.graph, first, "to", total, own)
    apart = put_before(first, blocks_apart, (total, *builder.rows), first, tuple(map(value_of, downs)))
    return iterations, [put_before(first, operator.getitem, (apart, i), d, value_of(d)) for i, d in enumerate(downs)]
