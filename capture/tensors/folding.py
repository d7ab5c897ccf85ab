"""Branches on tensors that are made of constants alone (a mask of positions), and numbers that are read from them: they
are computed while tracing.

Nothing is guarded for it: the operators and their arguments are written in the graph, so they give the same each call.
Sizes that vary are no constants; neither is anything that is random, or that the step writes to in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering import apply, is_pure

from ..torch_facts.torch_fakes import writes_into

VARIES = "varies"  # in a node's meta: it is known to be no constant
MAX_NODES = 256  # operators that are run for one branch
MAX_ELEMENTS = 1 << 20  # of each result
# Besides those that lowering knows: operators without effects, whose result is decided by their arguments.
PURE = frozenset(
    "all any arange argmax argmin amax amin count_nonzero cummax cummin cumprod cumsum diff diagonal eq expand "
    "expand_as flip full full_like ge gt is_nonzero isfinite isin isinf isnan le linspace logical_and logical_not "
    "logical_or logical_xor lt masked_fill max min ne ones ones_like outer prod repeat roll searchsorted stack sum "
    "tensor to tril tril_indices triu triu_indices unbind unique_consecutive where zeros zeros_like".split()
)


class Varies(Exception):
    """The value depends on more than constants, or costs too much to compute."""


def constant_truth(value: fx.Node) -> bool | None:
    """``bool(value)`` if it is the same in each call, else None. value: the node of a tensor of one element."""
    return constant(value, bool)


def constant_number(value: fx.Node) -> Any:
    """``value.item()`` in the same way."""
    return constant(value, torch.Tensor.item)


def constant(value: fx.Node, read: Callable[[torch.Tensor], Any]) -> Any:
    """What Python reads from a tensor if it is the same in each call, else None."""
    try:
        with torch.no_grad():
            return read(computed(value, {})) if constants_of(value) else None
    except Exception:  # whatever it is, the step itself will meet it
        return None


def constants_of(value: fx.Node) -> list[fx.Node]:
    """What a constant is computed from, itself included; empty where it is none, or any was written to. Nodes that are
    computed of what varies are told so once: questions about each in a row of them walk no further than the last."""
    came_from: dict[fx.Node, fx.Node | None] = {value: None}
    pending = [value]
    while pending:
        node: fx.Node | None = pending.pop()
        assert node is not None
        if VARIES in node.meta or len(came_from) > MAX_NODES or not is_constant_operator(node):
            while node is not None:
                node.meta[VARIES] = True
                node = came_from[node]
            return []
        operands = [operand for operand in node.all_input_nodes if operand not in came_from]
        came_from |= dict.fromkeys(operands, node)
        pending += operands
    return [] if any(writes_into(part) for node in came_from for part in parts_of(node)) else [*came_from]


def is_constant_operator(node: fx.Node) -> bool:
    """Whether the node is a constant if its operands are."""
    return node.op in ("call_function", "call_method") and is_known(node) and is_small(node)


def is_known(node: fx.Node) -> bool:
    """Whether the operator is known to compute its result from its arguments, and to do nothing else."""
    target: Any = node.target
    name = (target if is_kind(target, str) else getattr(target, "__name__", "")).strip("_")
    if name not in PURE or "out" in node.kwargs:
        return is_pure(node)
    return node.op == "call_method" or target in (getattr(torch, name, None), getattr(operator, name, None))


def is_small(node: fx.Node) -> bool:
    """Whether the result is a tensor (or several) of known size, none of them large or with gradients."""
    return all(
        is_kind(t, torch.Tensor)
        and all(is_kind(s, int) for s in t.shape)
        and t.numel() <= MAX_ELEMENTS
        and not t.requires_grad
        for t in parts_of(node)
    )


def parts_of(node: fx.Node) -> tuple[Any, ...]:
    """The tensors that it gives, as fakes."""
    made = node.meta.get("val")
    return tuple(made) if isinstance(made, tuple | list) else (made,)


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
