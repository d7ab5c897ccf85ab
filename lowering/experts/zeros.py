"""Gates [T, E] that are certainly 0 for every expert that index [T, K] does not name, or that a mask [T, E] leaves out,
whatever made them.

    torch.zeros(T, E).scatter(1, index, anything)           (one_hot(index) * weight[:, :, None]).sum(1)
    einsum("tke,tk->te", one_hot(index), weight)
    probs * mask      mask / sum      probs.masked_fill(mask == 0, 0.0)      torch.where(mask, probs, 0.0)
    torch.full((T, E), -inf).scatter(1, index, logits).softmax(-1)
    probs * (probs >= kth)      logits.masked_fill(logits < kth, -inf).softmax(-1)      logits.relu()

Such entries depend on nothing, so no gradient passes through them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.views import equation_of
from moebius.lowering.operators import Call, read_call
from moebius.lowering.values import add_call, dtype_of, rank_of, same_shape, shape_of, tensor_of

COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le", "and", "logical_not"})
KEEPS = frozenset({"cast", "contiguous", "clone", "neg", "detach"})  # what is 0 (or false) stays so
FILLED = {"zeros": 0, "ones": 1}
LOGARITHMS = frozenset({torch.log_softmax, functional.log_softmax, "log_softmax"})


class Zeros:
    """Looks from gates back to what they are made of. end: nothing of it may be written into before this node.

    Tokens may have several axes: [B, T, E] for [T, E], where these gates are put under one another later.
    masks: looks for a mask instead of an index."""

    def __init__(self, storage: Storage, end: fx.Node, masks: bool = False):
        self.storage, self.end, self.masks = storage, end, masks

    def index_of(self, node: Any) -> fx.Node | None:
        """index, where the tensor [T, E] is 0 (or false) at [t, e] unless index[t] names e."""
        if not isinstance(node, fx.Node) or rank_of(node) < 2:
            return None
        found = self.compared(node) if self.masks else self.scattered(node, 0.0)
        call = self.unwritten(node)
        if found is not None or call is None:
            return found if found is not None or self.masks else self.added_up(node)
        last = (-1, rank_of(node) - 1)
        match call.name:
            case "reshape" | "flatten" if is_one_under_another(call):
                index = self.index_of(call["input"])
                return None if index is None else self.made(torch.reshape, index, (-1, (shape_of(index) or ())[-1]))
            case name if name in KEEPS:
                return self.same(node, call["input"])
            case "mul" | "and":
                return self.same(node, call["input"]) or self.same(node, call["other"])
            case "div" if call["rounding_mode"] is None:
                return self.same(node, call["input"])
            case "softmax" if node.target not in LOGARITHMS and call["dim"] in last:
                return self.lowest(call["input"])
            case "sigmoid":
                return self.lowest(call["input"])
            case "where" if is_number(call["other"], 0.0):
                return self.same(node, call["condition"])
            case "ne" | "gt" if is_number(call["other"], 0.0):
                return self.same(node, call["input"])
            case "masked_fill" if is_number(call["value"], 0.0):
                return self.elsewhere(node, call["mask"])
            case "relu" if self.masks:
                return self.made(torch.gt, call["input"], 0)
            case "sum" if one_of(call["dim"]) in (last[1], -2) and call["keepdim"] is False and not self.masks:
                return self.named(call["input"])
            case "one_hot" if not self.masks:
                return self.column(call["input"])
        return None

    def lowest(self, node: Any) -> fx.Node | None:
        """index, where the tensor is -inf unless index[t] names e."""
        if not isinstance(node, fx.Node) or rank_of(node) < 2:
            return None
        found = None if self.masks else self.scattered(node, -math.inf)
        call = self.unwritten(node)
        if found is not None or call is None:
            return found
        match call.name:
            case "masked_fill" if is_number(call["value"], -math.inf):
                return self.elsewhere(node, call["mask"])
            case "where" if is_number(call["other"], -math.inf):
                return self.same(node, call["condition"])
            case "cast" | "contiguous" | "clone":
                return self.lowest(call["input"])
        return None

    def elsewhere(self, node: fx.Node, mask: Any) -> fx.Node | None:
        """index, where the mask is true unless index[t] names e."""
        call = self.unwritten(mask) if isinstance(mask, fx.Node) else None
        if call is None or not same_shape(shape_of(mask), shape_of(node)):
            return None
        if self.masks:
            return None if self.compared(mask) is None else self.made(torch.logical_not, mask)
        if call.name == "logical_not":  # (of numbers, operator.invert is another function)
            return self.same(node, call["input"]) if dtype_of(call["input"]) is torch.bool else None
        zero = call.name == "eq" and is_number(call["other"], 0.0)
        return self.same(node, call["input"]) if zero else None

    def named(self, node: Any) -> fx.Node | None:
        """index, where the tensor [T, K, E] is 0 at [t, k, e] unless index[t, k] is e."""
        shape = shape_of(node) if isinstance(node, fx.Node) else None
        call = self.unwritten(node) if shape is not None and len(shape) > 2 else None
        if call is None:
            return None
        if call.name == "one_hot":
            return call["input"] if isinstance(call["input"], fx.Node) else None
        parts = [call["input"], call["other"]] if call.name == "mul" else [call["input"]] if call.name in KEEPS else []
        whole = [part for part in parts if isinstance(part, fx.Node) and same_shape(shape_of(part), shape)]
        return next((found for part in whole if (found := self.named(part)) is not None), None)

    def added_up(self, node: fx.Node) -> fx.Node | None:
        """index of ``einsum("tke,tk->te", one_hot(index), weight)``."""
        equation = equation_of(node)
        if equation is None or self.storage.writer_between(node, self.end) is not None:
            return None
        for operand, letters in zip(equation.operands, equation.letters, strict=True):
            summed = letters[:-2] + letters[-1:] == equation.result
            alone = all(letters[-1] not in other for other in equation.letters if other != letters)
            if summed and alone and (index := self.named(operand)) is not None:
                return index
        return None

    def compared(self, node: fx.Node) -> fx.Node | None:
        """A mask itself."""
        call, value = self.unwritten(node), tensor_of(node)
        boolean = value is not None and value.dtype is torch.bool
        return node if boolean and call is not None and call.name in COMPARISONS else None

    # ------------------------------------------------------------------------------------------------------------------

    def same(self, node: fx.Node, part: Any) -> fx.Node | None:
        """index of a part of the same shape."""
        whole = isinstance(part, fx.Node) and same_shape(shape_of(part), shape_of(node))
        return self.index_of(part) if whole else None

    def column(self, index: Any) -> fx.Node | None:
        """index [T] as [T, 1]."""
        if not isinstance(index, fx.Node) or not shape_of(index):
            return None
        one = rank_of(index) == 1
        return self.made(torch.reshape, index, (-1, 1)) if one else self.made(torch.unsqueeze, index, -1)

    def made(self, target: Any, *args: Any) -> fx.Node:
        """A view of what was found, before ``end``."""
        with self.end.graph.inserting_before(self.end):
            made = add_call(self.end.graph, self.end, target, *args)
        self.storage.add(made)
        return made

    def unwritten(self, node: fx.Node) -> Call | None:
        call = read_call(node)
        if call is None or call.op.inplace or self.storage.writer_between(node, self.end) is not None:
            return None
        return call

    def scattered(self, node: fx.Node, base: float) -> fx.Node | None:
        """index of ``full(base).scatter(1, index, anything)``."""
        made = scatter_into(base, node, self.end, self.storage, ("scatter", "scatter_add"))
        rank = rank_of(node)
        index = made["index"] if made is not None and made["dim"] in (rank - 1, -1) else None
        return index if isinstance(index, fx.Node) and rank_of(index) == rank else None


def one_of(dims: Any) -> Any:
    """The axis of a list of one."""
    return dims[0] if isinstance(dims, tuple | list) and len(dims) == 1 else dims


def is_one_under_another(call: Call) -> bool:
    """Whether a view keeps the last axis and makes one of those before it."""
    before, after = shape_of(call["input"]), shape_of(call.node)
    return bool(before and after and len(before) > len(after) == 2 and same_shape(before[-1:], after[-1:]))


def is_number(value: Any, wanted: float) -> bool:
    return isinstance(value, int | float) and value == wanted


def scatter_into(
    base: float, gates: fx.Node, end: fx.Node, storage: Storage, names: tuple[str, ...] = ("scatter",)
) -> Call | None:
    """``zeros.scatter(…)`` that made the gates, or the only one that wrote into them before ``end``.
    base: in place of zero. names: of other operators than scatter."""
    writers = list(storage.writers_of((gates,), gates, end))
    made = gates if not writers else writers[0] if len(writers) == 1 else None
    call = read_call(made) if made is not None else None
    if call is None or call.name not in names or (writers and call["input"] is not gates):
        return None
    if not isinstance(call["input"], fx.Node) or number_of(call["input"]) != base:
        return None
    return call if storage.writer_between(call["input"], call.node) is None else None


def number_of(value: Any) -> Any:
    """The number that a value is, or that a tensor was made of; else None."""
    call = read_call(value)
    if call is None:
        return value if type(value) in (int, float, bool) else None
    return FILLED[call.name] if call.name in FILLED else number_of(call.args.get("fill_value"))
