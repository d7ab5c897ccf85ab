"""Which experts the iterations run, and which routing indices are allowed: the arithmetic of coverage and of
sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from moebius.lowering.experts.facts import Constant, Fact, HitList, Selection, Skip, Test
from moebius.lowering.operators import Call, behind, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import same_shape, shape_of, tensor_of, value_of

# In a node's meta: an index that the proof made, -1 for slots that go to no expert. Its value says how many these are,
# if the batch has tokens.
DROPPED = "slots dropped"
REARRANGES = frozenset({"reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"})
ALL, SOME = "perhaps all", "some"


@dataclass(frozen=True)
class Allowed:
    """The routing indices for which the user's loop does not raise: low <= index < high; None is unbounded."""

    low: int | None
    high: int | None


def index_bounds(node: fx.Node) -> tuple[int, int] | None:
    """[low, high) that an integer tensor's values certainly lie in: positions that topk or argmax returned."""
    node = index_root(node)
    call = read_call(node)
    if call is not None and call.name == "getitem" and call["index"] == 1 and isinstance(call["input"], fx.Node):
        call = read_call(call["input"])
        if call is None or call.name not in ("topk", "max", "min") or not isinstance(value_of(call.node), tuple):
            return None
    elif call is None or call.name != "argmax" or call["dim"] is None:
        return None
    shape = shape_of(call["input"])
    size = shape[call["dim"]] if shape else None
    return (0, size) if isinstance(size, int) else None


def iterations_limit(source: Any, fact: Fact | None) -> int | None:
    """n for a loop over ``range(n)`` (or ``torch.arange(n)``); None for other sources."""
    if isinstance(source, int):
        return source
    if isinstance(fact, Constant) and isinstance(fact.value, range):
        return fact.value.stop
    return None


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


def index_root(node: fx.Node) -> fx.Node:
    """The node that has the same numbers, before copies and views that only rearrange axes."""
    return behind(node, rearranges)


def rearranges(call: Call) -> bool:
    return call.name in REARRANGES and not call.op.inplace


def before_slices(node: fx.Node) -> fx.Node:
    """The tensor that ``top[:, :k]`` or ``top[:, k]`` is a part of."""
    return behind(node, takes_part)


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
    """Whether no token has an expert twice: the positions that topk gave."""
    call = read_call(index_root(index))
    if call is None or call.name != "getitem" or call["index"] != 1 or not isinstance(call["input"], fx.Node):
        return False
    made = read_call(call["input"])
    shape, chosen = shape_of(index), shape_of(index_root(index))
    if made is None or made.name != "topk" or not shape or not chosen or made["dim"] not in (-1, len(chosen) - 1):
        return False
    # (a view that keeps the last axis keeps what stands along it)
    return same_shape(shape, chosen) or (type(shape[-1]) is int and same_size(shape[-1], chosen[-1]))
