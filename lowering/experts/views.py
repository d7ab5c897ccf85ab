"""Views that rearrange a tensor's axes: which axis of the tensor behind them each of their axes is; products as letters
of axes; and whether two nodes are the same reading of the same tensor."""

from __future__ import annotations

import operator
import string
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.operators import Call, read_call, target_name
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import rank_of, same_shape, shape_of, value_of

FULL = slice(None)
Axes = tuple["int | None", ...]  # of which axis of the base each axis is; None: of size 1, or the same all along it
WIDENS = frozenset({"expand", "reshape", "repeat"})
TURNED = frozenset({"t", "T", "mT", "transpose"})


def sized_one(size: Any) -> bool:
    return type(size) is int and size == 1


def moved(call: Call, axes: tuple) -> tuple | None:
    """The axes, whatever they are, behind a view that only rearranges them, adds one of size 1 (None) or drops one that
    is None; or None for other operators."""
    count = len(axes)
    match call.name:
        case "transpose" if type(call["dim0"]) is type(call["dim1"]) is int:
            order = list(axes)
            a, b = call["dim0"], call["dim1"]
            order[a], order[b] = order[b], order[a]
            return tuple(order)
        case "t" | "T":
            return axes[::-1]
        case "mT":
            return (*axes[:-2], axes[-1], axes[-2])
        case "permute" if len(call["dims"]) == count and all(type(dim) is int for dim in call["dims"]):
            return tuple(axes[dim] for dim in call["dims"])
        case "unsqueeze" if isinstance(call["dim"], int):
            at = call["dim"] % (count + 1)
            return (*axes[:at], None, *axes[at:])
        case "squeeze" if isinstance(call["dim"], int) and count and axes[call["dim"]] is None:
            at = call["dim"] % count
            return (*axes[:at], *axes[at + 1 :])
        case "contiguous" | "clone":
            return axes
        case "getitem":
            return indexed(call["index"], axes)
    return None


def indexed(index: Any, axes: tuple) -> tuple | None:
    """The same for ``[:, None, …]``."""
    keys = index if isinstance(index, tuple) else (index,)
    if not all(not isinstance(key, fx.Node) and (key is None or key is ... or key == FULL) for key in keys):
        return None
    named = sum(key == FULL for key in keys)
    if sum(key is ... for key in keys) > 1 or named > len(axes):
        return None
    keys = keys if ... in keys else (*keys, ...)
    rest = iter(axes)
    found: list[Any] = []
    for key in keys:
        if key is ...:
            found += [next(rest) for _ in range(len(axes) - named)]
        else:
            found.append(None if key is None else next(rest))
    return tuple(found)


def seen_as(node: fx.Node) -> tuple[fx.Node, Axes, tuple[fx.Node, ...]]:
    """(the tensor that a node is a view of, its axes, the views), repeating along new axes included."""
    shape = shape_of(node) or ()
    call = read_call(node)
    source: Any = call.args.get("input") if call is not None and not call.op.inplace else None
    before = shape_of(source) if isinstance(source, fx.Node) else None
    if call is not None and before is not None and call.name != "clone":
        base, axes, views = seen_as(source)
        after = widened(axes, before, shape) if call.name in WIDENS else moved(call, axes)
        if after is not None and len(after) == len(shape):
            return base, after, (*views, node)
    return node, tuple(range(len(shape))), ()


def widened(axes: Axes, before: tuple, after: tuple) -> Axes | None:
    """The axes where those of size 1 have grown, or some were added at the end."""
    if len(after) > len(axes) > 0:
        added = (1,) * (len(after) - len(axes))
        return (*axes, *(None for _ in added)) if same_shape((*before, *added), after) else None
    grown = [not same_size(a, b) for a, b in zip(before, after, strict=False)]
    kept = len(after) == len(axes) and all(axis is None for more, axis in zip(grown, axes, strict=True) if more)
    return axes if kept else None


def column_of(node: Any) -> fx.Node | None:
    """The vector that ``unsqueeze(-1)``, ``[:, None]`` or ``view(-1, 1)`` made a column of."""
    call, shape = read_call(node), shape_of(node) or ()
    source = call.args.get("input") if call is not None else None
    if call is None or rank_of(source) != 1 or len(shape) != 2 or not sized_one(shape[1]):
        return None
    return source if call.name == "reshape" or moved(call, (0,)) == (0, None) else None


# ----------------------------------------------------------------------------------------------------------------------
# Products
# ----------------------------------------------------------------------------------------------------------------------

BATCHED = frozenset(
    {torch.bmm, torch.baddbmm, torch.einsum, torch.matmul, operator.matmul, "bmm", "baddbmm", "matmul", "__matmul__"}
)


@dataclass(frozen=True)
class Equation:
    """A product: letters of the axes of each operand and of the result, as torch.einsum has them."""

    operands: tuple[fx.Node, ...]
    letters: tuple[str, ...]
    result: str


def equation_of(node: fx.Node) -> Equation | None:
    """The product that a node of einsum, bmm, baddbmm (without what it adds) or matmul is."""
    if node.kwargs or node.target not in BATCHED:
        return None
    name = target_name(node).rpartition(".")[2]
    if name == "einsum":
        return einsum_of(node)
    given = node.args[1:3] if name == "baddbmm" else node.args[:2]
    if len(given) != 2 or not all(isinstance(argument, fx.Node) for argument in given):
        return None
    left, right = given
    ranks = [rank_of(argument) for argument in (left, right)]
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


# ----------------------------------------------------------------------------------------------------------------------
# The same reading
# ----------------------------------------------------------------------------------------------------------------------

SAME_STORAGE = frozenset({"getitem", "unsqueeze", "squeeze", "transpose", "permute", "expand", "t", "select"})


def same_value(node: Any, through: frozenset[str] = SAME_STORAGE) -> Any:
    """A key that two nodes share if they are the same views of the same tensor. through: other operators that make the
    same of the same."""
    if isinstance(node, tuple | list):
        return tuple(same_value(item, through) for item in node)
    if isinstance(node, slice):
        return slice, same_value((node.start, node.stop, node.step), through)
    if not isinstance(node, fx.Node):
        return type(node), node
    call = read_call(node)
    if call is None or call.op.inplace or call.name not in through or rank_of(node) == 0:
        return node
    others = [argument for argument in node.all_input_nodes if argument is not call["input"]]
    if through is SAME_STORAGE and any(shape_of(argument) is not None for argument in others):
        return node  # rows looked up with a tensor: a copy
    return call.name, tuple((name, same_value(value, through)) for name, value in call.args.items())


# ----------------------------------------------------------------------------------------------------------------------
# Columns, one for each expert
# ----------------------------------------------------------------------------------------------------------------------


def column_cut(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool] | None:
    """The tensor of which node e is column e, and whether that keeps its axis: ``g.unbind(-1)[e]``, ``g.t()[e]``,
    ``g.split(1, -1)[e]``, ``g.chunk(experts, -1)[e]``."""
    pieces = nodes[0].args[0] if nodes[0].target is operator.getitem else None
    if not isinstance(pieces, fx.Node) or any(node.args != (pieces, e) for e, node in enumerate(nodes)):
        return None
    cut, value = read_call(pieces), value_of(pieces)
    if cut is None:
        return None
    if cut.name in TURNED:
        return turned(pieces, len(nodes))
    if cut.name not in ("unbind", "split", "chunk") or not isinstance(value, tuple | list) or len(value) != len(nodes):
        return None
    whole: fx.Node = cut["input"]
    if cut.name == "unbind" and cut["dim"] in (0, -2):
        return turned(whole, len(nodes))
    shape = shape_of(whole)
    if shape is None or len(shape) < 2 or shape[-1] != len(nodes) or cut["dim"] not in (-1, len(shape) - 1):
        return None
    return whole, cut.name != "unbind"


def turned(node: fx.Node, count: int) -> tuple[fx.Node, bool] | None:
    """Of the rows of a matrix: that of which they are the columns, if it was turned for them."""
    call, shape = read_call(node), shape_of(node)
    if call is None or call.name not in TURNED or shape is None or len(shape) != 2 or shape[0] != count:
        return None
    return call["input"], False
