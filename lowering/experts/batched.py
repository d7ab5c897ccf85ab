"""Which products may be experts in a batch: with the weights of all of them, or with a copy gathered for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.views import BATCHED, equation_of, indexed, same_value
from moebius.lowering.operators import PRODUCTS, read_call
from moebius.lowering.values import certain, dtype_of, same_shape, shape_of, tensor_of

STOPS = PRODUCTS | {"expert_loop"}
VIEWS = frozenset({"transpose", "permute", "T", "mT", "cast", "contiguous", "chunk", "split", "unsqueeze"})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})
FAR = 64  # nodes looked at between two products


@dataclass(frozen=True)
class Weight:
    """The weights [E, …] that a product is with; gathered: a copy for each row."""

    parameter: fx.Node
    experts: int
    sizes: frozenset[int]
    gathered: bool

    @property
    def idiom(self) -> str:
        return "weights gathered for each row" if self.gathered else "experts as batched products"


def batched_layers(graph: fx.Graph) -> list[tuple[fx.Node, Weight, list[fx.Node]]]:
    """Each product with expert weights that reads others, its weights and these: the down-projection of a layer."""
    products = {node: weight for node in graph.nodes if (weight := weight_of(node)) is not None}
    layers = [(down, weight, products_before(down, products)) for down, weight in products.items()]
    return [layer for layer in layers if any(goes_with(products[up], layer[1]) for up in layer[2])]


def weight_of(node: fx.Node) -> Weight | None:
    """The expert weights that a product of the graph is with."""
    if node.op not in ("call_function", "call_method") or node.target not in BATCHED:
        return None
    for operand in node.all_input_nodes:
        value = tensor_of(operand)
        found = parameter_of(operand) if value is not None and value.dim() > 2 else None
        if found is not None:
            return found
    return None


def parameter_of(node: fx.Node, gathered: bool = False) -> Weight | None:
    """The parameter [E, a, b] that a tensor of three axes or more is a view of, or rows of. One that rows are gathered
    of (or ``gathered``) may be frozen: of what is given, no other is multiplied so."""
    while node.op != "placeholder":
        call = read_call(node)
        if call is None:
            return None
        if call.name == "stack" and call["dim"] == 0 and all(one.op == "placeholder" for one in call["tensors"]):
            break  # of each expert's own
        if gathered_with(node) is not None:
            gathered = True
        elif call.name not in VIEWS and not (call.name == "getitem" and keeps_all(call["index"])):
            return None
        if not isinstance(call["input"], fx.Node):
            return None
        node = call["input"]
    value, shape = tensor_of(node), shape_of(node)
    if value is None or shape is None or len(shape) != 3 or not (value.requires_grad or gathered):
        return None
    if not all(type(size) is int and size > 1 for size in shape):
        return None
    return Weight(node, shape[0], frozenset(shape[1:]), gathered)


def keeps_all(index: Any) -> bool:
    """Whether an index picks a part of a split, or whole axes."""
    return type(index) is int or (isinstance(index, tuple) and indexed(index, (None,) * 8) is not None)


def gathered_with(node: fx.Node) -> fx.Node | None:
    """The index of ``w[index]`` or ``w.index_select(0, index)``: integers, one axis of them at least."""
    call = read_call(node)
    if call is None or not (call.name == "getitem" or (call.name == "index_select" and call["dim"] == 0)):
        return None
    index = call["index"]
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    value = tensor_of(index) if isinstance(index, fx.Node) else None
    return index if value is not None and value.dtype in INTEGERS and value.dim() > 0 else None


def products_before(down: fx.Node, products: dict[fx.Node, Weight]) -> list[fx.Node]:
    """The products with expert weights that this one's rows are made of, no other product standing between."""
    found, seen, pending = [], {down}, list(down.all_input_nodes)
    while pending and len(seen) < FAR:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in products:
            found.append(node)
            continue
        call = read_call(node)
        if node.op != "placeholder" and node.target not in BATCHED and (call is None or call.name not in STOPS):
            pending += node.all_input_nodes
    return found


def goes_with(up: Weight, down: Weight) -> bool:
    """Whether the two are weights of one layer: as many experts, and the width that x has."""
    return (
        up.parameter is not down.parameter
        and (up.experts, up.gathered) == (down.experts, down.gathered)
        and bool(up.sizes & down.sizes)
    )


def is_gathered(node: fx.Node) -> bool:
    found = parameter_of(node)
    return found is not None and found.gathered


def with_bias(down: fx.Node, experts: int) -> fx.Node:
    """What a down-projection with gathered weights gives plus the bias b [E, D] of each row's expert, ``+ b[index]``,
    if that is all that is done with it (but for axes of size 1 that go); else itself."""
    equation, numbers = equation_of(down), index_of(down)
    if numbers is None or equation is None or len(set("".join(equation.letters)) - set(equation.result)) != 1:
        return down
    node = down
    while len(node.users) == 1:
        (user,) = node.users
        call = read_call(user)
        if call is None or call.op.inplace or call.name not in ("squeeze", "add"):
            return down
        if call.name == "squeeze":
            node = user
            continue
        bias = call["other"] if call["input"] is node else call["input"]
        index = gathered_with(bias) if isinstance(bias, fx.Node) else None
        if index is None or same_value(index) != same_value(numbers):
            return down
        table = certain(read_call(bias))["input"]
        sizes = shape_of(table) if table < down else None
        alike = dtype_of(user) == dtype_of(down) and same_shape(shape_of(user), shape_of(node))
        return user if sizes is not None and len(sizes) == 2 and sizes[0] == experts and alike else down
    return down


def index_of(product: fx.Node) -> fx.Node | None:
    """The index that a product's weights are gathered with."""
    for operand in product.all_input_nodes:
        node: Any = operand if parameter_of(operand) is not None else None
        while isinstance(node, fx.Node) and (call := read_call(node)) is not None:
            if (index := gathered_with(node)) is not None:
                return index
            node = call.args.get("input")
    return None
