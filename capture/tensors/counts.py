"""Numbers of tokens an expert, as Python reads them: ``counts.tolist()`` of a vector of known length is a list of
symbolic ints, which ``split`` takes; ``bincount`` of a routing index has a known length. No count is negative."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.experts.routing import index_bounds
from moebius.lowering.operators import read_call

from ..torch_facts import torch_fakes, torch_private

FEW = 1024  # experts; a longer list is data, which Python is going to compute with
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BINCOUNTS = frozenset({torch.bincount, torch.Tensor.bincount})


def known_few(fake: torch.Tensor) -> bool:
    """Whether ``tolist()`` gives a flat list of integers, few and known how many."""
    return fake.dtype in INTEGERS and fake.dim() == 1 and is_kind(fake.shape[0], int) and fake.shape[0] <= FEW


def unknown_numbers(world: torch_fakes.FakeWorld, tensor: Any) -> list[Any]:
    return [unknown_number(world, tensor) for _ in range(tensor.fake.shape[0])]


def number_in(tensor: Any) -> Any:
    """The int in a tensor of one element: the same one as long as nothing was written into it."""
    operations = tensor.operations
    world, scope = operations.world, operations.writer.scope
    if torch_private.storage_of(tensor.fake) in operations.uncounted:
        return unknown_number(world, tensor)
    place = id(tensor.fake), world.writes_into(tensor.fake)
    if place not in scope.numbers:
        scope.numbers[place] = unknown_number(world, tensor)
    return scope.numbers[place]


def unknown_number(world: torch_fakes.FakeWorld, tensor: Any) -> Any:
    """An int that a tensor holds: of one that counts it is known not to be negative."""
    counted = never_negative(tensor.node, tensor.operations.uncounted)
    return world.unknown_count() if counted else world.unknown_number()


def bins(index: Any, weights: Any = None, minlength: Any = 0) -> int | None:
    """How many bins ``bincount`` gives, where the values are certain to lie in ``minlength`` bins."""
    if weights is not None or not is_kind(minlength, int):
        return None
    bounds = index_bounds(index.node)
    return minlength if bounds is not None and bounds[0] >= 0 and bounds[1] <= minlength else None


def never_negative(node: Any, uncounted: set[int]) -> bool:
    """Whether a tensor certainly holds numbers of something that was counted. uncounted: storages that may have been
    written into without a new version."""
    value, call = node.meta.get("val"), read_call(node)
    if call is None or not is_kind(value, torch.Tensor) or value.dtype is not torch.int64:
        return False
    if torch_private.storage_of(value) in uncounted:
        return False
    if torch_private.version_of(value):
        return is_marked(node)
    if call.op.inplace:
        return False
    source = call.args.get("input")
    if call.name == "getitem" and is_kind(source, fx.Node) and (pieces := read_call(source)) is not None:
        source = pieces["input"] if pieces.name in ("unbind", "split", "chunk") else source
    match call.name:
        case "one_hot":
            return True
        case "bincount":
            return call["weights"] is None
        case "sum" if is_boolean(source):
            return True
        case "sum" | "cast" | "clone" | "contiguous" | "reshape" | "flatten" | "getitem" | "select":
            return is_kind(source, fx.Node) and never_negative(source, uncounted)
    return False


def is_boolean(node: Any) -> bool:
    value = node.meta.get("val") if is_kind(node, fx.Node) else None
    return is_kind(value, torch.Tensor) and value.dtype is torch.bool


def is_marked(node: fx.Node) -> bool:
    """``zeros.scatter_(1, index, 1)``: zeros into which one operator wrote, and only this number."""
    call = read_call(node)
    zeros = call["input"] if call is not None and call.op.inplace and is_kind(call["input"], fx.Node) else node
    made = read_call(zeros)
    if made is None or made.name != "zeros" or torch_private.version_of(zeros.meta["val"]) != 1:
        return False
    marks = [read_call(user) for user in zeros.users]
    return any(
        mark is not None
        and mark.name == "scatter"
        and mark.op.inplace
        and mark["input"] is zeros
        and type(mark["src"]) is int
        and mark["src"] >= 0
        for mark in marks
    )
