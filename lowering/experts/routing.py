"""Which experts the iterations run, and which routing indices are allowed: the arithmetic of coverage and of
sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.facts import HitList, Selection, Skip, Test
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.torch_private import same_size, version_of
from moebius.lowering.values import dtype_of, same_shape, shape_of, tensor_of

# In a node's meta: an index that the proof made, -1 for slots that go to no expert. Its value says how many these are,
# if the batch has tokens.
DROPPED = "slots dropped"
EXACT = (torch.int64, torch.int32, torch.float32, torch.float64)  # have every whole number that occurs
INDICES = (torch.int64, torch.int32)
Bounds = tuple[int, int]
REARRANGES = frozenset({"reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"})
ALL, SOME = "perhaps all", "some"


@dataclass(frozen=True)
class Allowed:
    """The routing indices for which the user's loop does not raise: low <= index < high; None is unbounded."""

    low: int | None
    high: int | None


def index_bounds(node: Any) -> Bounds | None:
    """[low, high) that an integer tensor's values certainly lie in: positions along an axis (of experts), put together,
    taken in parts, or changed by operators whose range follows from that of their operands. None where anything was
    written into one of these."""
    if type(node) is int:
        return node, node + 1
    call = read_call(node) if isinstance(node, fx.Node) else None
    if call is None or call.op.inplace or is_written(node):
        return None
    if rearranges(call) or takes_part(call, (None,)):
        return index_bounds(call["input"])
    match call.name:
        case "cat" | "stack":
            return hull(*call["tensors"]) if isinstance(call["tensors"], tuple | list) and call["tensors"] else None
        case "getitem" if call["index"] == 1 and isinstance(call["input"], fx.Node):
            return along_axis(read_call(call["input"]))
        case "cast":
            return index_bounds(call["input"]) if dtype_of(node) in EXACT else None
        case "remainder" if type(call["other"]) is int and call["other"] > 0:
            return (0, call["other"]) if dtype_of(call["input"]) in INDICES else None
        case "where":
            return hull(call["input"], call["other"])
        case "masked_fill":
            kept, filled = index_bounds(call["input"]), index_bounds(call["value"])
            if kept is None or filled is None:
                return None
            mask = read_call(call["mask"])
            compared = mask is not None and mask.name in ("eq", "ge") and mask["input"] is call["input"]
            high = kept[1] - 1 if compared and mask is not None and mask["other"] == kept[1] - 1 else kept[1]
            return min(kept[0], filled[0]), max(high, filled[1])
        case "clamp" if dtype_of(call["input"]) in INDICES:
            return clamped(index_bounds(call["input"]), call["min"], call["max"])
    return along_axis(call) if call.name not in ("topk", "sort", "max", "min") else None


def is_written(node: fx.Node) -> bool:
    """Whether something was written in place into a tensor, under whatever name."""
    value = tensor_of(node)
    return value is not None and version_of(value) != 0


def hull(*parts: Any) -> Bounds | None:
    """What all of these certainly lie in."""
    known = [bounds for part in parts if (bounds := index_bounds(part)) is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(parts) else None


def clamped(bounds: Bounds | None, low: Any, high: Any) -> Bounds | None:
    lows = [n for n in (low, None if bounds is None else bounds[0]) if n is not None]
    highs = [n for n in (None if high is None else high + 1, None if bounds is None else bounds[1]) if n is not None]
    if not lows or not highs or not all(type(n) is int for n in (*lows, *highs)):
        return None
    return (max(lows), min(highs)) if max(lows) < min(highs) else None


def along_axis(call: Call | None) -> Bounds | None:
    """Of the positions along an axis that an operator gives."""
    if call is None or not call.op.positions or type(call["dim"]) is not int:
        return None
    shape = shape_of(call["input"])
    size = shape[call["dim"]] if shape else None
    return (0, size) if isinstance(size, int) else None


def is_skipped(expert: int, skips: list[Skip]) -> bool | None:
    """Whether the iteration of this expert ends early although rows were selected; None where that is not known."""
    for skip in skips:
        test = skip.condition
        if not isinstance(test, Test):
            return None
        if test.kind == "empty":
            if test.negated:
                return True  # skips the iterations that have rows
            continue
        assert isinstance(test.value, int)
        holds = expert == test.value if test.kind == "expert" else expert >= test.value
        if holds != test.negated:
            return True
    return False


def skip_values(skips: list[Skip]) -> list[int]:
    """The expert numbers that conditions mention."""
    return [
        skip.condition.value
        for skip in skips
        if isinstance(skip.condition, Test) and isinstance(skip.condition.value, int)
    ]


def coverage_fault(limit: int | None, hits: HitList | None, selection: Selection, experts: int) -> str | None:
    """Why the iterations may miss an expert that has rows, or run one twice; None when each runs exactly once."""
    if limit is not None:
        if experts == 0:
            return "all iterations have the same weights"
        if limit > experts:
            return f"the loop runs over range({limit}), but the weights hold {experts} experts"
        if selection.classes == -1:
            return "one_hot was called without num_classes: the mask may have fewer rows than the loop has iterations"
        if selection.classes is not None and limit > selection.classes:
            return f"the loop runs over range({limit}), but the mask has {selection.classes} rows"
        return None
    if hits is None:
        return "the loop does not run over a list of the experts that were hit, nor over range(number of experts)"
    if index_root(hits.index.node) is not index_root(selection.index.node):
        return "the list of experts that were hit was made from another routing index than the rows are selected with"
    return None


def allowed_indices(
    limit: int | None, hits: HitList | None, selection: Selection, experts: int, skips: list[Skip]
) -> Allowed | str:
    """For which routing indices the loop runs without an error, or why that is not one interval."""
    tops = [classes for classes in (selection.classes, hits.classes if hits else None) if classes not in (None, -1)]
    one_hot = selection.classes is not None or (hits is not None and hits.classes is not None)
    low = 0 if one_hot and not index_root(selection.index.node).meta.get(DROPPED) else None
    if limit is not None:
        return Allowed(low, min(tops) if tops else None)
    if not tops:
        return Allowed(low, experts)  # W[e] raises above
    top = min(tops)
    beyond = [is_skipped(expert, skips) for expert in range(experts, top)]
    if all(beyond):
        return Allowed(low, top)
    if any(beyond):
        return "some of the experts beyond the weights are skipped and others are not"
    return Allowed(low, min(top, experts))


def proven_within(node: fx.Node, allowed: Allowed) -> bool:
    """Whether the index certainly keeps to what is allowed, so that no check is needed when it runs."""
    if allowed.low is None and allowed.high is None:
        return True
    bounds = index_bounds(node)
    if bounds is None:
        return False
    low, high = bounds
    return (allowed.low is None or low >= allowed.low) and (allowed.high is None or high <= allowed.high)


def is_among(node: fx.Node, count: Any) -> bool:
    """Whether integers are certainly positions along an axis of this size, counted from 0."""
    return isinstance(count, int) and proven_within(node, Allowed(0, count))


def index_root(node: fx.Node) -> fx.Node:
    """The node that has the same numbers, before copies and views that only rearrange axes."""
    return behind(node, rearranges)


def rearranges(call: Call) -> bool:
    return call.name in REARRANGES and not call.op.inplace


def takes_part(call: Call, also: tuple[Any, ...] = ()) -> bool:
    """Whether it takes slices of a tensor, not one of several results. also: other keys."""
    if call.name != "getitem" or tensor_of(call["input"]) is None:
        return False
    keys = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    return all(isinstance(key, slice) or key is Ellipsis or type(key) is int or key in also for key in keys)


def chosen_from(node: fx.Node) -> fx.Node:
    """The tensor that a routing index is a part of, before copies, views and slices."""
    return behind(node, lambda call: rearranges(call) or takes_part(call))


def distinct(index: fx.Node) -> bool:
    """Whether no token has an expert twice: it has one, or different positions of what topk or a sort gave."""
    node, shape = index, shape_of(index) or ()
    if len(shape) > 1 and type(shape[-1]) is int and shape[-1] == 1:
        return True
    while (call := read_call(node)) is not None and not is_written(node):
        here = shape_of(node) or ()
        if rearranges(call):
            node = call["input"]
            continue
        # (a view that keeps the last axis keeps what stands along it)
        kept = shape and here and type(shape[-1]) is int and same_size(shape[-1], here[-1])
        if call.op.inplace or not (kept or same_shape(shape, here)):
            return False
        source = tensor_of(call.args.get("input"))
        if call.name == "cast" and source is not None and {dtype_of(node), source.dtype} <= set(INDICES):
            node, shape = call["input"], here
        elif call.name == "getitem" and takes_part(call) and source is not None and source.dim() == len(here):
            node, shape = call["input"], tuple(source.shape)
        else:
            made = read_call(call["input"]) if call.name == "getitem" and call["index"] == 1 else call
            named = made is not None and made.name in (("argsort",) if made is call else ("topk", "sort"))
            return named and made is not None and made["dim"] in (-1, len(here) - 1)
    return False


def weighs_alike(factor: float, dtypes: set[Any]) -> bool:
    """Whether a number may be multiplied into the rows' weights instead of into the rows: it is close enough to 1 that
    weights of usual size stay numbers of these types, with all their digits. Those of float16 end at 65504, and lose
    digits below 6e-5; a softmax's stay right from 0.004 on."""
    most = 2.0 ** (6 if torch.float16 in dtypes else 60)
    return 1 / most <= abs(factor) <= most
