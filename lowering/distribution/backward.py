"""What backward of a graph will exchange, and in which order: known before, where the same graph runs it.

Ranks compare digests of that in the header of each exchange in forward. Where they are equal, no rank can come to
another place in backward, and its exchanges need no header of their own. The order is autograd's: by which nodes were
made of which, and in what order. Sizes and constants do not change that; they may differ from rank to rank.
"""
from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from moebius.kernels import experts
from moebius.lowering.distribution.sharded import Sharded
from moebius.lowering.distribution.torch_private import has_body, tree_leaves
from moebius.lowering.step.absent import is_backward
from moebius.lowering.step.gradients import set_gradient
from moebius.lowering.values import real_of

PLAIN = frozenset({experts, set_gradient})  # beside torch's own


def promises(
    gm: fx.GraphModule, regions: Sequence[fx.Node], here: Collection[fx.Node], meetings: Sequence[fx.Node] = ()
) -> dict[fx.Node, tuple[int, int]]:
    """For each expert region (before it is spread over ranks), and each other node where ranks meet: the digest of what
    backward of a region will do, 0 where it is not known, and how many regions before it have promised theirs and not
    been through backward. here: parameters of which the graph takes this rank's rows."""
    nodes = list(gm.graph.nodes)
    found = dict.fromkeys((*regions, *meetings), (0, 0))
    start = 0
    for stop, end in enumerate(nodes):
        if is_backward(end):
            before = [node for node in nodes[start:stop] if node in found]
            first = next((node for node in before if node in regions), None)
            span = nodes[nodes.index(first) : stop + 1] if first else []
            start = stop + 1
            if span and all(_is_followed(node, here) for node in span):
                digest, owed = _digest(span), 0
                for node in before:
                    reached = node in regions and _reaches(node, end)
                    found[node] = (digest if reached else 0, owed)
                    owed += reached
    return found


def _is_followed(node: fx.Node, here: Collection[fx.Node]) -> bool:
    """Whether what a node adds to autograd's graph is the same whatever its data, and no ranks meet in it."""
    target: Any = node.target
    if node.op == "placeholder" or target in PLAIN or node in here:
        return True
    if is_backward(node):
        return node.op == "call_method" and target == "backward" and set(node.kwargs) <= {"retain_graph", "gradient"}
    if any(_on_ranks(item) and item not in here for item in node.all_input_nodes):
        return False
    if node.op == "call_method":
        return True
    home = str(getattr(target, "__module__", None) or type(target).__module__).partition(".")[0]
    return node.op == "call_function" and not has_body(target) and home in ("torch", "_operator", "math")


def _on_ranks(node: fx.Node) -> bool:
    """Whether a node's value is a parameter on the ranks, itself: what is computed of it may communicate."""
    return node.op == "placeholder" and isinstance(real_of(node), Sharded)


def _reaches(region: fx.Node, end: fx.Node) -> bool:
    """Whether backward at ``end`` comes to a region."""
    pending, seen = [region], {region}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user is end:
                return True
            if user not in seen and any(value.requires_grad for value in tensors_of(user)):
                seen.add(user)
                pending.append(user)
    return False


def _digest(span: list[fx.Node]) -> int:
    """31 bits, not 0: of the operators on tensors, by what they are made of and whether they have gradients."""
    numbers: dict[fx.Node, int] = {}
    lines: list[tuple[Any, ...]] = []
    for node in span:
        tensors = tensors_of(node)
        if tensors or node.meta.get("val") is None:
            inputs = [numbers.get(item, -1 - _needs(item)) for item in node.all_input_nodes if tensors_of(item)]
            name = getattr(node.target, "__name__", str(node.target))
            numbers[node] = len(lines)
            lines.append((node.op, name, inputs, [value.requires_grad for value in tensors]))
    return zlib.crc32(repr(lines).encode()) & 0x7FFFFFFF or 1


def _needs(node: fx.Node) -> bool:
    return any(value.requires_grad for value in tensors_of(node))


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
