"""Writes the experts operator in the place of a proven loop."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moebius.kernels import experts as experts_operator
from moebius.kernels import saved_elements
from moebius.kernels.contract import stored_width
from moebius.kernels.precision import text_of
from moebius.lowering.aliasing import Storage
from moebius.lowering.autocast import autocast_at
from moebius.lowering.experts import weight_concat
from moebius.lowering.experts.claims import Claim, Fused, nodes_after
from moebius.lowering.experts.facts import Invariant, Linear, OwnVector, RowFunction, RowWeight, Slice
from moebius.lowering.experts.proof import state_position, target_of
from moebius.lowering.experts.routing import allowed_indices, is_among, proven_within
from moebius.lowering.experts.zeros import number_of
from moebius.lowering.graph import ExpertRegion, LoweringOptions
from moebius.lowering.operators import behind, read_call
from moebius.lowering.torch_private import assert_holds
from moebius.lowering.values import (
    add_call,
    certain,
    dtype_of,
    infer,
    memory_order,
    put_before,
    rank_of,
    shape_of,
    stands_at,
    tensor_of,
)

LAYERS = itertools.count()


def fill_region(region: ExpertRegion, claim: Fused, options: LoweringOptions) -> None:
    """Sizes, kernel and memory of a proven region."""
    x = certain(tensor_of(claim.x.source.node))
    tokens, width = x.shape
    top_k = fill_in_routing(region, claim)
    region.kernel = kernel_for(x)
    narrow = len(claim.down.weight.range_of(3 - claim.down.out_axis))
    if isinstance(tokens, int) and isinstance(top_k, int) and claim.after is None:
        joined = claim.up is not None and is_whole(claim.gate, claim.up) is None and not weight_concat.applies(options)
        rows = (tokens, top_k, claim.gate.dtype.itemsize)
        region.saved_bytes = kept_bytes(rows, (claim.experts, width, narrow), claim.up is not None, options)
        if joined:  # gate and up are put into one tensor, which is kept
            region.saved_bytes += claim.experts * 2 * narrow * width * claim.gate.dtype.itemsize


def fill_in_routing(region: ExpertRegion, claim: Claim) -> Any:
    """How many experts there are, and how many a token goes to. Returns the latter, where it is no constant too."""
    index = certain(shape_of(claim.index))
    top_k = index[1] if len(index) == 2 else 1
    region.lowered, region.num_experts = True, claim.experts
    region.top_k = top_k if isinstance(top_k, int) else None
    return top_k


def kept_bytes(
    rows: tuple[int, int, int], sizes: tuple[int, int, int], gated: bool, options: LoweringOptions
) -> int:
    """What the operator keeps for backward. rows: T, K, bytes of a number; sizes: E, D, N."""
    (tokens, top_k, size), (experts, width, narrow) = rows, sizes
    elements = saved_elements(tokens, width, narrow, top_k, save="recompute", num_experts=experts)
    width_h = 2 * narrow if gated else narrow
    h_bytes = tokens * top_k * stored_width(width_h, options.save) * (1 if options.save == "fp8" else size)
    return elements * size + h_bytes


def kernel_for(x: torch.Tensor) -> str:
    """Which form of the operator "auto" takes for tensors like x."""
    if x.device.type == "cpu":
        return "cpu"
    return "triton" if x.device.type == "cuda" and x.dtype.itemsize < 8 else "reference"


# ----------------------------------------------------------------------------------------------------------------------
# Writing the operator
# ----------------------------------------------------------------------------------------------------------------------


class Writer:
    """Writes nodes before a loop node, from facts."""

    def __init__(self, claim: Claim):
        self.claim, self.loop = claim, claim.reader.loop
        self.graph = self.loop.graph
        self.hoisted: dict[fx.Node, Any] = {}
        self.made: list[fx.Node] = []  # all nodes it wrote, in order

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.loop):
            return self.known(add_call(self.graph, self.claim.node, target, *args, **kwargs))

    def put(self, target: Callable[..., Any], args: tuple, like: fx.Node, value: Any) -> fx.Node:
        """A node whose value is known, before the loop."""
        return self.known(put_before(self.loop, target, args, like, value))

    def known(self, node: fx.Node) -> fx.Node:
        self.claim.storage.add(node)
        self.made.append(node)
        return node

    def invariant(self, fact: Invariant) -> fx.Node:
        """The outer node that holds an invariant; what the body computes from invariants alone is copied out."""
        found = self.outside(fact.node)
        assert isinstance(found, fx.Node)
        return found

    def outside(self, node: fx.Node) -> Any:
        if node.graph is self.graph:
            return node
        if node not in self.hoisted:
            if node.op == "placeholder":
                self.hoisted[node] = self.claim.reader.outer_of(node)
            else:
                with self.graph.inserting_before(self.loop):
                    self.hoisted[node] = self.known(self.graph.node_copy(node, self.outside))
        return self.hoisted[node]

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if dtype_of(node) == dtype else self.call("to", node, dtype)

    def matrix(self, weight: Slice, out_axis: int) -> fx.Node:
        """[E, out, in]: the weights of all experts, oriented as in F.linear."""
        node = self.cast(self.of_experts(weight), weight.dtype)
        if out_axis == 2:
            node = self.call(torch.transpose, node, 1, 2)
        return self.rows(node, weight.range_of(out_axis))

    def joined(self, parts: list[fx.Node]) -> fx.Node:
        """Gate and up as one, [E, out, …]."""
        node = self.call(torch.cat, parts, 1)
        node.meta[weight_concat.JOINED] = True
        return node

    def vector(self, bias: Slice) -> fx.Node:
        """[E, out]: the biases of all experts."""
        return self.rows(self.cast(self.of_experts(bias), bias.dtype), bias.range_of(1))

    def of_experts(self, weight: Slice) -> fx.Node:
        """[E, …]: of a weight that may hold more experts than iterations run."""
        node = self.invariant(weight.weight)
        shape = certain(shape_of(node))
        more = shape[0] != self.claim.experts
        return self.call(operator.getitem, node, slice(None, self.claim.experts)) if more else node

    def rows(self, node: fx.Node, part: range, axis: int = 1) -> fx.Node:
        """node[:, part], or a part along another axis."""
        shape = certain(shape_of(node))
        if part == range(shape[axis]):
            return node
        return self.call(operator.getitem, node, (*[slice(None)] * axis, slice(part.start, part.stop, part.step)))

    def weight(self, weight: RowWeight, index: fx.Node) -> fx.Node:
        """[T, K] of one factor of the routing weight."""
        node = self.cast(self.invariant(weight.source), weight.dtype)
        for axis, position in reversed(weight.picked):
            node = self.call(torch.select, node, axis, position)
        if weight.axes == (0, "e"):
            return self.call(torch.gather, node, 1, index)
        if weight.axes == (0,):
            return self.call("expand_as", self.call(torch.unsqueeze, node, 1), index)
        return node


def is_whole(gate: Linear, up: Linear) -> str | None:
    """The operator's name of the layout if gate and up are the two halves of one weight (and bias)."""
    if gate.weight.weight != up.weight.weight or gate.out_axis != up.out_axis or gate.weight.dtype != up.weight.dtype:
        return None
    shape = certain(shape_of(gate.weight.weight.node))
    width = shape[gate.out_axis]
    halves = (gate.weight.range_of(gate.out_axis), up.weight.range_of(up.out_axis))
    layouts = {
        "concat": (range(width // 2), range(width // 2, width)),
        "interleaved": (range(0, width, 2), range(1, width, 2)),
    }
    for name, layout in layouts.items():
        if width % 2 == 0 and halves == layout:
            if gate.bias is None or up.bias is None:
                return name
            one = gate.bias.weight == up.bias.weight and gate.bias.dtype == up.bias.dtype
            sizes = shape_of(gate.bias.weight.node)
            if one and (gate.bias.ranges[0], up.bias.ranges[0]) == layout and sizes is not None and sizes[1] == width:
                return name
    return None


def write_operator(claim: Fused, options: LoweringOptions, known: dict[Any, Any]) -> fx.Node:
    """The nodes of the operator and of what it reads, before the loop. Returns its result, [T, D] in x's dtype.

    known: what operators on equal tensors gave on fakes before, of which the metadata alone counts.
    """
    asked = {"save": options.save} if options.save != "default" else {}
    if precision := text_of(options.precision):
        # a budget's choice is a layer's own: each has a name
        asked["precision"] = precision + (f"@layer {next(LAYERS)}" if precision.startswith("budget") else "")
    writer = Writer(claim)
    index, running = routing(claim, writer)
    x = writer.cast(writer.invariant(claim.x.source), claim.x.dtype)
    scale = routing_scale(claim, writer, index, x)
    slots = running
    if claim.after is not None:  # a row for each slot: what comes after looks at each expert's result by itself
        running = writer.call("reshape", running, -1, 1)
        x = writer.call(torch.repeat_interleave, x, (shape_of(slots) or (0, 1))[1], dim=0)
    gate, up = claim.gate, claim.up
    whole = Slice(
        gate.weight.weight,
        gate.weight.axes,
        tuple(range(s) for s in shape_of(gate.weight.weight.node)[1:]),  # type: ignore[index]
        gate.weight.dtype,
    )
    layout = "none" if up is None else is_whole(gate, up)
    bias = None
    if up is None:
        gate_up = writer.matrix(gate.weight, gate.out_axis)
        bias = None if gate.bias is None else writer.vector(gate.bias)
    elif layout is not None and (gate.bias is None) is (up.bias is None):
        gate_up = writer.matrix(whole, gate.out_axis)
        bias = None if gate.bias is None else writer.cast(writer.of_experts(gate.bias), gate.bias.dtype)
    else:
        layout = "concat"
        gate_up = writer.joined([writer.matrix(g.weight, g.out_axis) for g in (gate, up)])
        vectors = [None if b is None else writer.vector(b) for b in (gate.bias, up.bias)]
        one = vectors[0] or vectors[1]
        if one is not None:  # the other has zeros
            bias = writer.joined([v or writer.call(torch.zeros_like, one) for v in vectors])
    down = writer.matrix(claim.down.weight, claim.down.out_axis)
    down_bias = None if claim.down.bias is None else writer.vector(claim.down.bias)
    inside = None if claim.after is not None else scale
    tensors = (x, gate_up, down, running, inside, bias, down_bias)
    casts = autocast_at(writer.loop)
    signature = (*map(metadata, tensors), claim.activation, layout, *asked.values(), casts)
    named: dict[str, Any] = {"gate": layout, "gate_up_bias": bias, "down_bias": down_bias, **asked}
    with writer.graph.inserting_before(writer.loop):
        arguments = (x, gate_up, down, running, inside, claim.activation)
        node = stands_at(writer.graph.call_function(experts_operator, arguments, named), claim.node)
    if signature not in known:
        known[signature] = infer(node)
    node.meta["val"] = known[signature]
    writer.known(node)
    return node if claim.after is None else after_each_row(claim, writer, node, slots, scale)


def after_each_row(claim: Fused, writer: Writer, rows: fx.Node, index: fx.Node, scale: fx.Node | None) -> fx.Node:
    """Does with the experts' results [T·K, D] what the iterations do with each row, and adds up a token's K slots.

    index, scale: [T, K]. Slots that go to no expert add nothing, whatever comes after makes of their zeros.
    """
    after = certain(claim.after)
    base = certain(after.base)
    reader, flat = claim.reader, writer.call("reshape", index, -1)
    made: dict[fx.Node, Any] = {}

    def place(node: fx.Node) -> Any:
        fact = reader.facts.get(node)
        if fact == base:
            return rows
        if isinstance(fact, RowFunction | OwnVector):
            return made[node]
        if isinstance(fact, Slice):
            low = writer.call(torch.clamp, flat, 0, claim.experts - 1)
            return writer.call(torch.index_select, writer.vector(fact), 0, low)
        return writer.outside(node)

    rows = writer.cast(rows, base.dtype)
    for node in nodes_after(reader, after):
        if isinstance(reader.facts.get(node), RowFunction | OwnVector):
            made[node] = norm_apart(claim, writer, node, place) or copied(writer, node, place)
    result = place(after.node)
    if not is_among(index, claim.experts):
        low, high = writer.call(torch.ge, flat, 0), writer.call(torch.lt, flat, claim.experts)
        inside = writer.call(torch.logical_and, low, high)
        result = writer.call(torch.where, writer.call(torch.unsqueeze, inside, 1), result, 0.0)
    if scale is not None:
        result = writer.call(torch.mul, result, writer.call("reshape", scale, -1, 1))
    shape = certain(shape_of(index))
    width = (shape_of(rows) or (0, 0))[1]
    return writer.call(torch.sum, writer.call("reshape", result, -1, shape[1], width), 1)


def copied(writer: Writer, node: fx.Node, place: Callable[[fx.Node], Any]) -> fx.Node:
    with writer.graph.inserting_before(writer.loop):
        copy = writer.graph.node_copy(node, place)
        copy.meta["val"] = infer(copy)
        return writer.known(copy)


def norm_apart(claim: Claim, writer: Writer, node: fx.Node, place: Callable[[fx.Node], Any]) -> fx.Node | None:
    """A norm whose weight is the expert's own, as a norm without one, times the weight of each row's expert."""
    call = read_call(node)
    if call is None or call.name not in ("layer_norm", "rms_norm"):
        return None
    own = [call.args.get(name) for name in ("weight", "bias")]
    if not any(isinstance(w, fx.Node) and isinstance(claim.reader.facts.get(w), Slice | OwnVector) for w in own):
        return None
    result = writer.call(node.target, place(call["input"]), call["normalized_shape"], eps=call["eps"])
    for target, vector in zip((torch.mul, torch.add), own, strict=True):
        if isinstance(vector, fx.Node):
            result = writer.call(target, result, place(vector))
    return result


def metadata(node: fx.Node | None) -> Any:
    """What an operator's fake form may look at: equal for tensors of equal sizes, strides, dtype and device."""
    value = tensor_of(node)
    return value if value is None else (tuple(map(str, (*value.shape, *value.stride()))), value.dtype, value.device)


def routing(claim: Claim, writer: Writer) -> tuple[fx.Node, fx.Node]:
    """The routing index [T, K], which is checked; and with the dropped slots, where not all of ``keep`` hold, sent to
    no expert."""
    index = running = writer.invariant(claim.selection.index)
    guard_routing(claim, writer, index)
    for mask in sorted(claim.selection.keep, key=repr):
        running = writer.call(torch.where, writer.invariant(mask), running, claim.experts)
    if rank_of(index) == 1:
        index = writer.call(torch.unsqueeze, index, 1)
        running = index if not claim.selection.keep else writer.call(torch.unsqueeze, running, 1)
    return index, running


def routing_scale(claim: Fused, writer: Writer, index: fx.Node, x: fx.Node) -> fx.Node | None:
    """[T, K] by which rows are scaled: the product of the routing weights and the constant factor."""
    scale: fx.Node | None = None
    for weight in claim.weights:
        factor = writer.weight(weight, index)
        if rank_of(factor) == 1:
            factor = writer.call(torch.unsqueeze, factor, 1)
        scale = factor if scale is None else writer.call(torch.mul, scale, factor)
    if claim.coefficient == 1.0:
        return scale
    if scale is None:
        value = certain(tensor_of(x))
        scale = writer.call(torch.ones_like, index, dtype=value.dtype)
    return writer.call(torch.mul, scale, claim.coefficient)


def guard_routing(claim: Claim, writer: Writer, index: fx.Node) -> None:
    """Where the user's loop raises for some routing indices and they are not excluded, the graph raises too."""
    found = allowed_indices(claim.limit, claim.hits, claim.selection, claim.experts, claim.reader.evidence.skips)
    if isinstance(found, str) or proven_within(index, found):
        return
    conditions = []
    if found.low is not None:
        conditions.append(writer.call(torch.ge, index, found.low))
    if found.high is not None:
        conditions.append(writer.call(torch.lt, index, found.high))
    condition = conditions[0] if len(conditions) == 1 else writer.call(torch.logical_and, *conditions)
    message = f"a routing index lies outside of [{found.low}, {found.high}): this layer has {claim.experts} experts"
    put_before(claim.reader.loop, assert_holds, (writer.call(torch.all, condition), message), claim.node, None)


# ----------------------------------------------------------------------------------------------------------------------
# Putting it in place
# ----------------------------------------------------------------------------------------------------------------------


def put_in_place(claim: Claim, result: fx.Node) -> list[fx.Node]:
    """The operator's result takes the place of the sum, and the loop goes. Returns what only the loop may have used."""
    loop = claim.reader.loop
    target, writer = target_of(claim), Writer(claim)
    value = certain(tensor_of(target))
    result = writer.cast(result, value.dtype)
    storage = claim.storage
    zero = is_zero(target, loop, storage)
    if claim.sum.state.carried:  # each iteration makes a new tensor, in rows
        give_back(claim, result if zero else writer.call(torch.add, target, result))
    else:
        give_back(claim, None)
        if zero and lies_in_rows(value) and is_only_name(target, loop, storage):
            target.replace_all_uses_with(result, delete_user_cb=lambda user: loop < user)
            storage.replace(target, result)
        else:
            # (not by add_call: its value is that of ``target``, which must not be written here)
            storage.add(put_before(loop, "add_", (target, result), claim.node, target.meta["val"]))
    operands = loop.all_input_nodes
    loop.graph.erase_node(loop)
    storage.forget(loop)
    return operands


def give_back(claim: Claim, total: fx.Node | None) -> None:
    """Users of the loop's carried results get the sum, or what went in."""
    loop = claim.reader.loop
    for user in list(loop.users):
        position = user.args[1]
        assert isinstance(position, int)
        if position == state_position(claim) and total is not None:
            user.replace_all_uses_with(total)
            claim.storage.replace(user, total)
        elif user.users:
            user.replace_all_uses_with(claim.reader.call["carried"][position])
        loop.graph.erase_node(user)


def lies_in_rows(value: torch.Tensor) -> bool:
    """Whether it has the strides of the operator's result; ``zeros_like`` of a transposed tensor does not, and who
    reads the sum may ask for a view that only those allow."""
    return memory_order(value) == [*range(value.dim())]


def is_zero(node: fx.Node, loop: fx.Node, storage: Storage) -> bool:
    """Whether the tensor certainly holds zeros when the loop begins."""
    made = behind(node, lambda call: call.name in ("reshape", "contiguous", "cast", "clone", "flatten"))
    return number_of(made) == 0 and storage.writer_into((made, node), loop) is None


def is_only_name(node: fx.Node, loop: fx.Node, storage: Storage) -> bool:
    """Whether nothing after the loop reaches the tensor's storage but through this node."""
    return not any(
        loop < user for other in storage.family(node) if other is not node and not loop < other for user in other.users
    )
