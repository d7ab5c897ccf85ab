"""``torch.vmap(f)(rows, w1, w2)`` as what f does, each tensor that is mapped over with the axis of experts in front."""

from __future__ import annotations

import operator
import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.views import FULL, einsum_of
from moebius.lowering.operators import ELEMENTWISE, PRODUCTS, Call, draws, read_call
from moebius.lowering.values import add_call, certain, rank_of, tensor_of

VMAP = "torch._functorch.vmap.vmap_impl"
ROW_BY_ROW = ELEMENTWISE | {"cast", "type_as", "contiguous", "clone", "where", "dropout", "masked_fill"} | {
    "eq", "ne", "gt", "ge", "lt", "le", "logical_not"
}  # fmt: skip


class NotBatched(Exception):
    """The function does something that has no batched form here."""


@dataclass(frozen=True)
class Mapped:
    """A value of the function: the node outside, mapped over its first axis or not. rank: inside."""

    node: Any
    mapped: bool
    rank: int


def without_vmap(node: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """(each leaf of what a vmap gives, the last product in it), written at the place where nodes are inserted; None for
    what has no batched form."""
    try:
        given: Any = node.args
        transform, body, _, captures, args, options = given
        if transform != VMAP or options or len(args) < 4:
            return None
        in_dims, out_dims, _, chunks, *given = args
        if chunks is not None or type(out_dims) is not int:
            return None
        written = Written(node, body)
        found = written.leaves(mapped_leaves(given, in_dims), list(captures))
        return [(written.turned(leaf, 0, out_dims), product) for leaf, product in found]
    except NotBatched:
        return None


def mapped_leaves(given: Any, dims: Any) -> list[tuple[fx.Node, int | None]]:
    """The tensors of the arguments, in the order of ``leaves_of``, and the axis over which each is mapped."""
    if isinstance(given, fx.Node):
        if dims is not None and type(dims) is not int:
            raise NotBatched
        return [(given, dims)]
    if isinstance(given, tuple | list | dict):
        keys = list(given) if isinstance(given, dict) else range(len(given))
        own = {key: dims[key] if isinstance(dims, tuple | list | dict) else dims for key in keys}
        return [leaf for key in keys for leaf in mapped_leaves(given[key], own[key])]
    return []


class Written:
    """Writes the function's nodes outside."""

    def __init__(self, node: fx.Node, body: Any):
        module = certain(node.graph.owning_module)
        inner = module.get_submodule(str(body.target))
        assert isinstance(inner, fx.GraphModule)
        self.at, self.graph, self.body = node, node.graph, inner.graph
        self.values: dict[fx.Node, Mapped] = {}
        self.product: fx.Node | None = None

    def leaves(self, given: list[tuple[fx.Node, int | None]], captures: list[Any]) -> list[tuple[fx.Node, fx.Node]]:
        operands = [*given, *((one, None) for one in captures)]
        places = list(self.body.find_nodes(op="placeholder"))
        if len(places) != len(operands):
            raise NotBatched
        for place, (outer, dim) in zip(places, operands, strict=True):
            moved = outer if dim is None else self.turned(outer, dim, 0)
            self.values[place] = Mapped(moved, dim is not None, rank_of(outer) - (dim is not None))
        for node in self.body.nodes:
            if node.op == "output":
                results: Any = node.args[0]
            elif node.op != "placeholder":
                self.values[node] = self.written(node)
        found = [self.values.get(one) for one in results]
        if self.product is None or any(one is None or not one.mapped for one in found):
            raise NotBatched
        return [(one.node, self.product) for one in found if one is not None]

    def written(self, node: fx.Node) -> Mapped:
        call = read_call(node)
        inputs = node.all_input_nodes
        rank = rank_of(node)
        if node.op not in ("call_function", "call_method") or (call is not None and call.op.inplace):
            raise NotBatched
        if not any(self.values[one].mapped for one in inputs):
            if call is None or draws(node) or call.name == "set_grad_enabled":
                raise NotBatched
            return Mapped(self.call(node.target, *self.plain(node.args), **self.plain(node.kwargs)), False, rank)
        if node.target is torch.einsum:
            return Mapped(self.einsum(node), True, rank)
        if call is None or draws(node):
            raise NotBatched
        if call.name in ROW_BY_ROW:
            widest = max(self.values[one].rank for one in inputs)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: self.widened(one, widest))
            return Mapped(self.call(node.target, *args, **kwargs), True, rank)
        if call.name in PRODUCTS:
            return Mapped(self.multiplied(call), True, rank)
        return Mapped(self.view(node, call), True, rank)

    def turned(self, node: fx.Node, dim: int, to: int) -> fx.Node:
        """The tensor with one axis at another place."""
        rank = rank_of(node)
        order = [axis for axis in range(rank) if axis != dim % rank]
        order.insert(to % rank, dim % rank)
        return node if order == sorted(order) else self.call(torch.permute, node, tuple(order))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_call(self.graph, self.at, target, *args, **kwargs)

    def plain(self, part: Any) -> Any:
        return fx.map_arg(part, lambda one: self.values[one].node)

    def widened(self, one: fx.Node, rank: int) -> Any:
        """With axes of size 1 behind that of the experts, so that it meets tensors of this rank as it does inside."""
        value = self.values[one]
        if not value.mapped or value.rank >= rank:
            return value.node
        return self.call(operator.getitem, value.node, (FULL, *(None,) * (rank - value.rank)))

    def multiplied(self, call: Call) -> fx.Node:
        """A product of rows with a matrix, or of a vector with one."""
        left, right = call["input"], call["weight" if call.name == "linear" else "other"]
        if call.name == "addmm" and (call["beta"], call["alpha"]) != (1, 1):
            raise NotBatched
        a, b = self.values[left], self.values[right]
        if b.rank != 2 or not 1 <= a.rank:
            raise NotBatched
        added, matrix = call.args.get("bias"), b.node
        if call.name == "linear":
            matrix = self.call(torch.transpose, matrix, -1, -2)
        rows = a.node
        if a.rank == 1 or (b.mapped and a.rank > 2):
            row, rest, batch = ("x", string.ascii_letters[: a.rank - 1], "z")
            first, second = (batch * a.mapped) + rest + row, batch * b.mapped + row + "y"
            made = self.call(torch.einsum, f"{first},{second}->{batch}{rest}y", rows, matrix)
        else:
            made = self.call(torch.matmul, rows, matrix)
        self.product = made
        return made if added is None else self.call(torch.add, made, self.widened(added, a.rank))

    def einsum(self, node: fx.Node) -> fx.Node:
        equation = einsum_of(node)
        if equation is None:
            raise NotBatched
        free = next(letter for letter in string.ascii_letters if letter not in "".join(equation.letters))
        operands = [self.values[one] for one in equation.operands]
        letters = [free * one.mapped + part for one, part in zip(operands, equation.letters, strict=True)]
        text = f"{','.join(letters)}->{free}{equation.result}"
        self.product = self.call(torch.einsum, text, *(one.node for one in operands))
        return self.product

    def view(self, node: fx.Node, call: Call) -> fx.Node:
        """What rearranges or cuts axes, or sums along one: with axes that are counted behind that of the experts."""
        value = self.values.get(call.args.get("input"))  # type: ignore[arg-type]
        if value is None or any(one is not call["input"] and self.values[one].mapped for one in node.all_input_nodes):
            if call.name == "getitem" and value is not None and not value.mapped and isinstance(call["index"], fx.Node):
                return self.call(operator.getitem, value.node, self.values[call["index"]].node)
            raise NotBatched

        def behind(dim: Any) -> int:
            if type(dim) is not int:
                raise NotBatched
            return dim + 1 if dim >= 0 else dim

        source, make = value.node, self.call
        match call.name:
            case "getitem" if tensor_of(call["input"]) is None:
                return make(operator.getitem, source, call["index"])
            case "getitem":
                keys = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
                if any(isinstance(key, fx.Node) for key in keys):
                    raise NotBatched
                return make(operator.getitem, source, (FULL, *keys))
            case "chunk":
                return make(torch.chunk, source, call["chunks"], behind(call["dim"]))
            case "split" if not node.all_input_nodes[1:]:
                return make(torch.split, source, call["split_size_or_sections"], behind(call["dim"]))
            case "transpose":
                return make(torch.transpose, source, behind(call["dim0"]), behind(call["dim1"]))
            case "t" | "T" | "mT" if value.rank == 2:
                return make(torch.transpose, source, -1, -2)
            case "unsqueeze" | "squeeze" if call["dim"] is not None:
                return make(getattr(torch, call.name), source, behind(call["dim"]))
            case "softmax" if call["dim"] is not None:
                return make(node.target, source, dim=behind(call["dim"]), dtype=call["dtype"])
            case "sum" if type(call["dim"]) is int:
                return make(torch.sum, source, behind(call["dim"]), call["keepdim"], dtype=call["dtype"])
        raise NotBatched


