"""Experts that no front end of the proof recognised: they stay as they were written, and the report names their line.

Whatever the spelling, E computations are a layer of experts if they are the same function of the same tokens, each with
parameters of its own in its products, and if the data say how much of each a token gets. So it looks where results
meet (a sum, a list made one tensor, rows written into one tensor, a choice by a condition) and walks back from two of
them at once (:class:`Pair`). Nodes that both share end the walk; parameters may differ; what else differs must be the
routing: something that scales rows, masks them, says which rows or decides between them, and that is made of data. Or
the results differ by nothing else, and it is the tensor that they meet in that is weighted or looked up along the
experts (routed.py).

Layers one after another, the heads of an attention, several classifiers or an ensemble are not that: they depend on one
another, or nothing routes, or what they differ in is no row's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.kernels import experts
from moebius.lowering.experts.idle import sum_of
from moebius.lowering.experts.routed import PIECES, SUMS_OF_ROWS, batched_products, is_routed_along, looked_up_rows
from moebius.lowering.experts.unrolled_loops import PLACES, added_rows, chased, is_branch
from moebius.lowering.operators import (
    ELEMENTWISE,
    PRODUCTS,
    Call,
    call_name,
    draws,
    given_to,
    loop_body,
    operator_name,
    read_call,
    target_name,
)
from moebius.lowering.torch_private import same_size, unbacked_symbols
from moebius.lowering.values import certain, computed_of, reaches, same_shape, shape_of, tensor_of

CONVOLUTIONS = frozenset({torch.conv1d, torch.conv2d, torch.conv3d})
OTHER_PRODUCTS = CONVOLUTIONS | {torch.bmm, torch.baddbmm, torch.einsum, torch.nn.functional.bilinear, "bmm", "baddbmm"}
LISTS = frozenset({torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack})
CONSTANT = frozenset({"zeros", "full", "arange"})
CHOICES = {torch.where: (0, (1, 2)), torch.lerp: (2, (0, 1))}  # where the condition stands, and what it chooses between
ROWWISE = ELEMENTWISE | PRODUCTS | frozenset(
    {"getitem", "select", "narrow", "chunk", "split", "unbind", "index_select", "gather", "where", "masked_fill",
     "cast", "contiguous", "clone", "detach", "type_as", "reshape", "flatten", "squeeze", "unsqueeze", "expand",
     "permute", "transpose", "t", "T", "mT", "layer_norm", "rms_norm", "mean", "var", "softmax", "dropout", "glu",
     "sum", "pick", "index_add", "index_put", "scatter_add"}
)  # fmt: skip
KEYS = {"getitem": "index", "index_select": "index", "gather": "index", "where": "condition", "masked_fill": "mask"}
ROWS = ("source", "values", "src", "value")
FAR = 300  # pairs of nodes looked at behind two results
DRAWS = "dropout draws its numbers expert by expert, on the rows that each expert has"
DIFFERENT = "equal iterations"  # the first step of the proof for iterations that stand one after another
BEHIND_BRANCHES = "experts, each behind a branch"
IN_BRANCH = "data decide in an expert's iteration how its rows are computed"
MOST = 4096  # results that meet


@dataclass
class MissedExperts:
    """count experts whose results meet at ``place``; ``node``: where the reason stands. results: what each gives, where
    that is rows."""

    count: int
    place: fx.Node
    node: fx.Node
    reason: str
    nodes: set[fx.Node]
    results: list[fx.Node] = field(default_factory=list)
    idiom: str = ""  # how it is written, where that is not by a meeting of results


def missed_experts(graph: fx.Graph) -> list[MissedExperts]:
    """All places of a graph that are layers of experts."""
    found: list[MissedExperts] = []
    for place, results, condition in meetings(graph):
        if len(results) > MOST or any(place in one.nodes for one in found):
            continue
        one = experts_among(place, results, condition)
        if one is not None:
            found.append(one)
    for product, count, place in batched_products(graph):
        reason = f"{DIFFERENT}: an expert is a single projection, or what is between its projections is not understood"
        found.append(MissedExperts(count, place, product, reason, {product, place}))
    return found + list(behind_branches(graph))


def products_behind(anchor: fx.Node) -> set[fx.Node]:
    """The products, loops and branches that what a sum adds is computed of."""
    adds = added_rows(anchor) or anchor
    beside = [adds] if is_branch(adds) else [one for one in adds.all_input_nodes if one is not adds.args[0]]
    return {node for node in computed_of(beside) if is_product(node) or call_name(node) == "expert_loop"}


def find_overlooked(graph: fx.Graph) -> list[MissedExperts]:
    """missed_experts(), or nothing where it fails: the report says that."""
    try:
        return missed_experts(graph)
    except Exception:
        return []


# ----------------------------------------------------------------------------------------------------------------------
# Behind branches
# ----------------------------------------------------------------------------------------------------------------------


def behind_branches(graph: fx.Graph) -> Iterator[MissedExperts]:
    """Branches on data of one line that are alike but for the parameters of their products; none reads in a product
    what another one gave."""
    lines: dict[Any, list[Inside]] = {}
    for node in graph.nodes:
        if is_branch(node) and sum_of(node) is None:  # (zeros, for parameters of experts without rows, are no results)
            within = Inside(node)
            inside = [inner for inner in within.nodes if inner.op not in ("placeholder", "output")]
            if any(map(is_product, inside)) and not any(inner.target is experts for inner in inside):
                lines.setdefault(tuple(inner.meta.get("where") for inner in inside), []).append(within)
    for alike in lines.values():
        own, nodes = [one.weights for one in alike], [one.branch for one in alike]
        if len(nodes) > 1 and len(set(own)) > 1 and not any(reads_another(one, set(nodes)) for one in alike):
            inside = alike[0].nodes
            product = [inner for inner in inside if is_product(inner)][-1]
            faults = [(f"{DIFFERENT}: {DRAWS}", inner) for inner in inside if draws(inner)]
            faults += [(f"expert function: {target_name(n)} is of all rows at once", n) for n in across_rows(inside)]
            faults += [(f"{DIFFERENT}: {IN_BRANCH}", node) for node in alike[0].branches if alike[0].decides(node)]
            faults += [(f"{DIFFERENT}: what else the branch does is not what an expert's iteration does", product)]
            reason, fault = faults[0]
            yield MissedExperts(len(set(own)), nodes[0], fault, reason, {*nodes, product}, idiom=BEHIND_BRANCHES)


class Inside:
    """What a branch runs, that of the branches in it included. outer: what the graph passes for their placeholders."""

    def __init__(self, branch: fx.Node):
        self.branch, self.outer = branch, dict[Any, Any]()
        self.nodes, self.branches = list[fx.Node](), list[fx.Node]()
        self.add(branch)
        self.weights = self.weights_of(self.nodes)

    def add(self, branch: fx.Node) -> None:
        self.outer |= {inner: self.outer.get(given, given) for inner, given in given_to(branch).items()}
        for node in loop_body(branch).graph.nodes:
            self.nodes.append(node)
            if is_branch(node):
                self.branches.append(node)
                self.add(node)

    def weights_of(self, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """The parameters of the graph that are weights of products among the nodes."""
        operands = (operand for node in nodes if is_product(node) for operand in node.all_input_nodes)
        roots = (root_of(operand) for operand in operands if is_weight(operand))
        found = (self.outer[root[0]] for root in roots if root is not None)
        return frozenset(weight for weight in found if isinstance(weight, fx.Node) and is_parameter(weight))

    def decides(self, branch: fx.Node) -> bool:
        """Whether a branch within decides how, or whether, the same expert is computed."""
        return self.weights_of(Inside(branch).nodes) == self.weights


def across_rows(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """Those that read the rows of an expert, of which the data say how many there are, and give something that has no
    such axis. (What adds them to a sum does not.)"""
    for node in nodes:
        shape = None if operator_name(node.target) in PLACES else shape_of(node)
        if shape is not None and not any(map(unbacked_symbols, shape)) and call_name(node) not in ("getitem", "select"):
            given = [shape_of(argument) for argument in node.all_input_nodes]
            if any(before and unbacked_symbols(before[0]) for before in given):
                yield node


def reads_another(one: Inside, others: set[fx.Node]) -> bool:
    """Whether what another branch gave goes into a product of this one."""
    least = min(others)
    tainted = {
        inner
        for inner, outer in one.outer.items()
        if isinstance(outer, fx.Node) and outer.graph is one.branch.graph and outer.op != "placeholder"
        if reaches({outer}, others, least, itself=True)
    }
    for node in one.nodes:
        if not tainted.isdisjoint((one.outer.get(node), *node.all_input_nodes)):
            if is_product(node):
                return True
            tainted.add(node)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Where results meet
# ----------------------------------------------------------------------------------------------------------------------

Meeting = tuple[fx.Node, list[Any], "fx.Node | None"]  # the node, what meets there, what decides between them


def meetings(graph: fx.Graph) -> Iterator[Meeting]:
    sums: dict[fx.Node, tuple[fx.Node, list[Any]]] = {}
    writes: dict[Any, tuple[fx.Node, list[Any]]] = {}
    choices: dict[Any, Meeting] = {}
    for node in graph.nodes:
        call = read_call(node)
        if node.target in LISTS and node.args and isinstance(node.args[0], tuple | list):
            yield node, [item for item in node.args[0] if isinstance(item, fx.Node)], None
        elif node.target in CHOICES and len(node.args) == 3:
            at, chosen = CHOICES[node.target]
            decides, items = node.args[at], [node.args[i] for i in chosen]
            if isinstance(decides, fx.Node):
                known, rest = [], items
                for item in items:
                    if (before := going_on(item, choices)) in choices:
                        known, rest = choices.pop(before)[1], [other for other in items if other is not item]
                choices[node] = node, [*known, *rest], decides
        elif call is not None and call.name == "add":
            summands(node, call["input"], call["other"], call.op.inplace, sums)
        elif call is not None and call.name in PLACES:
            base = chased(call["input"]) if isinstance(call["input"], fx.Node) else None
            line = node.meta.get("where"), node.target
            _, terms = writes.pop((base, line), (node, []))
            writes[base if call.op.inplace else node, line] = node, [*terms, Written(*parted(call))]
    yield from choices.values()
    for place, terms in [*sums.values(), *writes.values()]:
        yield place, terms, None


@dataclass(frozen=True)
class Written:
    """Rows, and what says where they go."""

    rows: Any
    places: tuple


def parted(call: Call) -> tuple[Any, tuple]:
    """(rows, the other arguments) of a call that writes rows into its first argument."""
    node, rows = call.node, next(call[name] for name in ROWS if name in call.args)
    places = tuple(given for name, given in call.args.items() if name not in ("input", *ROWS))
    added = read_call(adds) if (adds := added_rows(node)) is not None else None
    if added is not None:  # ``out[token] += y``
        return added["other"], places
    changes = [user for user in rows.users if user is not node] if isinstance(rows, fx.Node) else []
    changed = [user for user in changes if (made := read_call(user)) is not None and made.op.inplace]
    return (changed[-1] if changed else rows), places


def summands(node: fx.Node, one: Any, other: Any, inplace: bool, sums: dict) -> None:
    """Adds a node to the sum that it goes on with; a sum that something else reads too is a summand itself."""
    for base, term in ((one, other), (other, one)):
        base = going_on(base, sums)
        known = sums.get(base)
        if known is not None and isinstance(term, fx.Node) and (inplace or len(readers(known[0])) <= 1):
            sums[base if inplace else node] = node, [*sums.pop(base)[1], term]
            return
    sums[going_on(one, {}) if inplace else node] = node, [item for item in (one, other) if isinstance(item, fx.Node)]


def readers(node: fx.Node) -> list[fx.Node]:
    """Its users, but for those that only change it in place, or take its shape."""
    calls = [(user, read_call(user)) for user in node.users]
    shapes = [user for user in node.users if call_name(user) in CONSTANT]
    changes = [user for user, call in calls if call is not None and call.op.inplace and not user.users]
    return [user for user in node.users if user not in shapes and user not in changes]


def going_on(node: Any, known: dict) -> Any:
    """Which of known sums a tensor goes on with: additions in place hand one on, and it may be scaled or clamped."""
    while isinstance(node, fx.Node) and node not in known and (call := read_call(node)) is not None:
        handed_on = call.name == "add" and call.op.inplace
        if not (handed_on or (is_of_one(call) and len(node.users) == 1)):
            break
        node = call["input"] if handed_on else node.all_input_nodes[0]
    return node


# ----------------------------------------------------------------------------------------------------------------------
# Two of them
# ----------------------------------------------------------------------------------------------------------------------


def experts_among(place: fx.Node, results: list[Any], condition: fx.Node | None) -> MissedExperts | None:
    """The longest stretch of results that are experts', each beside the one before."""
    best: list[Pair] = []
    run: list[Pair] = []
    before: list[Any] = []  # the last two: a sum that the first iteration begins with may stand after what that adds
    for other in results:
        pairs = (Pair(place, one, other) for one in reversed(before))
        pair = next((pair for pair in pairs if pair.are_experts(condition)), None)
        run = run if pair is not None or len(run) == 0 else []
        if pair is not None:
            run.append(pair)
        best = max(best, run, key=len)
        before = [*before[-1:], other]
    if not best:
        return None
    first = best[0]
    nodes = {place, *(node for pair in best for node in pair.seen)}
    node, reason = first.why()
    experts = {root_of(x) or x for pair in best for x in pair.weights}
    ends = [first.one, *(pair.other for pair in best)]
    rows = [end.rows if isinstance(end, Written) else end for end in ends]
    results = rows if all(isinstance(one, fx.Node) for one in rows) and len(set(rows)) == len(rows) else []
    return MissedExperts(len(experts) or len(best) + 1, place, node, f"{DIFFERENT}: {reason}", nodes, results)


@dataclass
class Pair:
    """Two results, walked back from at once.

    own: products with parameters of their own. routing: what else differs and says what a token gets of each. strange:
    operators that are no function of each row by itself, above a product. other: what differs without being either.
    """

    place: fx.Node
    one: Any
    other: Any
    own: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    routing: list[fx.Node] = field(default_factory=list)
    strange: list[fx.Node] = field(default_factory=list)
    alien: bool = False
    drops: list[fx.Node] = field(default_factory=list)
    weights: tuple[fx.Node, ...] = ()
    widths: fx.Node | None = None
    seen: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one, other = self.one, self.other
        if isinstance(one, Written) and isinstance(other, Written):
            self.walk(one.places, other.places, "routing")
            one, other = one.rows, other.rows
        self.walk(one, other, "rows")

    def are_experts(self, condition: fx.Node | None) -> bool:
        if not self.own or self.alien or self.strange:
            return False
        if self.routing:
            return True
        if condition is not None:
            shape, products = shape_of(condition), {node for pair in self.own for node in pair}
            return shape is not None and varies(condition) and not reaches({condition}, products, min(products))
        return self.place.target in SUMS_OF_ROWS and is_routed_along(self.place)

    def walk(self, a: Any, b: Any, role: str) -> bool:
        """Whether a product with parameters of their own is behind these. role: what they are to the result, "rows" or
        what routes them."""
        if a is b or self.alien:
            return False
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            return self.constants(a, b, role)
        if self.seen.get(a) is b:
            return any(a is one for one, _ in self.own)
        self.seen[a] = b
        call, twin = read_call(a), read_call(b)
        if len(self.seen) > FAR:
            self.alien = True
            return False
        if a.op == "placeholder" and b.op == "placeholder" and is_parameter(a) and is_parameter(b):
            return False  # of each its own
        alike = a.op == b.op and a.target == b.target and a.op != "placeholder" and len(a.args) == len(b.args)
        picks = alike and a.args and a.args[0] is b.args[0] and isinstance(a.args[0], fx.Node)
        piece = picks and call is not None and call.name in PIECES and not tensors_in(a.args[1:])
        if piece and is_parameter(a.args[0]):
            return False  # row e of the parameters of all
        if call is not None and twin is not None and role == "rows":
            if call.name in CONSTANT and twin.name in CONSTANT:
                return False
            if not alike and is_of_one(call) and is_of_one(twin):  # experts with activations of their own
                return self.walk(a.all_input_nodes[0], b.all_input_nodes[0], role)
        if not alike or (picks and role != "rows"):
            return self.differ(a, b, role)
        if is_product(a):
            return self.product(a, b, role)
        if piece:
            return self.piece(a, b)
        found = False
        name = call.name if call is not None and twin is not None else None
        for key, (left, right) in enumerate(zip(a.args, b.args, strict=True)):
            found |= self.walk(left, right, self.role_of(a, name, key, left, role))
        for word in a.kwargs:
            found |= self.walk(a.kwargs[word], b.kwargs.get(word), self.role_of(a, name, word, a.kwargs[word], role))
        whole = call is not None and call.name in ("sum", "mean", "var") and call["dim"] is None
        if found and (name not in ROWWISE or whole) and a.target not in LISTS:
            self.strange.append(a)
        if found and draws(a):
            self.drops.append(a)
        return found

    def role_of(self, node: fx.Node, name: str | None, key: int | str, argument: Any, role: str) -> str:
        if role != "rows" or not isinstance(argument, fx.Node):
            return role if name != "getitem" or key == 0 else "routing"
        if name in KEYS and key not in (0, "input") and name != "where":
            return "routing"
        if name == "where" and key in (0, "condition"):
            return "routing"
        if name in ("mul", "div") and is_column(argument, node):
            return "routing"
        return role

    def constants(self, a: Any, b: Any, role: str) -> bool:
        if isinstance(a, tuple | list) and type(a) is type(b) and len(a) == len(b):
            return any([self.walk(left, right, role) for left, right in zip(a, b, strict=True)])
        if isinstance(a, slice) and isinstance(b, slice):
            return any([self.walk(getattr(a, n), getattr(b, n), role) for n in ("start", "stop", "step")])
        if role == "rows" and not (type(a) is type(b) and a == b):
            self.alien = self.alien or isinstance(a, fx.Node) or isinstance(b, fx.Node)
        return False

    def product(self, a: fx.Node, b: fx.Node, role: str) -> bool:
        """One of a product's operands must be a parameter of its own."""
        operands = list(zip(a.all_input_nodes, b.all_input_nodes, strict=False))
        weights = None if (call := read_call(a)) is None or call.name != "linear" else call["weight"]
        own = [(x, y) for x, y in operands if x is not y and is_weight(x) and is_weight(y)]
        if weights is not None:
            own = [(x, y) for x, y in own if x is weights]
        own = [(x, y) for x, y in own if root_of(x) != root_of(y)]
        if not own:
            found = any([self.walk(x, y, role) for x, y in operands])
            if found:
                self.strange.append(a)
            return found
        self.widths = self.widths or (a if not same_shape(shape_of(own[0][0]), shape_of(own[0][1])) else None)
        if not self.own:
            self.weights = own[0]
        self.own.append((a, b))
        taken = {node for pair in own for node in pair}
        for x, y in operands:
            if x not in taken or y not in taken:
                self.walk(x, y, role)
        return True

    def piece(self, a: fx.Node, b: fx.Node) -> bool:
        """Rows that are pieces of one tensor, by number."""
        if (value := tensor_of(a)) is None or not value.dtype.is_floating_point:
            self.alien = self.alien or value is not None
        elif looked_up_rows(a, self.place):
            self.routing.append(a)
        else:
            self.alien = True
        return False

    def differ(self, a: fx.Node, b: fx.Node, role: str) -> bool:
        """Two things that are not alike."""
        if role == "rows":
            self.alien = True
        elif varies(a) and varies(b):
            self.routing.append(a)
        return False

    def why(self) -> tuple[fx.Node, str]:
        """What keeps them from being the operator, as far as can be seen."""
        if self.drops:
            return self.drops[0], DRAWS
        if self.own[0][0].target in CONVOLUTIONS:
            return self.own[0][0], "an expert is a convolution, and the operator's are products of rows with a matrix"
        if self.widths is not None:
            return self.widths, "the experts' parameters differ in shape"
        firsts = [a for a, _ in self.own]
        if len(firsts) == 1:
            return firsts[0], "an expert is a single projection, and the operator's have two or three"
        down = max(firsts)
        others = {node for node in firsts if node is not down}
        if any(reaches({node}, others - {node}, min(firsts)) for node in others):
            return down, f"an expert has {len(firsts)} projections, one after another"
        name = target_name(self.place)
        return self.place, f"what the experts give meets in {name} in a way that the proof does not know"


# ----------------------------------------------------------------------------------------------------------------------
# What nodes are
# ----------------------------------------------------------------------------------------------------------------------


def is_of_one(call: Call) -> bool:
    """Whether an operator works on each element of one tensor."""
    return call.name in ELEMENTWISE and len(call.node.all_input_nodes) == 1


def is_parameter(node: Any) -> bool:
    """Whether it is, as far as the graph says: what gets gradients, or a float tensor of one axis."""
    value = tensor_of(node) if node.op == "placeholder" else None
    return value is not None and value.dtype.is_floating_point and (value.requires_grad or value.dim() < 2)


def is_product(node: fx.Node) -> bool:
    return call_name(node) in PRODUCTS or node.target in OTHER_PRODUCTS


def root_of(node: fx.Node) -> Any:
    """The parameter that a node is a view of, and which row of it."""
    rows: list[Any] = []
    while node.op != "placeholder":
        call = read_call(node)
        if call is None or not isinstance(call.args.get("input"), fx.Node):
            return None
        if call.name in ("getitem", "select"):
            if tensors_in(call["index"]):
                return None
            rows.append(str(call["index"]))
        elif not call.op.alias and call.name != "clone":
            return None
        node = call["input"]
    return (node, tuple(rows)) if is_parameter(node) else None


def is_weight(node: fx.Node) -> bool:
    root = root_of(node)
    shape = shape_of(node) if root is not None else None
    return shape is not None and len(shape) >= 2 and all(type(size) is int for size in shape)


def is_column(node: Any, of: fx.Node) -> bool:
    """Whether a factor scales whole rows: it has no axis of features (of images, that of channels)."""
    shape, whole = shape_of(node), shape_of(of)
    if not shape or not whole:
        return False
    axes = (-1, 1) if len(shape) == len(whole) > 2 else (-1,)
    return any(same_size(shape[axis], 1) and not same_size(whole[axis], 1) for axis in axes)


def varies(node: fx.Node) -> bool:
    """Whether it is a tensor of more than one number, and none that the program has from the start."""
    shape = shape_of(node)
    if shape is None or all(type(size) is int and size == 1 for size in shape):
        return False
    value = certain(tensor_of(node))
    return not (value.dtype.is_floating_point and root_of(node) is not None)


def tensors_in(values: Any) -> bool:
    if isinstance(values, tuple | list):
        return any(map(tensors_in, values))
    return isinstance(values, fx.Node) and tensor_of(values) is not None
