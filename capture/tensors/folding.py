"""Branches on tensors that are made of constants alone (a mask of positions): their truth is computed while tracing.

Nothing is guarded for it: the operators and their arguments are written in the graph, so they give the same each call.
Sizes that vary are no constants; neither is anything that is random, or that the step writes to in place.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import apply, is_pure, writes_into
from moebius.lowering.values import computed_of

MAX_NODES = 256  # operators that are run for one branch
MAX_ELEMENTS = 1 << 20  # of each result
# Besides those that lowering knows: operators without effects, whose result is decided by their arguments.
PURE = frozenset(
    "all any arange argmax argmin amax amin count_nonzero cummax cummin cumprod cumsum diff diagonal eq expand "
    "expand_as flip full full_like ge gt is_nonzero isfinite isin isinf isnan le linspace logical_and logical_not "
    "logical_or logical_xor lt masked_fill max min ne ones ones_like outer prod repeat roll searchsorted stack sum to "
    "tril tril_indices triu triu_indices unbind unique_consecutive where zeros zeros_like".split()
)


class Varies(Exception):
    """The value depends on more than constants, or costs too much to compute."""


def constant_truth(value: fx.Node) -> bool | None:
    """``bool(value)`` if it is the same in each call, else None. value: the node of a tensor of one element."""
    try:
        needed = computed_of([value], constant_operands)
        if len(needed) > MAX_NODES:
            return None
        written = [target for node in value.graph.nodes for target in writes_into(node)]
        if any(not needed.isdisjoint(computed_of([target])) for target in written):
            return None
        with torch.no_grad():
            return bool(computed(value, {}))
    except Varies:
        return None
    except Exception:  # whatever it is, the step itself will meet it
        return None


def constant_operands(node: fx.Node) -> list[fx.Node]:
    """What a constant is computed from. Raises Varies where the node is none."""
    if not (node.op in ("call_function", "call_method") and is_known(node) and is_small(node)):
        raise Varies(node.name)
    return node.all_input_nodes


def is_known(node: fx.Node) -> bool:
    """Whether the operator is known to compute its result from its arguments, and to do nothing else."""
    target: Any = node.target
    name = (target if is_kind(target, str) else getattr(target, "__name__", "")).strip("_")
    if name not in PURE or "out" in node.kwargs:
        return is_pure(node)
    return node.op == "call_method" or target in (getattr(torch, name, None), getattr(operator, name, None))


def is_small(node: fx.Node) -> bool:
    """Whether the result is a tensor (or several) of known size, none of them large or with gradients."""
    made = node.meta.get("val")
    parts = made if isinstance(made, tuple | list) else (made,)
    return all(
        is_kind(t, torch.Tensor)
        and all(is_kind(s, int) for s in t.shape)
        and t.numel() <= MAX_ELEMENTS
        and not t.requires_grad
        for t in parts
    )


def computed(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    """The node's value; it has to be what tracing said of it."""
    if node not in done:
        args: Any = fx.map_arg(node.args, lambda n: computed(n, done))
        kwargs: Any = fx.map_arg(node.kwargs, lambda n: computed(n, done))
        made = apply(node, args, kwargs)
        expected = node.meta["val"]
        if is_kind(expected, torch.Tensor) and (made.shape, made.dtype, made.device) != (
            expected.shape,
            expected.dtype,
            expected.device,
        ):
            raise Varies(node.name)  # a switch was thrown since
        done[node] = made
    return done[node]


def is_constant(condition: Any) -> bool:
    """Whether a condition's truth follows from constants."""
    node = getattr(condition, "node", None)
    return is_kind(node, fx.Node) and constant_truth(node) is not None
