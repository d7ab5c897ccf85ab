"""All experts on all tokens, masked by a gate: ``out += expert(x) * gate_e[:, None]``, as the iterations of an expert
loop.

Where gate_e[t] = Σ_k weight[t, k] · [index[t, k] = e], the sum over e of expert_e(x[t]) · gate_e[t] is that of
expert_e(x[t]) · weight[t, k] over the slots k with index[t, k] = e, if the expert works on each row by itself. So a
iteration ``state + expert(x) * gate`` is rewritten to the iteration that selects these rows, computes the expert on
them alone and adds them at their tokens; whether that is an expert's iteration, row by row, is for the proof to say
(proof.py). What the gate is, is read here, from one of two ways to write it:

    gates[:, e, None] of gates that are 0 for the others (zeros.py)             index from topk: no expert twice
    (weight * (index == e)).sum(-1, keepdim=True)

The two differ where an expert's output is not finite on a token that did not choose it: 0 · inf is NaN.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.combined import Combined, combination
from moebius.lowering.experts.masked import (
    compared_gate,
    holds_for_chosen,
    left_by_mask,
    masked,
    scale_by_mask,
    scaled_rows,
)
from moebius.lowering.experts.matrices import as_matrices
from moebius.lowering.experts.routing import distinct, index_root, is_among
from moebius.lowering.experts.unrolled_loops import Builder, Differ, NoExperts, Place, Unrolled, loop_of
from moebius.lowering.experts.views import FULL, column_of
from moebius.lowering.experts.zeros import Zeros, one_of, scatter_into
from moebius.lowering.operators import PRODUCTS, call_name, draws, is_pure, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import (
    add_call,
    certain,
    computed_of,
    dtype_of,
    infer,
    is_floating,
    rank_of,
    same_shape,
    shape_of,
    tensor_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# Which additions may be such iterations
# ----------------------------------------------------------------------------------------------------------------------


def dense_chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Additions of scaled rows, each to the result of the one before, two or more; each of the same line."""
    chains: dict[Any, list[fx.Node]] = {}
    found: list[list[fx.Node]] = []
    dead: set[fx.Node] | None = None
    for node in graph.nodes:
        parts = added(node)
        if parts is None or node in (dead := unread(graph) if dead is None else dead):
            continue
        line, base = node.meta.get("where"), parts[0]
        inplace = writes_base(node)
        chain = chains.get((base, line)) if isinstance(base, fx.Node) else None
        if chain is None:
            chain = []
            found.append(chain)
        elif not inplace:
            del chains[base, line]
        chain.append(node)
        chains[base if inplace else node, line] = chain
    return [chain for chain in found if len(chain) >= 2]


def unread(graph: fx.Graph) -> set[fx.Node]:
    """What nobody sees the value of: a statement, say, that stands in a plainer form beside it."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        if node.op not in ("placeholder", "output") and found.issuperset(node.users) and is_pure(node):
            found.add(node)
    return found


def writes_base(node: fx.Node) -> bool:
    call = read_call(node)
    return call is not None and call.op.inplace


def added(node: fx.Node) -> tuple[Any, fx.Node] | None:
    """(what is added to, the scaled rows) of ``out + rows * gate``; the first may be the number 0."""
    call = read_call(node)
    if call is None or call.name != "add" or call["alpha"] != 1:
        return None
    for base, rows in call.either_way:
        if call.op.inplace and base is not call["input"]:
            continue
        zero = type(base) is int and base == 0
        whole = zero or (isinstance(base, fx.Node) and same_shape(shape_of(base), shape_of(node)))
        if whole and isinstance(rows, fx.Node) and same_shape(shape_of(rows), shape_of(node)) and scaled(rows):
            return base, rows
    return None


def scaled(rows: fx.Node) -> bool:
    return scaled_rows(rows) is not None or masked(rows) is not None


class DenseSum:
    """A sum over experts of rows that are scaled or masked, however it is written. place: for messages; last: the node
    that is the sum. While it is tried, the same additions on matrices, one after another, stand before ``last``."""

    def __init__(self, place: fx.Node, last: fx.Node):
        self.place, self.last, self.result = place, last, last
        self.anchors = [last]  # what each expert adds is behind one of these
        self.inplace: list[fx.Node] = []  # the additions, where they write into one tensor

    def parts(self, storage: Storage) -> tuple[fx.Node | None, list[fx.Node]]:
        """(what is added to, if not zeros; what each expert adds). Raises Differ."""
        raise NotImplementedError

    def write(self) -> tuple[list[fx.Node], Storage]:
        """The additions, functional ones, and the storages of the graph without those that were written. Raises Differ,
        NoExperts."""
        graph, last = self.last.graph, self.last
        base, parts = self.parts(Storage(graph))
        flat = None
        if rank_of(last) > 2:
            flat, base, parts = as_matrices(base, parts, self.place, last)
        storage = self.forgotten(Storage(graph))
        with graph.inserting_before(last):
            parts = [unmasked(part, storage) for part in parts]
            total = base if base is not None else add_call(graph, last, torch.zeros_like, parts[0])
            nodes = [total := add_call(graph, last, torch.add, total, part) for part in parts]
            if flat is None:
                self.result = add_call(graph, last, operator.getitem, total, ...)  # it goes with the loop
            else:
                sizes = *flat.sizes(last), (shape_of(last) or ())[-1]
                self.result = add_call(graph, last, torch.reshape, total, sizes)
        return nodes, self.forgotten(Storage(graph))

    def forgotten(self, storage: Storage) -> Storage:
        """The storages as if what was written in place were not."""
        for node in self.inplace:
            storage.forget(node)
        return storage

    def settle(self) -> list[fx.Node]:
        """The new sum takes the place of the old one. Returns what nobody may read now."""
        bases = [base for node in self.inplace if isinstance(base := node.args[0], fx.Node)]
        for name in dict.fromkeys((self.last, *self.inplace, *bases)):
            name.replace_all_uses_with(self.result, lambda user: self.last < user)
        for node in reversed(self.inplace):
            self.last.graph.erase_node(node)
        total = self.result.args[0]
        if self.result.target is operator.getitem and isinstance(total, fx.Node):
            self.result.replace_all_uses_with(total)
            self.result.graph.erase_node(self.result)
        return [] if self.place in self.inplace else [self.place if self.inplace else self.last]


def unmasked(part: fx.Node, storage: Storage) -> fx.Node:
    """Rows that are scaled and then masked, as rows scaled by a masked gate."""
    one = masked(part)
    if one is None:
        return part
    rows, gate = scaled_rows(one.rows) or (one.rows, None)
    if any(storage.writer_between(argument, one.node) for argument in (rows, gate, one.rows) if argument):
        raise Differ("what is masked is changed in place", one.node)
    return scale_by_mask(one, rows, gate)


class Chain(DenseSum):
    """Additions, each to the result of the one before. whole: what the first adds to is an expert's as well."""

    def __init__(self, nodes: list[fx.Node], whole: bool = False):
        super().__init__(nodes[0], nodes[-1])
        self.nodes, self.whole = nodes, whole

    def parts(self, storage: Storage) -> tuple[fx.Node | None, list[fx.Node]]:
        """Raises Differ also where additions in place may be seen by others."""
        found = [parts for parts in map(added, self.nodes) if parts is not None]
        base, first, inplace = found[0][0], self.nodes[0], [writes_base(node) for node in self.nodes]
        if all(inplace[1:]):  # (``y = 0``, ``y += rows``: the first of them makes the tensor)
            self.inplace = self.nodes if inplace[0] else self.nodes[1:]
            self.check_unseen(base if inplace[0] else first, storage)
        elif any(inplace):
            raise Differ("some iterations add in place and others do not", first)
        elif first in computed_of([found[1][1]], lambda node: [one for one in node.all_input_nodes if not one < first]):
            raise NoExperts("what is added is made of the sum: layers one after another", first)
        for before, after in itertools.pairwise(self.nodes):
            others = [user for user in before.users if user is not after]
            if not self.inplace and (others := [user for user in others if user not in unread(user.graph)]):
                raise Differ(f"{target_name(others[0])} reads the sum between the iterations", others[0])
        rows = [rows for _, rows in found]
        if self.whole and isinstance(base, fx.Node):
            return None, [base, *rows]
        return base if isinstance(base, fx.Node) else None, rows

    def check_unseen(self, total: fx.Node, storage: Storage) -> None:
        """Who reads the sum reads all of it."""
        if not storage.is_fresh(total):
            raise Differ("the tensor that is added to came from outside", self.place)
        own = {total, *self.nodes}
        for name in storage.family(total):
            later = [user for user in name.users if user not in own and self.place < user and not self.last < name]
            if any(user < self.last for user in later) or (later and name not in own):
                raise Differ("the sum is read between the iterations, or under another name", later[0])


class Stacked(DenseSum):
    """``(torch.stack([expert(x) for …], 1) * gates[:, :, None]).sum(1)``, however it is written (combined.py)."""

    def __init__(self, total: fx.Node, parts: Combined):
        super().__init__(total, total)
        self.combined = parts

    def parts(self, storage: Storage) -> tuple[fx.Node | None, list[fx.Node]]:
        total, parts = self.last, self.combined
        writer = parts.writer(storage, total)
        if writer is not None:
            raise Differ(f"{target_name(writer)} changes what the sum is made of", writer)
        if parts.index is not None and not is_among(parts.index, len(parts.rows)):
            raise Differ("which expert a slot goes to is not certain to be one of the stack's", total)
        with total.graph.inserting_before(total):
            return None, [self.scaled(own, e) for e, own in enumerate(parts.rows)]

    def scaled(self, rows: fx.Node, e: int) -> fx.Node:
        """Expert e's rows, by their gate, or those of the tokens that have it alone."""
        graph, total, weight, index = self.last.graph, self.last, self.combined.weight, self.combined.index
        if weight is not None:
            return add_call(graph, total, torch.mul, rows, self.column(weight, e))
        if index is None:
            return rows
        chosen = add_call(graph, total, torch.eq, index, e)
        if rank_of(index) < rank_of(total):
            chosen = add_call(graph, total, torch.unsqueeze, chosen, -1)
        return add_call(graph, total, torch.where, chosen, rows, 0.0)

    def column(self, weight: fx.Node, e: int) -> fx.Node:
        """[T, 1]: what expert e's rows are scaled by."""
        graph, total = self.last.graph, self.last
        if self.combined.index is None:
            lead = (FULL,) if rank_of(weight) == 2 else (...,)
            return add_call(graph, total, operator.getitem, weight, (*lead, e, None))
        chosen = add_call(graph, total, torch.eq, self.combined.index, e)
        product = add_call(graph, total, torch.mul, weight, chosen)
        return add_call(graph, total, torch.sum, product, -1, True)


def stacks(graph: fx.Graph) -> list[DenseSum]:
    """The sums over a stack of the experts' rows that something routes."""
    found = [Stacked(node, parts) for node in graph.nodes if (parts := combination(node)) is not None]
    return [one for one in found if one.combined.weight or one.combined.index or all(map(scaled, one.combined.rows))]


# ----------------------------------------------------------------------------------------------------------------------
# The gate
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Gate:
    """gate_e[t] = Σ_k weight[t, k] · [index[t, k] = e]. weight, index: nodes of the body."""

    weight: fx.Node
    index: fx.Node


class Sparse:
    """Rewrites the body of a loop of dense iterations, which ``builder`` built."""

    def __init__(self, builder: Builder, storage: Storage):
        self.builder, self.storage, self.body = builder, storage, builder.body
        self.outer = {inner: outer for outer, inner in builder.captures.items()}

    def rewrite(self) -> None:
        """``state + expert(x) * gate`` becomes ``state.index_add(0, token, expert(x[token]) * weight[token, k])``."""
        body = self.body
        output = body.output_node()
        results: Any = output.args[0]
        total = results[0]
        parts = added(total)
        scaled = scaled_rows(parts[1]) if parts is not None else None
        if parts is None or scaled is None or parts[0] is not self.builder.state:
            raise Differ("the iterations are no sums of scaled rows", self.builder.first)
        rows, column = scaled
        gate = self.gate = self.read_gate(column)
        first = next(node for node in body.nodes if node.op != "placeholder")
        with body.inserting_before(first):
            chosen = self.call(torch.eq, gate.index, self.builder.row)
            places = self.call(torch.where, chosen)
            token, slot = (self.call(operator.getitem, places, i) for i in (0, 1))
        table = {node: node for node in body.nodes if node.op == "placeholder"} | {token: token}
        with body.inserting_before(total):
            computed = self.on_rows(rows, token, table)
            weight = self.call(operator.getitem, gate.weight, (token, slot, None))
            product = self.call(torch.mul, computed, weight)
            (own, given) = (tensor_of(node) for node in (parts[0], product))
            if own is not None and given is not None and own.dtype != given.dtype:  # (a plain sum promotes)
                product = self.call("to", product, own.dtype)
            result = self.call(torch.index_add, parts[0], 0, token, product)
        output.args = ((result,),)
        body.eliminate_dead_code()

    def call(self, target: Any, *args: Any) -> fx.Node:
        return add_call(self.body, self.builder.first, target, *args)

    def on_rows(self, node: fx.Node, token: fx.Node, table: dict[fx.Node, fx.Node]) -> fx.Node:
        """The same computation, its products taken of the selected rows alone."""
        if node in table:
            return table[node]
        call = read_call(node)
        if (whole := left_by_mask(node, self.gate.index, self.builder.row)) is not None:
            return (self.picked if self.is_shared(whole) else self.on_rows)(whole, token, table)
        if call is None or call.op.inplace:
            raise Differ("an operator that the proof does not know is in the expert", node)
        if draws(node):
            raise NoExperts("dropout draws its numbers for all tokens, those of other experts too", node)
        given = call["input"] if call.name in PRODUCTS else None
        if isinstance(given, fx.Node) and self.is_shared(given):
            local = {**table, given: self.picked(given, token, table)}
        else:
            local = table
        copies = {
            argument: local.get(argument) or self.on_rows(argument, token, table) for argument in node.all_input_nodes
        }
        made = self.body.node_copy(node, lambda argument: copies[argument])
        made.meta["val"] = self.value(made, node)
        table[node] = made
        return made

    def is_shared(self, rows: fx.Node) -> bool:
        """Whether all iterations read these rows alike: an expert's own are some of them."""
        return computed_of([rows]).isdisjoint((self.builder.row, self.builder.state))

    def picked(self, given: fx.Node, token: fx.Node, table: dict) -> fx.Node:
        return table.setdefault(("rows", given), self.call(operator.getitem, given, token))

    def value(self, made: fx.Node, like: fx.Node) -> Any:
        if all(a is b for a, b in zip(made.all_input_nodes, like.all_input_nodes, strict=True)):
            return like.meta["val"]
        try:
            return infer(made)
        except Exception as error:  # it does not work on some rows alone
            raise Differ(f"{type(error).__name__} where it is to work on some rows alone", like) from None

    # ------------------------------------------------------------------------------------------------------------------

    def read_gate(self, column: fx.Node) -> Gate:
        gate = self.scattered(column) or self.summed(column) or self.masked(column) or self.one_slot(column)
        if gate is None:
            raise Differ("nothing says that the rows of tokens that did not choose the expert are scaled by 0", column)
        index, weight = shape_of(gate.index), shape_of(gate.weight)
        if index is None or len(index) != 2 or not same_shape(index, weight) or is_floating(gate.index):
            raise Differ("the gate is not made of weights and experts [tokens, slots]", column)
        return gate

    def masked(self, column: fx.Node) -> Gate | None:
        """``torch.where(condition, gate, 0)`` of a gate: all of it, or what is left of its weights."""
        one = masked(column)
        gate = None if one is None else self.scattered(one.rows) or self.summed(one.rows)
        if one is None or gate is None:
            return None
        if holds_for_chosen(one.condition, gate.index, self.builder.row, one.kept):
            return gate
        compared = compared_gate(one.condition, one.rows)
        captured = {inner: outer for outer, inner in self.builder.captures.items()}
        if compared is None or not distinct(captured[gate.index]):
            return None
        weight = captured[gate.weight]
        chosen = self.builder.before(compared[0], weight, compared[1])
        left = self.builder.before(torch.where, chosen, *((weight, 0.0) if one.kept else (0.0, weight)))
        return Gate(self.builder.capture(left), gate.index)

    def one_slot(self, column: fx.Node) -> Gate | None:
        """``torch.where((index == e)[:, None], weight, 0)`` or ``(index == e)[:, None]``, index [T] or [T, 1]."""
        one, call = masked(column), read_call(column)
        kept = one is None or one.kept
        if one is not None:
            lifted = self.lifted(one.rows)
            condition, weight = one.condition, None if lifted is None else self.outer[lifted]
        elif dtype_of(column) == torch.bool:
            condition, weight = column, None
        elif call is not None and call.name == "cast":
            condition, weight = call["input"], None
        else:
            return None
        vector = column_of(condition)
        index = self.chosen(condition if vector is None else vector, kept)
        value = tensor_of(self.builder.state)
        if index is None or value is None or (one is not None and weight is None):
            return None
        shape = shape_of(index) or ()
        if len(shape) + (vector is not None) != 2 or (vector is None and not same_size(shape[1], 1)):
            return None
        outer = self.outer[index]
        if vector is not None:
            outer = self.builder.before(torch.unsqueeze, outer, 1)
        if weight is None:
            weight = self.builder.before(torch.ones_like, outer, dtype=value.dtype)
        return Gate(self.builder.capture(weight), self.builder.capture(outer))

    def scattered(self, column: fx.Node) -> Gate | None:
        """``gates[:, e, None]`` or ``gates[:, e : e + 1]`` of gates that are 0 for all experts that are not chosen."""
        vector = column_of(column)
        call = read_call(column if vector is None else vector)
        if call is None or call.name not in ("getitem", "select"):
            return None
        row = self.builder.row
        keys = call["index"]
        wanted: tuple[tuple, ...] = ((FULL, row), (..., row))
        if vector is None:
            column_e = slice(row, self.builder.next_row, None)
            wanted = ((FULL, row, None), (FULL, column_e), (..., column_e))
        if call.name == "select":
            if vector is None or call["dim"] not in (1, -1) or keys is not row:
                return None
        elif not isinstance(keys, tuple) or not any(alike(keys, pattern) for pattern in wanted):
            return None
        lifted = self.lifted(call["input"])
        if lifted is None:
            return None
        gates = self.outer[lifted]
        index = Zeros(self.storage, self.builder.first).index_of(gates)
        if index is None:
            return self.by_mask(gates)
        if not distinct(index):
            return None
        made = scatter_into(0.0, gates, self.builder.first, self.storage)
        weight = made["src"] if made is not None else None
        whole = isinstance(weight, fx.Node) and same_shape(shape_of(weight), shape_of(index))
        if self.storage.writer_into((index_root(index), index), self.builder.first):
            raise Differ("what the gates are made of is changed in place before the iterations", column)
        self.check_unwritten(gates, index_root(index))
        count = self.builder.count
        if (shape_of(gates) or (0, 0))[1] != count or not is_among(index, count):
            return None
        if not isinstance(weight, fx.Node) or not whole or self.storage.writer_between(weight, self.builder.first):
            weight = self.builder.before(torch.gather, gates, 1, index)
        if not is_floating(weight):
            return None
        return Gate(self.builder.capture(weight), self.builder.capture(index))

    def check_unwritten(self, *kept: fx.Node) -> None:
        """What plain Python keeps for backward must not be written after the iterations."""
        for writer in self.storage.writers_of(kept, self.builder.first):
            raise Differ(f"{target_name(writer)} changes the gates after the iterations", writer)

    def by_mask(self, gates: fx.Node) -> Gate | None:
        """Gates that are 0 where a mask does not hold: a slot for each expert, which goes to none there."""
        first = self.builder.first
        mask = Zeros(self.storage, first, masks=True).index_of(gates)
        shape, value = shape_of(gates), tensor_of(gates)
        if mask is None or not shape or len(shape) != 2 or shape[1] != self.builder.count or value is None:
            return None
        if not value.dtype.is_floating_point or not same_shape(shape_of(mask), shape):
            return None
        if self.storage.writer_into((mask, gates), first):
            raise Differ("what the gates are made of is changed in place before the iterations", gates)
        before = self.builder.before
        count = before(torch.cumsum, before(torch.ones_like, mask, dtype=torch.int64), 1)
        index = before(torch.where, mask, before(torch.sub, count, 1), shape[1])
        self.check_unwritten(gates)
        return Gate(self.builder.capture(gates), self.builder.capture(index))

    def summed(self, column: fx.Node) -> Gate | None:
        """``(weight * (index == e)).sum(-1, keepdim=True)``, in whatever way the others are left out."""
        vector = column_of(column)
        call = read_call(column if vector is None else vector)
        if call is None or call.name != "sum" or call["keepdim"] is not (vector is None) or call.args.get("dtype"):
            return None
        dim = one_of(call["dim"])
        if not isinstance(dim, int) or dim not in (-1, 1):
            return None
        one = masked(call["input"], column=False)
        index = None if one is None else self.chosen(one.condition, one.kept)
        weight = None if one is None else self.lifted(one.rows)
        return Gate(weight, index) if weight is not None and index is not None and is_floating(weight) else None

    def chosen(self, node: Any, kept: bool = True) -> fx.Node | None:
        """index of ``index == e``, cast or not; of its opposite, if not ``kept``."""
        call, wanted = read_call(node), "eq" if kept else "ne"
        while call is not None and call.name in ("cast", "logical_not") and isinstance(call["input"], fx.Node):
            if call.name == "logical_not":
                if dtype_of(call["input"]) != torch.bool:
                    return None
                wanted = "ne" if wanted == "eq" else "eq"
            call = read_call(call["input"])
        if call is None or call.name != wanted or call["other"] is not self.builder.row:
            return None
        return self.lifted(call["input"])

    def lifted(self, node: Any) -> fx.Node | None:
        """What all iterations read or compute alike, as one that the body is given: ``index[:, k]``, before the first
        iteration."""
        if not isinstance(node, fx.Node) or node in self.outer:
            return node if node in self.outer else None
        parts = {one: self.lifted(one) for one in node.all_input_nodes}
        if read_call(node) is None or not is_pure(node) or not parts or None in parts.values():
            return None
        outer = {one: self.outer[part] for one, part in parts.items() if part is not None}
        first = self.builder.first
        with first.graph.inserting_before(first):
            made = first.graph.node_copy(node, outer.__getitem__)
        self.storage.add(made)
        inner = self.builder.capture(made)
        self.outer[inner] = made
        return inner


def alike(keys: tuple, pattern: tuple) -> bool:
    return len(keys) == len(pattern) and all(
        key is wanted if isinstance(wanted, fx.Node) or isinstance(key, fx.Node) else key == wanted
        for key, wanted in zip(keys, pattern, strict=True)
    )


def build_dense(gm: fx.GraphModule, nodes: list[fx.Node], storage: Storage) -> Unrolled:
    """The loop node for these additions (functional ones), before the first. Raises Differ, NoExperts."""
    for node in gm.graph.nodes:
        if nodes[0] < node < nodes[-1] and call_name(node) == "require_branch":
            raise Differ("the step may be left between the iterations, at a branch on data", node)
    places = []
    for node in nodes:
        parts = certain(added(node))
        places.append(Place(node, node, parts[0]))
    builder = Builder(gm, places, storage)
    try:
        builder.build()
    except Differ as difference:
        raise NoExperts(difference.reason, difference.node) from None
    if not any(call_name(node) in PRODUCTS for node in builder.body.nodes):
        raise NoExperts("no product is in the iterations", nodes[0])
    Sparse(builder, storage).rewrite()
    return loop_of(gm, builder, fx.GraphModule(torch.nn.Module(), builder.body))
