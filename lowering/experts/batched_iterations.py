"""Experts as batched products: with the weights of all of them (``torch.bmm(rows, w)``, einsum over experts), or with a
copy of them gathered for each row (``w[index]``), as one expert loop.

Nothing loops there. But where every axis between the rows and the down-projection is known (layout.py), each of its
entries is one expert's function of one row. So the rows, spread over all these axes, are put under one another [S, D]
with the number of each row's expert [S]; and the loop ``out.index_add(0, rows of e, expert_e(x[rows of e]))`` over them
is put to the proof that all expert loops are put to (proof.py). What is shown here is only which rows, experts and
weights go together, and that the products may be computed where the last one stands. What stands around the experts
(dispatch and combine masks, gates, sums over slots) stays as it was written.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn.functional import linear

from moebius.lowering.aliasing import Storage, storage_now
from moebius.lowering.experts.batched import (
    VIEWS,
    gathered_with,
    is_gathered,
    keeps_all,
    parameter_of,
    with_bias,
)
from moebius.lowering.experts.layout import (
    COLUMNS,
    FEATURE,
    ROWS,
    Axis,
    Dims,
    WithoutGrad,
    agreed,
    assigned,
    bare,
    origin,
)
from moebius.lowering.experts.loops import add_rows
from moebius.lowering.experts.routing import is_among
from moebius.lowering.experts.unrolled_loops import Builder, Differ, NoExperts, Place, has_effect, loop_of
from moebius.lowering.experts.views import FULL, equation_of, indexed, moved, same_value, sized_one
from moebius.lowering.experts.zero_rows import Gates, gates_of, zero_at_zero
from moebius.lowering.operators import ELEMENTWISE, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import (
    add_call,
    certain,
    dtype_of,
    infer,
    lie_alike,
    memory_order,
    nodes_between,
    put_before,
    rank_of,
    shape_of,
    stands_at,
    tensor_of,
    value_of,
)


@dataclass
class Laid:
    """A tensor of the graph whose axes are known. emit: makes the node of the loop's body that has its rows."""

    dims: Dims
    emit: Callable[[], fx.Node]
    made: fx.Node | None = None

    def node(self) -> fx.Node:
        if self.made is None:
            self.made = self.emit()
        return self.made


@dataclass
class Split:
    """A product's operands by what they are. others: what a down-projection by einsum is combined with at once."""

    weight: fx.Node
    rows: fx.Node
    letters: dict[str, Any]  # of the weight's axes
    rows_letters: str
    inner: str
    outer: str
    result: str
    others: list[tuple[fx.Node, str]] = field(default_factory=list)


class Batched(Builder):
    """Builds the loop for the products behind one down-projection."""

    def __init__(self, gm: fx.GraphModule, down: fx.Node, experts: int, ups: list[fx.Node], storage: Storage,
                 gates: Gates | None = None):
        end = with_bias(down, experts)
        super().__init__(gm, [Place(end, end, end)] * experts, storage)
        self.down, self.ups, self.experts, self.end = down, set(ups), experts, end
        self.begin = min(ups)
        self.under_no_grad = WithoutGrad(gm.graph)
        self.gates = gates  # what says which rows are zero, and run nowhere
        self.some: fx.Node | None = None
        self.written: list[fx.Node] = []
        self.laid_nodes: dict[fx.Node, Laid] = {}
        self.within: dict[fx.Node, bool] = {down: True}
        self.computed: set[fx.Node] = {down, end}  # what the products are made of, behind which the loop stands
        self.given: set[fx.Node] = set()  # what it reads
        self.index: fx.Node | None = None
        self.index_dims: Dims = ()
        self.order: list[Axis] = []  # the axes of rows
        self.token: fx.Node | None = None
        self.spread_nodes: dict[Any, fx.Node] = {}
        self.looked_up: dict[tuple[fx.Node, bool], fx.Node] = {}  # rows of this iteration's expert, in the body
        self.leaves: list[tuple[fx.Node, Dims]] = []  # what the products read besides weights
        self.wide: list[tuple[fx.Node, Dims]] = []  # the rows that are given

    # What each tensor's axes are ------------------------------------------------------------------------------------

    def inside(self, node: fx.Node) -> bool:
        """Whether a tensor is made of what the up-projections gave."""
        if node not in self.within:
            self.within[node] = node in self.ups or (
                not node < self.begin and node.op != "placeholder" and any(map(self.inside, node.all_input_nodes))
            )
        return self.within[node]

    def laid(self, node: fx.Node) -> Laid:
        if node not in self.laid_nodes:
            self.computed.add(node)
            self.laid_nodes[node] = self.product(node)[0] if node in self.ups else self.between(node)
        return self.laid_nodes[node]

    def between(self, node: fx.Node) -> Laid:
        """What stands between the products: operators on each element, views, parts of the features."""
        call = read_call(node)
        if call is None or call.op.inplace:
            raise self.stranger(node)
        if call.name in ELEMENTWISE:
            return self.elementwise(node)
        source = call.args.get("input")
        if isinstance(source, fx.Node) and call.name == "getitem" and type(call["index"]) is int:
            pieces = read_call(source)
            if pieces is not None and pieces.name in ("chunk", "split") and isinstance(pieces["input"], fx.Node):
                return self.piece(node, source)
        if not isinstance(source, fx.Node) or not self.inside(source):
            raise self.stranger(node)
        rows = self.laid(source)
        if call.name == "cast" and not any(isinstance(a, fx.Node) for k, a in call.args.items() if k != "input"):
            return Laid(rows.dims, lambda: self.write(node, rows.dims, (rows.node(), *node.args[1:]), node.kwargs))
        dims = moved(call, rows.dims)
        if dims is not None:
            return Laid(dims, rows.node)
        part = self.part_of_features(node, rows)
        if part is None:
            raise self.stranger(node)
        return part

    def stranger(self, node: fx.Node) -> Differ:
        return Differ(f"{target_name(node)} is between the products, and it is not known that it keeps to rows", node)

    def elementwise(self, node: fx.Node) -> Laid:
        arguments = [a for a in node.all_input_nodes if tensor_of(a) is not None]
        own = {a: self.laid(a) for a in arguments if self.inside(a)}
        dims = agreed([(a, laid.dims) for a, laid in own.items()], node)
        shape = shape_of(node) or ()
        if len(shape) != len(dims):
            raise NoExperts("a tensor of more axes joins the rows", node)
        own |= {a: self.leaf(a, assigned(a, dims, shape, node), node) for a in arguments if a not in own}

        def emit() -> fx.Node:
            args: Any = fx.map_arg(node.args, lambda a: own[a].node())
            return self.write(node, dims, args, fx.map_arg(node.kwargs, lambda a: own[a].node()))

        if any(a not in own for a in node.all_input_nodes):
            raise Differ(f"{target_name(node)} reads a number that is computed", node)
        return Laid(dims, emit)

    def piece(self, node: fx.Node, pieces: fx.Node) -> Laid:
        """``h.chunk(2, -1)[0]``."""
        call = certain(read_call(pieces))
        rows = self.laid(call["input"])
        self.computed.add(pieces)
        if rows.dims[call["dim"]] != FEATURE:
            raise Differ(f"{target_name(pieces)} cuts an axis of rows", pieces)
        how = "chunks" if call.name == "chunk" else "split_size_or_sections"

        def emit() -> fx.Node:
            key = (id(pieces),)
            if key not in self.known:
                self.known[key] = add_call(self.body, pieces, pieces.target, rows.node(), call[how], -1)
            return self.write(node, rows.dims, (self.known[key], node.args[1]))

        return Laid(rows.dims, emit)

    def part_of_features(self, node: fx.Node, rows: Laid) -> Laid | None:
        """``h[..., ::2]``, ``h.narrow(-1, 0, n)``."""
        call = certain(read_call(node))
        if call.name == "narrow" and rows.dims[call["dim"]] == FEATURE:
            given = (-1, call["start"], call["length"])
            return Laid(rows.dims, lambda: self.write(node, rows.dims, (rows.node(), *given), target=torch.narrow))
        if call.name != "getitem" or not isinstance(call["index"], tuple) or rows.dims[-1:] != (FEATURE,):
            return None
        *first, last = call["index"]
        if not isinstance(last, slice) or indexed(tuple(first), rows.dims[:-1]) != rows.dims[:-1]:
            return None
        if Ellipsis not in first and len(first) != len(rows.dims) - 1:
            return None
        key = (FULL, last)
        return Laid(rows.dims, lambda: self.write(node, rows.dims, (rows.node(), key), target=operator.getitem))

    # Products ---------------------------------------------------------------------------------------------------------

    def split(self, node: fx.Node) -> Split:
        equation = equation_of(node)
        if equation is None:
            raise Differ(f"{target_name(node)} is spelled in a way that is not read", node)
        dims = {operand: found for operand in equation.operands if (found := self.weight_dims(operand)) is not None}
        if len(dims) != 1:
            raise NoExperts("a product of no weights, or of several", node)
        (weight,) = dims
        at = equation.operands.index(weight)
        letters = dict(zip(equation.letters[at], dims[weight], strict=True))
        inner = [a for a, axis in letters.items() if axis in (ROWS, COLUMNS) and a not in equation.result]
        outer = [a for a, axis in letters.items() if axis in (ROWS, COLUMNS) and a in equation.result]
        pairs = list(zip(equation.operands, equation.letters, strict=True))
        rest = pairs[:at] + pairs[at + 1 :]
        rows = [pair for pair in rest if inner and inner[0] in pair[1]]
        if len(inner) != 1 or len(outer) != 1 or len(rows) != 1 or any(outer[0] in part for _, part in rest):
            expert = next((a for a, axis in letters.items() if axis not in (ROWS, COLUMNS)), "")
            kind = Differ if expert in equation.result else NoExperts  # (heads [D, H, d] of an attention)
            raise kind(f"{target_name(node)} is no product of rows with a matrix for each expert", node)
        others = [pair for pair in rest if pair is not rows[0]]
        return Split(weight, rows[0][0], letters, rows[0][1], inner[0], outer[0], equation.result, others)

    def product(self, node: fx.Node, last: bool = False) -> tuple[Laid, str, Split]:
        """A product's rows, the letters of its axes (before others join it), and its operands."""
        split = self.split(node)
        letters = dict(split.letters)
        if self.inside(split.rows):
            rows = self.laid(split.rows)
        else:
            rows = self.leaf(split.rows, self.axes_of_rows(split, node), node)
        for letter, axis in zip(split.rows_letters, rows.dims, strict=True):
            if letter == split.inner:
                if axis != FEATURE:
                    raise Differ(f"{target_name(node)} contracts an axis of rows", node)
            elif letter not in letters:
                letters[letter] = axis
            elif axis is not None and letters[letter] is not None and axis != letters[letter]:
                raise Differ(f"{target_name(node)} multiplies rows with the weights of other experts", node)
            elif letters[letter] is None:
                letters[letter] = axis
            elif axis is None and self.inside(split.rows):
                raise Differ(f"{target_name(node)} multiplies one row with the weights of several experts", node)
        full = [letter for letter in split.result if letter in letters]
        full += [letter for letter in letters if letter not in full and letter != split.inner]
        if not last and (split.others or full != list(split.result)):
            raise Differ(f"{target_name(node)} adds rows up before the down-projection", node)
        dims: Dims = tuple(FEATURE if letter == split.outer else letters[letter] for letter in full)
        weight, whole = self.weight(split.weight), split.letters[split.inner] == COLUMNS
        bias = node.args[0] if target_name(node).endswith("baddbmm") else None
        added = None
        if isinstance(bias, fx.Node):
            if self.inside(bias):
                raise Differ("baddbmm adds rows to those of experts", node)
            added = self.leaf(bias, assigned(bias, dims, shape_of(node) or (), node), node)

        def emit() -> fx.Node:
            rows_node, matrix = rows.node(), weight.node()
            made = self.write(node, dims, (rows_node, matrix), target=linear if whole else torch.matmul)
            return made if added is None else self.write(node, dims, (made, added.node()), target=torch.add)

        return Laid(dims, emit), "".join(full), split

    def axes_of_rows(self, split: Split, node: fx.Node) -> Dims:
        """The axes of rows that are given: those of the weights where they have the same letter."""
        shape = shape_of(split.rows)
        if shape is None or len(shape) != len(split.rows_letters):
            raise NoExperts("rows whose shape is not known", node)
        dims: list[Any] = []
        for dim, (letter, size) in enumerate(zip(split.rows_letters, shape, strict=True)):
            axis = split.letters.get(letter)
            if letter == split.inner:
                dims.append(FEATURE)
            elif sized_one(size):
                dims.append(None)
            elif axis is not None:
                if not same_size(axis.size, size):
                    raise Differ("it is not known that there are as many rows as weights", node)
                dims.append(axis)
            else:
                dims.append(origin(split.rows, dim))
        named = {split.inner, *(letter for letter, axis in split.letters.items() if axis is not None)}
        alone = [dim for dim, letter in enumerate(split.rows_letters) if letter not in named]
        if alone and all(axis.key == "experts" for axis in dims if isinstance(axis, Axis)):  # one token
            dims[alone[0]] = origin(split.rows, alone[0])
        return tuple(dims)

    # Weights and other tensors that are given -------------------------------------------------------------------------
    def weight_dims(self, node: fx.Node) -> Dims | None:
        """The axes of weights: those of experts or of the rows that they were gathered for, and the matrix's two."""
        shape, call = shape_of(node), read_call(node)
        source = None if call is None else call.args.get("input")
        if call is not None and isinstance(source, fx.Node):
            index = gathered_with(node)
            if index is not None:
                whole = rank_of(source) == 3 and parameter_of(source, gathered=True) is not None
                return (*axes_of(index), ROWS, COLUMNS) if whole else None
            if call.name in VIEWS | {"getitem"} and (len(shape or ()) != 3 or is_gathered(source)):
                inner = self.weight_dims(source)
                return inner if inner is None or call.name == "cast" else moved(call, inner)
        found = parameter_of(node) if shape is not None and len(shape) == 3 else None
        return None if found is None else (Axis("experts", node, 0), ROWS, COLUMNS)

    def weight(self, node: fx.Node) -> Laid:
        """The matrix of this iteration's expert, its two axes as they are stored."""
        call, shape = read_call(node), shape_of(node)
        source = None if call is None else call.args.get("input")
        index, stored = gathered_with(node), node
        if call is not None and isinstance(source, fx.Node):
            if index is not None:
                stored = source
                self.computed.add(node)
            elif call.name in VIEWS | {"getitem"} and (len(shape or ()) != 3 or is_gathered(source)):
                inner = self.weight(source)
                self.computed.add(node)
                if call.name != "cast":
                    return inner
                return Laid((), lambda: add_call(self.body, node, "to", inner.node(), dtype_of(node)))
        self.of_experts(index, axes_of(index) if index is not None else (Axis("experts", node, 0),), node)
        sizes = shape_of(stored)
        if sizes is None or sizes[0] != self.experts:
            raise Differ("the weights hold different numbers of experts", node)
        self.given.add(stored)
        return Laid((), lambda: self.of_this_expert(stored, node))

    def of_experts(self, index: fx.Node | None, dims: Dims, node: fx.Node) -> None:
        """All weights are of the same experts: those of one index, or each of all."""
        if not self.index_dims:
            self.index, self.index_dims = index, dims
            self.given |= set() if index is None else {index}
        if dims != self.index_dims or (index is None) != (self.index is None):
            raise Differ("the products are with the weights of different experts", node)

    def leaf(self, node: fx.Node, dims: Dims, at: fx.Node) -> Laid:
        """A tensor that the products read: rows, an expert's bias, a weight of each row, a constant."""
        axes, wide = [axis for axis in dims if isinstance(axis, Axis)], FEATURE in dims
        self.given.add(node)
        self.leaves.append((node, dims))
        if not axes and not wide:
            return Laid(dims, lambda: self.capture(self.before(torch.squeeze, node) if dims else node))
        if wide and [axis.key for axis in axes] == ["experts"]:
            return Laid(dims, lambda: self.of_this_expert(self.bias(node, dims), at))
        source = self.gathered_bias(node) if wide else None
        if source is not None:
            return Laid(dims, lambda: self.of_this_expert(source, at))
        if not axes:
            raise Differ(f"{target_name(at)} reads {node.name}, which all experts have in common", at)
        if wide:
            self.wide.append((node, dims))
        return Laid(dims, lambda: self.of_these_rows(self.spread(node, dims), wide, at))

    def of_this_expert(self, table: fx.Node, at: fx.Node) -> fx.Node:
        made = stands_at(self.body.call_function(operator.getitem, (self.capture(table), self.row)), at)
        value = certain(tensor_of(table))
        with torch.no_grad():
            made.meta["val"] = value.new_empty(value.shape[1:])
        return made

    def of_these_rows(self, table: fx.Node, wide: bool, at: fx.Node) -> fx.Node:
        index = self.token if wide else (self.token, None)
        if (table, wide) not in self.looked_up:
            self.looked_up[table, wide] = add_call(self.body, at, operator.getitem, self.capture(table), index)
        return self.looked_up[table, wide]

    def bias(self, node: fx.Node, dims: Dims) -> fx.Node:
        """[E, N] of a bias of all experts that was given axes of size 1."""
        if None in dims:
            node = self.before(operator.getitem, node, tuple(0 if axis is None else FULL for axis in dims))
        named = [axis for axis in dims if axis is not None]
        return node if named[-1] == FEATURE else self.before(torch.transpose, node, 0, 1)

    def gathered_bias(self, node: fx.Node) -> fx.Node | None:
        """b [E, N] of ``b[index]``, gathered with the index that the weights are gathered with; views of that too."""
        while (call := read_call(node)) is not None and isinstance(call.args.get("input"), fx.Node):
            index = gathered_with(node)
            if index is not None:
                shape = shape_of(call["input"]) or ()
                if self.index is None or axes_of(index) != self.index_dims or len(shape) != 2:
                    return None
                self.computed.add(node)
                self.given.add(call["input"])
                return call["input"] if shape[0] == self.experts else None
            if call.name != "unsqueeze" and not (call.name == "getitem" and keeps_all(call["index"])):
                return None
            node = call["input"]
        return None

    # The loop ---------------------------------------------------------------------------------------------------------

    def kept(self, made: fx.Node) -> fx.Node:
        self.written.append(made)
        return super().kept(made)

    def size(self, axis: Axis) -> Any:
        return axis.size if isinstance(axis.size, int) else self.before("size", axis.node, axis.dim)

    def spread(self, node: fx.Node, dims: Dims) -> fx.Node:
        """A tensor of some axes of rows as [S], with features [S, D]; the same along the axes that it lacks."""
        node, dims = bare(node, dims, self.under_no_grad)
        key = (same_value(node), dims)
        if key not in self.spread_nodes:
            made = self.flat(node, dims)
            if self.gates is not None:
                made = self.before(torch.index_select, made, 0, self.some_rows(self.gates))
            self.spread_nodes[key] = made
        return self.spread_nodes[key]

    def flat(self, node: fx.Node, dims: Dims) -> fx.Node:
        wanted = (*self.order, *((FEATURE,) if FEATURE in dims else ()))
        if None in dims:
            node = self.before(operator.getitem, node, tuple(0 if axis is None else FULL for axis in dims))
        present = [axis for axis in dims if axis is not None]
        order = [present.index(axis) for axis in wanted if axis in present]
        if order != sorted(order):
            node = self.before(torch.permute, node, tuple(order))
        for place, axis in enumerate(wanted):
            if axis not in present:
                node = self.before(torch.unsqueeze, node, place)
        if len(present) < len(wanted):
            lacks = [axis for axis in self.order if axis not in present]
            node = self.before("expand", node, *(self.size(axis) if axis in lacks else -1 for axis in wanted))
        rest = (shape_of(node) or ())[len(self.order) :]
        rows = math.prod(axis.size for axis in self.order)
        return node if len(self.order) == 1 else self.reshaped(node, (-1, *rest), (rows, *rest))

    def reshaped(self, node: fx.Node, sizes: tuple, shape: tuple) -> fx.Node:
        """Its shape is known. (Torch's own rule takes sizes to be equal that are so this once, as a capacity of 1.)"""
        if all(isinstance(size, int) for size in shape):
            return self.before("reshape", node, *sizes)
        value = certain(tensor_of(node))
        with torch.no_grad():
            like = value.new_empty(shape).requires_grad_(value.requires_grad)
        return self.kept(put_before(self.first, "reshape", (node, *sizes), self.first, like))

    def expert_of_each_row(self) -> fx.Node:
        """[S]. A number below 0 counts from the end and one beyond the experts raises, as in torch's indexing."""
        value = certain(tensor_of(self.end))
        numbers = self.index
        if numbers is None or not is_among(numbers, self.experts):
            with self.gm.graph.inserting_before(self.end):
                every = self.gm.graph.call_function(torch.arange, (self.experts,), {"device": value.device})
            with torch.no_grad():
                every.meta["val"] = value.new_empty((self.experts,), dtype=torch.int64)
            self.kept(stands_at(every, self.end))
            numbers = every if numbers is None else self.before(operator.getitem, every, numbers)
        return self.spread(numbers, self.index_dims)

    def loop(self) -> tuple[fx.Node, fx.Node]:
        """(the loop's node, what the last product gives), before the last product. Raises Differ, NoExperts."""
        rows, letters, split = self.product(self.down, last=True)
        if self.end is not self.down:
            self.laid_nodes[self.down] = rows
            rows, letters = self.laid(self.end), split.result
        self.order = [axis for axis in rows.dims if isinstance(axis, Axis)]
        if not self.wide or not set(self.index_dims) - {None} <= set(self.order):
            raise NoExperts("the rows are not those of the experts", self.end)
        self.check_between()
        zeros = self.before(torch.zeros_like, self.spread(*self.wide[0]))
        self.places = [Place(self.end, self.end, zeros)] * self.experts
        self.state.meta["val"], self.carried = value_of(zeros), True
        numbers = self.expert_of_each_row()
        chosen = add_call(self.body, self.end, torch.eq, self.capture(numbers), self.row)
        places = add_call(self.body, self.end, torch.where, chosen)
        self.token = add_call(self.body, self.end, operator.getitem, places, 0)
        add_rows(self.state, self.token, rows.node(), self.end)
        gates = self.rows_of_zeros(rows.node()) if self.gates is None else None
        if gates is not None:
            for node in reversed(self.written):
                self.gm.graph.erase_node(node)
            again = Batched(self.gm, self.down, self.experts, list(self.ups), storage_now(self.gm.graph), gates)
            self.computed, self.storage = again.computed, again.storage
            return again.loop()
        iterations = loop_of(self.gm, self, fx.GraphModule(torch.nn.Module(), self.body))
        return iterations.loop, self.result(certain(iterations.total), rows.dims, letters, split)

    def rows_of_zeros(self, result: fx.Node) -> Gates | None:
        """What says which rows are zero, where no expert need see these. result: what the iteration's function
        gives."""
        rows, dims = self.leaves[0]
        if self.index is not None or len(self.looked_up) != 1 or dims != (*self.order, FEATURE):
            return None
        if any(same_value(leaf) != same_value(rows) for leaf, _ in self.leaves):
            return None
        gates = gates_of(rows, self.storage, self.end)
        if gates is None or (shape_of(gates.gates) or ())[1] != self.experts:
            return None
        return gates if zero_at_zero(self.body, next(iter(self.looked_up.values())), result) else None

    def some_rows(self, gates: Gates) -> fx.Node:
        """[T · K]: the positions of the rows that are not zero; of others too, if a token has an expert twice."""
        if self.some is None:
            mask = self.before(torch.zeros_like, gates.gates, dtype=torch.uint8)
            mask = self.before(torch.scatter, mask, 1, gates.index, 1)
            for view in gates.views:
                call = certain(read_call(view))
                replaced = {call["input"]: mask}
                with self.gm.graph.inserting_before(self.end):
                    mask = self.gm.graph.node_copy(view, lambda node, table=replaced: table.get(node, node))  # type: ignore[misc]
                mask.meta["val"] = infer(mask)
                self.kept(mask)
            order = self.before(torch.argsort, self.before("reshape", mask, -1), descending=True, stable=True)
            flat = self.before("reshape", gates.index, -1)
            count = (shape_of(flat) or ())[0]
            count = count if isinstance(count, int) else self.before("size", flat, 0)
            self.some = self.before(operator.getitem, order, slice(None, count))
        return self.some

    def result(self, total: fx.Node, dims: Dims, letters: str, split: Split) -> fx.Node:
        """The rows' results as the last product gives them, and what else its line does with them."""
        value, sum_of_iterations = certain(tensor_of(self.end)), total
        if value.dtype != dtype_of(total):
            total = self.before("to", total, value.dtype)
        if self.gates is not None:
            whole = self.before(torch.zeros_like, self.flat(*self.wide[0]), dtype=value.dtype)
            total = self.before(torch.index_copy, whole, 0, self.some_rows(self.gates), total)
        if len(self.order) > 1:
            width = (shape_of(total) or ())[-1]
            sizes = [axis.size for axis in self.order]
            total = self.reshaped(total, (*map(self.size, self.order), width), (*sizes, width))
        present = [axis for axis in dims if axis is not None]
        if present[-1] != FEATURE:
            total = self.before("contiguous", self.before(torch.movedim, total, -1, present.index(FEATURE)))
        if None in dims:
            total = self.before(operator.getitem, total, tuple(None if axis is None else FULL for axis in dims))
        if split.others or letters != split.result:
            text = ",".join([letters, *(part for _, part in split.others)])
            total = self.before(torch.einsum, f"{text}->{split.result}", total, *(node for node, _ in split.others))
        if total is sum_of_iterations:
            total = self.before(operator.getitem, total, ...)  # it goes with the loop
        if not lie_alike(value, certain(tensor_of(total))):  # (who reads it may ask for a view that only those allow)
            order = memory_order(value)
            if order is None:
                raise Differ("its result does not fill its memory", self.end)
            total = self.before("contiguous", self.before(torch.permute, total, tuple(order)))
            total = self.before(torch.permute, total, tuple(map(order.index, range(len(order)))))
        total.meta["val"] = value
        return total

    def drop(self) -> list[fx.Node]:
        """Takes the products out, once nobody reads them. Returns what they alone may have used."""
        loose: list[fx.Node] = []
        for node in sorted(self.computed, reverse=True):
            if not node.users:
                loose += node.all_input_nodes
                node.graph.erase_node(node)
        gone = set(self.computed)
        return [node for node in dict.fromkeys(loose) if node not in gone or node.users]

    def check_between(self) -> None:
        """Computing all of it where the last product stands must read what is read where each product stands; and what
        plain Python makes between the products, and reads again in backward, must still be what it was."""
        begin = min(self.computed)
        used = self.computed | self.given
        made = (self.computed | {node for node in (self.index,) if node is not None}) - {self.end}
        for writer in self.storage.writers_of(used, begin, self.end):
            raise Differ(f"{target_name(writer)} changes between the products what they use", writer)
        for writer in self.storage.writers_of(made, self.end):
            raise Differ(f"{target_name(writer)} changes what the products were computed of", writer)
        for node in filter(has_effect, nodes_between(begin, self.end)):
            raise Differ(f"{target_name(node)} stands between the products", node)

    def write(self, like: fx.Node, dims: Dims, args: tuple, kwargs: Any = None, target: Any = None) -> fx.Node:
        """A node of the body that computes of rows what ``like`` computes in the graph. dims: the axes of that."""
        op = like.op if target is None else "call_function"
        made = stands_at(self.body.create_node(op, target or like.target, args, kwargs or {}), like)
        value, token, shape = certain(tensor_of(like)), certain(tensor_of(self.token)), certain(shape_of(like))
        width = shape[dims.index(FEATURE) - len(dims)] if len(dims) == len(shape) else None
        with torch.no_grad():
            made.meta["val"] = value.new_empty((token.shape[0], width or self.width(like)))
        return made

    def width(self, node: fx.Node) -> Any:
        """How many features a down-projection gives that its line combines with something else at once."""
        split = self.split(node)
        return (shape_of(split.weight) or ())[list(split.letters).index(split.outer)]


def axes_of(index: fx.Node) -> Dims:
    key, shape = same_value(index), shape_of(index) or ()
    return tuple(None if sized_one(size) else Axis((key, dim), index, dim) for dim, size in enumerate(shape))


