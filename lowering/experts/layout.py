"""Tensors of a batched expert layer by their axes: rows, experts, features. What stands between two batched products is
one function of each row as soon as every axis is known to be the same one wherever it appears."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from moebius.lowering.dead_code import is_switch
from moebius.lowering.experts.unrolled_loops import Differ, NoExperts
from moebius.lowering.experts.views import moved, sized_one
from moebius.lowering.operators import read_call, target_name
from moebius.lowering.torch_private import same_size, set_grad_enabled
from moebius.lowering.values import certain, rank_of, shape_of


@dataclass(frozen=True)
class Axis:
    """An axis: two are the same if their keys are. node, dim: a tensor of the graph that has it, and where."""

    key: Any
    node: fx.Node = field(compare=False, repr=False)
    dim: int = field(compare=False, repr=False)

    @property
    def size(self) -> Any:
        shape = certain(shape_of(self.node))
        return shape[self.dim]


Dims = tuple["Axis | str | None", ...]  # a str is an axis of features; None one of size 1
FEATURE = "feature"
ROWS, COLUMNS = "rows of the matrix", "columns of the matrix"  # the two that an expert's weight has


class WithoutGrad:
    """Which nodes a graph itself runs under no_grad. (The values of views made there do not say so.)"""

    def __init__(self, graph: fx.Graph):
        self.switches = list(filter(is_switch, graph.find_nodes(op="call_function", target=set_grad_enabled)))

    def __contains__(self, node: Any) -> bool:
        before = bisect_left(self.switches, node)
        return before > 0 and not self.switches[before - 1].args[0] and node not in self.switches[before : before + 1]


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
    base, dims = bare(node, tuple(range(rank_of(node))))
    return Axis((base, dims.index(dim)), base, dims.index(dim)) if dim in dims else Axis((node, dim), node, dim)


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
