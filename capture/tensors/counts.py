"""Numbers of tokens an expert, as Python reads them: ``counts.tolist()`` of a vector of known length is a list of
symbolic ints, which ``split`` takes; ``bincount`` of a routing index has a known length. No count is negative. As many
tokens chose an expert as there are slots that name it, for a token's experts differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.experts.routing import distinct, index_bounds, index_root, is_written
from moebius.lowering.operators import read_call
from moebius.lowering.values import rank_of

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


class SlotCounts:
    """Which sizes are the number of slots of an index that name one expert. scope: where that is asked. uncounted: as
    of ``never_negative``."""

    def __init__(self, scope: Any, uncounted: set[int]):
        self.scope, self.as_made, self.uncounted = scope, scope.as_made, uncounted

    def are_equal(self, one: Any, other: Any) -> bool:
        """Of two sizes, by their symbols."""
        slots = self.counted(one)
        return slots is not None and slots == self.counted(other)

    def counted(self, size: Any) -> tuple[Any, ...] | None:
        """(index, expert), where a size is the number of rows that were picked by those slots, or by their tokens."""
        rows = next((scope.rows_of[size] for scope in self.scope.around() if size in scope.rows_of), None)
        mask = None if rows is None else self.mask_behind(rows)
        return None if mask is None else self.of_mask(mask)

    def mask_behind(self, node: fx.Node) -> Any:
        """The mask of which a node holds the places, or the rows."""
        call = read_call(self.as_made(node))
        if call is not None and call.name == "getitem":
            key, whole = call["index"], read_call(self.as_made(call["input"]))
            if type(key) is not int or whole is None or whole.name not in ("where", "nonzero"):
                first, *others = key if is_kind(key, tuple) else (key,)
                return first if is_boolean(first) and not any(is_kind(one, fx.Node) for one in others) else None
            call = whole
        if call is not None and call.name == "where":
            return None if is_kind(call["input"], fx.Node) else call["condition"]
        return call["input"] if call is not None and call.name in ("nonzero", "argwhere") else None

    def of_mask(self, mask: Any) -> tuple[Any, ...] | None:
        """(index, expert): of ``index == expert``, of the tokens with such a slot, and of these tokens' slots again."""
        call = read_call(self.root(mask))
        if call is None or self.is_written(call.node):
            return None
        if call.name == "any" and call["dim"] in (-1, rank_of(call["input"]) - 1):
            compared = read_call(self.as_made(call["input"]))
            once = compared is not None and compared.name == "eq" and distinct(self.as_made(compared["input"]))
            return self.of_mask(call["input"]) if once else None
        if call.name != "eq" or not is_kind(call["input"], fx.Node):
            return None
        index, expert = self.as_made(call["input"]), self.as_made(call["other"])
        number = is_kind(expert, fx.Node) and rank_of(expert) == 0 and not self.is_written(expert)
        if self.is_written(index) or not (number or type(expert) is int):
            return None
        picked = read_call(index)
        if picked is not None and picked.name == "getitem" and is_boolean(picked["index"]):
            slots = self.of_mask(picked["index"])
            return slots if slots == (self.root(picked["input"]), expert) else None
        return self.root(index), expert

    def root(self, node: Any) -> Any:
        return self.as_made(index_root(self.as_made(node)))

    def is_written(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        known = is_kind(value, torch.Tensor) and torch_private.storage_of(value) not in self.uncounted
        return not known or is_written(node)


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
