"""What shows that data route tokens along an axis of experts, where nothing in the experts themselves does.

The rows of all experts lie in one tensor, made of a list or by one product with the weights [E, …] of all of them, and
then are scaled along the experts (``y * gates[:, :, None]``), summed with weights of data (einsum, a matrix product),
or looked up (``gather``, ``y[e, token]``). Or the rows that they read were looked up, or were mixed by what also mixes
their results (Soft-MoE's slots). Or it is the weights of the experts that data look up or mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.batched import index_of, parameter_of, weight_of
from moebius.lowering.experts.views import BATCHED, equation_of, moved, sized_one
from moebius.lowering.operators import ELEMENTWISE, Call, behind, call_name, read_call
from moebius.lowering.values import certain, rank_of, shape_of, tensor_of

SUMS_OF_ROWS = frozenset({torch.stack})
VIEWS = frozenset({"cast", "contiguous", "clone", "type_as", "detach", "reshape", "flatten", "unsqueeze", "squeeze"})
PIECES = frozenset({"getitem", "select", "narrow", "chunk", "split", "unbind"})
LOOKUPS = frozenset({"index_select", "gather", "take_along_dim"})
NORMS = frozenset({"layer_norm", "rms_norm", "dropout", "softmax"})
SORTS = frozenset({torch.sort, "sort"})
GATES = frozenset({"softmax", "sigmoid", "softplus", "topk", "scatter", "one_hot", "argmax", "eq", "relu"})
NEAR = 24  # nodes looked at
WIDE = 64


def is_routed_along(place: fx.Node) -> bool:
    """Whether a stack of results is weighted or looked up along its axis of experts."""
    call, rank = read_call(place), rank_of(place)
    dim = None if call is None else call["dim"]
    return isinstance(dim, int) and rank > 1 and follow(place, dim % rank) is not None


def follow(start: fx.Node, axis: int) -> fx.Node | None:
    """The node that weights or looks up along an axis of a tensor, or of what row by row is made of it."""
    pending, seen = [(start, axis)], 0
    while pending and seen < NEAR:
        node, axis = pending.pop()
        for user in node.users:
            seen += 1
            if is_product(user):
                if contracts(user, node, axis):
                    return user
                continue
            call = read_call(user)
            if call is None:
                continue
            if call.name in LOOKUPS:
                dim = call["dim"]
                if call["input"] is node and isinstance(dim, int) and dim % len(shape_of(node) or (0,)) == axis:
                    return user
                continue
            if call.name in ("mul", "where", "masked_fill") and scales(call, node, axis):
                return user
            found = axis_after(call, node, axis)
            if found is True:
                return user
            if found is not None and found is not False:
                pending.append((user, found))
    return None


def axis_after(call: Call, node: fx.Node, axis: int) -> int | bool | None:
    """Where the axis is in what an operator makes of a tensor; True if a tensor looks it up, None if it is lost."""
    shape, after = shape_of(node) or (), shape_of(call.node)
    if after is None:
        return None
    if call.name == "getitem" and call["input"] is node:
        return axis_in_lookup(call["index"], len(shape), axis)
    if call.name in ELEMENTWISE | NORMS or (call.name in VIEWS and len(after) == len(shape)):
        return axis + len(after) - len(shape) if len(after) >= len(shape) else None
    order = moved(call, tuple(range(len(shape))))
    return order.index(axis) if order is not None and axis in order else None


def axis_in_lookup(index: Any, rank: int, axis: int) -> int | bool | None:
    """Where the axis is behind ``[…]``; True if a tensor stands at it."""
    keys = list(index) if isinstance(index, tuple) else [index]
    named = sum(key is not None and key is not ... for key in keys)
    places = [i for i, key in enumerate(keys) if key is ...] or [len(keys)]
    keys[places[0] : places[0] + 1] = [slice(None)] * (rank - named)
    before = after = 0
    for key in keys:
        value = tensor_of(key) if isinstance(key, fx.Node) else None
        if key is None:
            after += 1
        elif value is not None and before <= axis < before + (value.dim() if value.dtype == torch.bool else 1):
            return True
        elif value is not None:
            return None
        elif before == axis:
            return after if isinstance(key, slice) and key == slice(None) else None
        else:
            before, after = before + 1, after + (not isinstance(key, int))
    return None


def scales(call: Call, node: fx.Node, axis: int) -> bool:
    """Whether an elementwise operator's other operand has the axis, and none of features."""
    rank = rank_of(node)
    for other in call.node.all_input_nodes:
        shape = shape_of(other)
        if other is node or not shape or len(shape) < rank - axis or other.op == "placeholder":
            continue
        own = shape[len(shape) - rank + axis] if len(shape) - rank + axis >= 0 else 1
        features = shape[-1] if axis != rank - 1 else shape[-2] if len(shape) > 1 else 1
        if not sized_one(own) and sized_one(features):
            return True
    return False


def is_product(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in BATCHED


def contracts(product: fx.Node, node: fx.Node, axis: int) -> bool:
    """Whether a product sums over the axis with weights made of data, and keeps the features."""
    equation = equation_of(product)
    if equation is None:
        return False
    for operand, letters in zip(equation.operands, equation.letters, strict=True):
        if operand is not node or len(letters) <= axis:
            continue
        letter, rest = letters[axis], letters.replace(letters[axis], "")
        others = [(o, own) for o, own in zip(equation.operands, equation.letters, strict=True) if o is not node]
        weighs = any(letter in own and not set(rest[-1:]) & set(own) and is_data(o) for o, own in others)
        if weighs and letter not in equation.result and rest[-1:] in equation.result:
            return True
    return False


def is_gate(node: fx.Node) -> bool:
    """Whether a tensor is made as gates are: by a softmax or sigmoid, or by choosing."""
    calls = [call for one in made_of(node) if (call := read_call(one)) is not None]
    return any(call.name in GATES for call in calls)


def is_data(node: fx.Node) -> bool:
    """Whether a tensor is not just a view of a parameter."""
    base = behind(node, lambda call: call.op.alias)
    value = tensor_of(base)
    return base.op != "placeholder" or (value is not None and not value.requires_grad)


# ----------------------------------------------------------------------------------------------------------------------
# Rows that were routed before the experts read them
# ----------------------------------------------------------------------------------------------------------------------


def looked_up_rows(piece: fx.Node, place: fx.Node) -> bool:
    """Whether a piece of a tensor is rows that were looked up or mixed by data. place: where the results meet."""
    call = read_call(piece)
    node, width = piece, (shape_of(piece) or (None,))[-1]
    for _ in range(NEAR):
        call = read_call(node)
        if node.target in SORTS:
            return True
        if call is None or not isinstance(call.args.get("input"), fx.Node):
            break
        looks_up = call.name in LOOKUPS or (call.name == "getitem" and has_tensor(call["index"]))
        if looks_up:
            return str((shape_of(node) or (None,))[-1]) == str(width)
        if call.name not in VIEWS | PIECES | NORMS | ELEMENTWISE:
            break
        node = call["input"]
    return is_mixing(node) and mixed_alike(node, place)


def has_tensor(index: Any) -> bool:
    keys = index if isinstance(index, tuple) else (index,)
    return any(isinstance(key, fx.Node) and tensor_of(key) is not None and tensor_of(key).dim() > 0 for key in keys)  # type: ignore[union-attr]


def is_mixing(node: fx.Node) -> bool:
    """A product of two tensors of which none is a parameter."""
    product = is_product(node) or call_name(node) == "matmul"
    return product and len(node.all_input_nodes) == 2 and all(map(is_data, node.all_input_nodes))


def mixed_alike(rows: fx.Node, place: fx.Node) -> bool:
    """Whether what the experts gave is mixed by weights that are made of the same numbers as those of their rows."""
    made = {node for operand in rows.all_input_nodes for node in made_of(operand)}
    pending, seen = [place], 0
    while pending and seen < NEAR:
        node = pending.pop()
        for user in node.users:
            seen += 1
            call = read_call(user)
            if is_mixing(user):
                if any(made & made_of(other) for other in user.all_input_nodes if other is not node):
                    return True
            elif call is not None and call.name in VIEWS | {"permute", "transpose", "t", "T", "mT", "expand"}:
                pending.append(user)
    return False


def made_of(node: fx.Node) -> set[fx.Node]:
    """The nodes behind a tensor up to the next products."""
    found: set[fx.Node] = set()
    pending = [node]
    while pending and len(found) < WIDE:
        one = pending.pop()
        if one in found or one.op == "placeholder":
            continue
        found.add(one)
        call = read_call(one)
        if not is_product(one) and (call is None or call.name not in ("linear", "matmul", "addmm")):
            pending += one.all_input_nodes
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Products with the weights of all experts
# ----------------------------------------------------------------------------------------------------------------------


def batched_products(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """(product, experts, where they are routed) of each product with weights [E, a, b] that data route along E, or that
    were gathered for each row."""
    for node in graph.nodes:
        weight = weight_of(node)
        if weight is not None:
            gathered = node if weight.gathered and is_looked_up_by_data(node) else None
            where = gathered if weight.gathered else routed_at(node)
            if where is not None:
                yield node, weight.experts, where


def routed_at(node: fx.Node) -> fx.Node | None:
    """Where data route the result of a product with weights [E, a, b] along E."""
    equation = equation_of(node)
    if equation is None:
        return None
    for operand, letters in zip(equation.operands, equation.letters, strict=True):
        if len(letters) == 3 and parameter_of(operand) is not None:
            # the parameter's own axes may stand in another order in the product
            expert = next(letter for letter, size in zip(letters, axes_of(operand), strict=True) if size == 0)
            if expert in equation.result:
                return follow(node, equation.result.index(expert))
            rest = letters.replace(expert, "")
            others = [pair for pair in zip(equation.operands, equation.letters, strict=True) if pair[0] is not operand]
            gates = [o for o, own in others if expert in own and not set(own) & set(rest)]
            return node if any(map(is_gate, gates)) else None
    return None


def axes_of(node: fx.Node) -> tuple[int | None, ...]:
    """Which axis of the parameter each axis of a view of it is."""
    if node.op == "placeholder":
        return 0, 1, 2
    call = certain(read_call(node))
    axes = axes_of(call["input"])
    return moved(call, axes) or axes


def is_looked_up_by_data(product: fx.Node) -> bool:
    """Whether the index that weights are gathered with was chosen in the step: it is not given, nor a row's place."""
    index = index_of(product)
    return index is not None and is_gate(index)
