"""Tensors of a batched expert layer by their axes: rows, experts, features. What stands between two batched products is
one function of each row as soon as every axis is known to be the same one wherever it appears."""

from __future__ import annotations

import string
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moebius.lowering.dead_code import is_switch
from moebius.lowering.experts.dense import NoExperts
from moebius.lowering.experts.unrolled_loops import Differ
from moebius.lowering.operators import Call, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import shape_of

FULL = slice(None)
SAME_STORAGE = frozenset({"getitem", "unsqueeze", "squeeze", "transpose", "permute", "expand", "t", "select"})


@dataclass(frozen=True)
class Axis:
    """An axis: two are the same if their keys are. node, dim: a tensor of the graph that has it, and where."""

    key: Any
    node: fx.Node = field(compare=False, repr=False)
    dim: int = field(compare=False, repr=False)

    @property
    def size(self) -> Any:
        shape = shape_of(self.node)
        assert shape is not None
        return shape[self.dim]


Dims = tuple["Axis | str | None", ...]  # a str is an axis of features; None one of size 1
FEATURE = "feature"
ROWS, COLUMNS = "rows of the matrix", "columns of the matrix"  # the two that an expert's weight has


@dataclass(frozen=True)
class Equation:
    """A product: letters of the axes of each operand and of the result, as torch.einsum has them."""

    operands: tuple[fx.Node, ...]
    letters: tuple[str, ...]
    result: str


def equation_of(node: fx.Node) -> Equation | None:
    """The product that a node of einsum, bmm, baddbmm (without what it adds) or matmul is."""
    name = target_name(node).rpartition(".")[2]
    if node.kwargs:
        return None
    if name == "einsum":
        return einsum_of(node)
    given = node.args[1:3] if name == "baddbmm" else node.args[:2]
    if len(given) != 2 or not all(isinstance(argument, fx.Node) for argument in given):
        return None
    left, right = given
    ranks = [len(shape_of(argument) or ()) for argument in (left, right)]
    if min(ranks) < 2:
        return None
    letters = iter(string.ascii_letters)
    row, inner, column = next(letters), next(letters), next(letters)
    batch = "".join(next(letters) for _ in range(max(ranks) - 2))
    first, second = (batch[len(batch) - rank + 2 :] for rank in ranks)
    return Equation((left, right), (first + row + inner, second + inner + column), batch + row + column)  # type: ignore[arg-type]


def einsum_of(node: fx.Node) -> Equation | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    text = equation.replace(" ", "")
    given, arrow, result = text.partition("->")
    letters = given.split(",")
    if not arrow or len(letters) != len(operands):
        return None
    if "." in text:
        named = named_axes(letters, result, operands)
        if named is None:
            return None
        letters, result = named
    if any(len(set(part)) != len(part) for part in (*letters, result)):
        return None
    return Equation(tuple(operands), tuple(letters), result)  # type: ignore[arg-type]


def named_axes(letters: list[str], result: str, operands: list[Any]) -> tuple[list[str], str] | None:
    """The letters with one for each axis that ``...`` stands for, where none of these is stretched from size 1."""
    free = [letter for letter in string.ascii_letters if letter not in "".join((*letters, result))]
    shapes = [shape_of(operand) or () for operand in operands]
    ranks = [len(shape) - len(part.replace("...", "")) for part, shape in zip(letters, shapes, strict=True)]
    dotted = [rank for part, rank in zip(letters, ranks, strict=True) if "..." in part]
    most = max(dotted, default=0)
    if "..." not in result or min(ranks, default=0) < 0 or most > len(free):
        return None
    sizes: dict[str, Any] = {}
    found = []
    for part, rank, shape in zip(letters, ranks, shapes, strict=True):
        if rank and "..." not in part:
            return None
        own = "".join(free[most - rank : most])
        for letter, size in zip(own, shape[len(part.split("...")[0]) :], strict=False):
            if not same_size(sizes.setdefault(letter, size), size):
                return None
        found.append(part.replace("...", own))
    return found, result.replace("...", "".join(free[:most]))


def same_value(node: Any) -> Any:
    """A key that two nodes share if they are the same views of the same tensor."""
    if isinstance(node, tuple | list):
        return tuple(map(same_value, node))
    if isinstance(node, slice):
        return slice, same_value((node.start, node.stop, node.step))
    if not isinstance(node, fx.Node):
        return type(node), node
    call = read_call(node)
    if call is None or call.name not in SAME_STORAGE or len(shape_of(node) or ()) == 0:
        return node
    if any(shape_of(argument) is not None for argument in node.all_input_nodes if argument is not call["input"]):
        return node  # rows looked up with a tensor: a copy
    return call.name, tuple((name, same_value(value)) for name, value in call.args.items())


def without_grad(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the graph itself runs under no_grad. (The values of views made there do not say so.)"""
    found, on = set[fx.Node](), True
    for node in graph.nodes:
        if is_switch(node):
            on = bool(node.args[0])
        elif not on:
            found.add(node)
    return found


def bare(node: fx.Node, dims: tuple, under_no_grad: Container[fx.Node] = ()) -> tuple[fx.Node, tuple]:
    """(a tensor, its axes) that a tensor is made of by rearranging axes and by repeating along new ones, with history
    if that has one."""
    while (call := read_call(node)) is not None and isinstance(call.args.get("input"), fx.Node):
        source: fx.Node = call["input"]
        shape = shape_of(source)
        if not shape or (node in under_no_grad and source not in under_no_grad):
            break
        places = moved(call, tuple(range(len(shape))))
        if call.name == "expand" and shape_of(node) is not None:
            wide = shape_of(node) or ()
            kept = dims[len(wide) - len(shape) :]
            pairs = zip(shape, wide[-len(kept) :], strict=True)
            grown = [sized_one(own) and not sized_one(size) for own, size in pairs]
            if any(more and axis == FEATURE for axis, more in zip(kept, grown, strict=True)):
                break
            node, dims = source, tuple(None if more else axis for axis, more in zip(kept, grown, strict=True))
        elif places is not None and call.name not in ("contiguous", "clone", "squeeze"):
            node, dims = source, tuple(dims[places.index(dim)] for dim in range(len(shape)))
        else:
            break
    return node, dims


def origin(node: fx.Node, dim: int) -> Axis:
    """The axis of a tensor, as that of the tensor that it is a view of."""
    base, dims = bare(node, tuple(range(len(shape_of(node) or ()))))
    return Axis((base, dims.index(dim)), base, dims.index(dim)) if dim in dims else Axis((node, dim), node, dim)


def moved(call: Call, dims: tuple) -> tuple | None:
    """The axes after a view that only rearranges them or adds one of size 1, or None for other operators."""
    count = len(dims)
    match call.name:
        case "transpose":
            order = list(range(count))
            a, b = call["dim0"], call["dim1"]
            order[a], order[b] = order[b], order[a]
            return tuple(dims[i] for i in order)
        case "t" | "mT" | "T" if count == 2 or call.name == "mT":
            return (*dims[:-2], dims[-1], dims[-2])
        case "permute":
            return tuple(dims[i] for i in call["dims"])
        case "unsqueeze":
            at = call["dim"] % (count + 1)
            return (*dims[:at], None, *dims[at:])
        case "squeeze" if isinstance(call["dim"], int) and dims[call["dim"]] is None:
            at = call["dim"] % count
            return (*dims[:at], *dims[at + 1 :])
        case "contiguous" | "clone":
            return dims
        case "getitem":
            return indexed(call["index"], dims)
    return None


def indexed(index: Any, dims: Dims) -> Dims | None:
    """The same for ``[:, None, …]``."""
    keys = index if isinstance(index, tuple) else (index,)
    if not all(key is None or key is Ellipsis or key == FULL for key in keys if not isinstance(key, fx.Node)):
        return None
    if any(isinstance(key, fx.Node) for key in keys) or sum(key is Ellipsis for key in keys) > 1:
        return None
    named = sum(key is not None and key is not Ellipsis for key in keys)
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    rest = iter(dims)
    found: list[Any] = []
    for key in keys:
        if key is Ellipsis:
            found += [next(rest) for _ in range(len(dims) - named)]
        else:
            found.append(None if key is None else next(rest))
    return tuple(found)


def sized_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def agreed(parts: list[tuple[fx.Node, Dims]], at: fx.Node) -> Dims:
    """The axes of an operator on each element of tensors whose axes are known. Raises Differ where they differ."""
    rank = max(len(dims) for _, dims in parts)
    result: list[Any] = [None] * rank
    for node, dims in parts:
        for place, axis in enumerate(dims, rank - len(dims)):
            if axis is not None and result[place] is None:
                result[place] = axis
            elif axis is not None and result[place] != axis:
                raise Differ(f"{target_name(at)} puts rows of different experts or tokens together", node)
    return tuple(result)


def assigned(leaf: fx.Node, dims: Dims, sizes: tuple, at: fx.Node) -> Dims:
    """The axes of a tensor that is broadcast against one of these axes and sizes. Raises NoExperts, Differ."""
    shape = shape_of(leaf)
    if shape is None or len(shape) > len(dims):
        raise NoExperts("a tensor of more axes joins the rows", at)
    found: list[Any] = []
    for size, axis, whole in zip(shape, dims[len(dims) - len(shape) :], sizes[len(dims) - len(shape) :], strict=True):
        if sized_one(size):
            found.append(None)
        elif axis is None or not same_size(size, whole):
            raise Differ(f"{target_name(at)} reads {leaf.name} along an axis that the rows have not", at)
        else:
            found.append(axis)
    return tuple(found)


def floating(node: fx.Node, value: torch.Tensor | None) -> bool:
    return value is not None and value.dtype.is_floating_point
