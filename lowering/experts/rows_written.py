"""Writes what a proven layer computes of each row (by_row.py) for the rows of all experts, in the place of its loop."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.by_row import ByRow, same_as
from moebius.lowering.experts.claims import Refused
from moebius.lowering.experts.facts import Fact, OwnVector, Rows, RowWeight, Slice
from moebius.lowering.experts.proof import target_of
from moebius.lowering.experts.routing import is_among
from moebius.lowering.experts.rules_computed import PRODUCTS
from moebius.lowering.experts.sorting import draw_noise, project, sort_slots
from moebius.lowering.experts.stacking import block_experts, block_offsets
from moebius.lowering.experts.writing import Writer, copied, fill_in_routing, norm_apart, routing
from moebius.lowering.graph import ExpertRegion
from moebius.lowering.operators import Call, read_call, target_name
from moebius.lowering.torch_private import fake_mode_of
from moebius.lowering.values import certain, shape_of, tensor_of

KERNEL = "projection by projection"


def fill_region(region: ExpertRegion, claim: ByRow) -> None:
    fill_in_routing(region, claim)
    region.kernel = KERNEL


class RowsWriter:
    """slot, expert, offsets: as sort_slots gives them. token: of each row. Where the rows stand in order of their
    experts already (in_order) neither slots nor tokens are asked for, and expert stands for both."""

    def __init__(self, claim: ByRow):
        self.claim, self.writer = claim, Writer(claim)
        self.made: dict[fx.Node, Any] = {}
        self.looked_up: dict[Fact, fx.Node] = {}
        writer = self.writer
        self.index, self.running = routing(claim, writer)
        self.in_order = len(blocks_of(self.running)) > 0  # each row is the slot of its number, and its token
        self.slot, self.expert, self.offsets = self.sort()
        top_k = (shape_of(self.index) or (0, 1))[1]
        one = isinstance(top_k, int) and top_k == 1
        self.token = self.slot if one else writer.call(torch.floor_divide, self.slot, top_k)
        self.noise = self.draw()

    def sort(self) -> list[fx.Node]:
        claim, writer = self.claim, self.writer
        if self.in_order:
            expert = writer.call("reshape", self.running, -1)
            rows = certain(tensor_of(expert))
            with torch.no_grad():
                bounds = rows.new_empty((claim.experts + 1,))
            offsets = writer.put(block_offsets, blocks_of(self.running), claim.node, bounds)
            return [expert, expert, offsets]
        axes = tuple(axis for axis in claim.selection.axes if isinstance(axis, int))
        axes += tuple(axis for axis in (0, 1) if axis not in axes)
        example = certain(tensor_of(self.running))
        whole = is_among(self.index, claim.experts) and not claim.selection.keep
        count = example.shape[0] * example.shape[1] if whole else unknown_size(example)
        with torch.no_grad(), fake_mode_of([example]):
            rows = example.new_empty((count,), dtype=torch.int64)
            value = (rows, rows.clone(), example.new_empty((claim.experts + 1,), dtype=torch.int64))
        node = writer.put(sort_slots, (self.running, claim.experts, axes), claim.node, value)
        return [writer.call(operator.getitem, node, i) for i in range(3)]

    def draw(self) -> dict[fx.Node, fx.Node]:
        """What each dropout multiplies its rows with."""
        claim, writer = self.claim, self.writer
        values = [(call, tensor_of(call.node)) for call in claim.dropouts]
        asked = tuple((call["p"], value.shape[1], value.dtype) for call, value in values if value is not None)
        if not asked:
            return {}
        rows, place = (shape_of(self.slot) or (0,))[0], certain(tensor_of(self.slot)).device
        with torch.no_grad(), fake_mode_of([tensor_of(self.slot)]):
            value = tuple(torch.empty(rows, width, dtype=dtype, device=place) for _, width, dtype in asked)
        node = writer.put(draw_noise, (self.offsets, *asked), claim.node, value)
        return {call.node: writer.call(operator.getitem, node, i) for i, call in enumerate(claim.dropouts)}

    def result(self) -> fx.Node:
        """[T, width], in the dtype of what is added to."""
        claim, writer = self.claim, self.writer
        for node in claim.nodes:
            self.made[node] = self.computed(node)
        rows = self.place(claim.rows)
        target = certain(tensor_of(target_of(claim)))
        if claim.factor != 1:
            rows = writer.call(torch.mul, rows, claim.factor)
        rows = writer.cast(rows, target.dtype)
        if self.in_order:
            return rows
        tokens, width = (shape_of(self.index) or (0,))[0], target.shape[1]
        zeros = writer.call("new_zeros", rows, (self.size(tokens), width))
        return writer.call(torch.index_add, zeros, 0, self.token, rows)

    def size(self, tokens: Any) -> Any:
        return tokens if isinstance(tokens, int) else self.writer.call("size", self.index, 0)

    # ------------------------------------------------------------------------------------------------------------------

    def place(self, node: Any) -> Any:
        """What stands for a node of the body."""
        before = same_as(self.claim.reader, node)
        if before is not None:
            return self.place(before)
        if node in self.made:
            return self.made[node]
        fact = self.claim.reader.facts[node]
        if isinstance(fact, Rows | RowWeight | Slice):
            if fact not in self.looked_up:
                self.looked_up[fact] = self.look_up(fact)
            return self.looked_up[fact]
        return self.writer.outside(node)

    def look_up(self, fact: Rows | RowWeight | Slice) -> fx.Node:
        writer = self.writer
        if isinstance(fact, Rows):
            rows = writer.invariant(fact.source)
            if not self.in_order:
                rows = writer.call(torch.index_select, rows, 0, self.token)
            return writer.cast(rows, fact.dtype)
        if isinstance(fact, Slice):
            return writer.call(torch.index_select, writer.vector(fact), 0, self.expert)
        weight = writer.weight(fact, self.index)
        weight = writer.call("reshape", weight, -1)
        weight = weight if self.in_order else writer.call(torch.index_select, weight, 0, self.slot)
        return writer.call(torch.unsqueeze, weight, 1) if fact.column else weight

    def computed(self, node: fx.Node) -> Any:
        """What a row function of the body is of the rows of all experts. Raises Refused."""
        call, writer = certain(read_call(node)), self.writer
        if call.name in PRODUCTS and (made := self.projected(call)) is not None:
            result: Any = made
        elif call.name == "dropout":
            result = writer.call(torch.mul, self.place(call["input"]), self.noise[node])
        elif isinstance(self.claim.reader.facts[node], OwnVector):
            result = copied(writer, node, self.place)
        else:
            result = norm_apart(self.claim, writer, node, self.place) or copied(writer, node, self.place)
        wanted, found = tensor_of(node), tensor_of(result)
        if wanted is not None and (found is None or found.dtype != wanted.dtype):
            raise Refused("row by row", f"{target_name(node)} is computed in {wanted.dtype} by an outer rule", node)
        return result

    def projected(self, call: Call) -> fx.Node | None:
        """A projection with a matrix of the experts; None for one with a matrix that all have."""
        reader, writer = self.claim.reader, self.writer
        weight = reader.fact(call["weight"] if call.name == "linear" else call["other"])
        bias = reader.fact(None if call.name == "matmul" else call["bias"])
        if not isinstance(weight, Slice):
            return None
        out_axis = weight.axes[0 if call.name == "linear" else 1]
        made = certain(tensor_of(call.node))
        vector = writer.cast(writer.vector(bias), made.dtype) if isinstance(bias, Slice) else None
        given = writer.cast(self.place(call["input"]), made.dtype)  # (under autocast: the same casts as it makes)
        matrix = writer.rows(writer.matrix(weight, out_axis), weight.range_of(3 - out_axis), 2)  # (what is read of it)
        matrix = writer.cast(matrix, made.dtype)
        rows = certain(tensor_of(given))
        with torch.no_grad():
            value = rows.new_empty((rows.shape[0], (shape_of(matrix) or (0, 0))[1]))
        return writer.put(project, (given, matrix, self.offsets, vector), call.node, value)


def blocks_of(index: fx.Node) -> tuple[Any, ...]:
    """The blocks of rows, one for each expert, that a routing index [T, 1] stands for; none of any other index."""
    call = read_call(index)
    source = call["input"] if call is not None and call.name == "unsqueeze" else None
    return source.args if isinstance(source, fx.Node) and source.target is block_experts else ()


def unknown_size(example: torch.Tensor) -> Any:
    """A size that only running tells; the number of slots where sizes are plain."""
    env = getattr(getattr(example, "fake_mode", None), "shape_env", None)
    return env.create_unbacked_symint() if env is not None else example.shape[0] * example.shape[1]
