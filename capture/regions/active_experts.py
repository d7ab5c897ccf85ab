"""Loops over a list of the experts that were hit whose iterations need the expert's number in Python.

``for e in mask.sum(…).nonzero(): layer = self.experts[e]`` (or ``self[f"expert_{e[0]}"]``, or an ``if`` between two
bodies on e). One symbolic e cannot say such an iteration. But the rows of ``flags.nonzero()``, flags a vector of E
elements, are exactly the numbers e of 0 … E-1, in order, of which ``flags[e]`` is not zero; and ``index.unique()`` of
what topk gave over E experts is the same of ``(index == e).any()``. So the loop is taken as E iterations, each with its
own number and each skipped on a condition on values: E branches of one iteration, as an unrolled loop with ``if
flags[e]:`` leaves them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.experts.routing import index_bounds
from moebius.lowering.operators import read_call

from ..tensors.index_lists import IndexList
from ..tensors.interfaces import TensorOperators
from ..torch_facts import torch_private
from ..values.expert_numbers import EXPERT, SAME_NUMBERS, WIDE, unwritten
from ..values.rows import TensorRows
from ..values.values import Break, TensorProxy

MOST = 512  # experts


class ActiveExperts:
    """What stands for the rows: E iterations, of which number ``at`` is recorded next, each a branch (a loop of one
    iteration).

    flags: the node of the vector, or of the routing index if ``unique``. watched: nodes that nothing may write into
    until the last iteration has begun. made: enumerate or zip and its two operands, where this stands
    for the pairs that it gives.
    """

    count = 1

    def __init__(self, rows: TensorRows, experts: int, flags: fx.Node, unique: bool, watched: list[fx.Node]):
        self.numbers, self.of_array, self.fake = rows.numbers, rows.of_array, rows.proxy.fake
        self.experts, self.flags, self.unique, self.watched = experts, flags, unique, watched
        self.made: tuple[Any, Any, Any] | None = None
        self.at = 0
        self.finished = False

    def unwritten(self) -> bool:
        return all(unwritten(node) for node in self.watched)

    def is_hit(self, tensors: TensorOperators) -> Any:
        """The condition on which iteration ``at`` runs."""
        flags = tensors.of_fake[id(self.flags.meta["val"])]
        if not self.unique:
            return tensors.get_item(flags, self.at)
        return tensors.function(torch.any, (tensors.function(torch.eq, (flags, self.at), {}),), {})

    def row(self, tensors: TensorOperators) -> TensorProxy | int:
        """The row of iteration ``at``."""
        if self.numbers:
            return self.at
        shape, kind = tuple(self.fake.shape[1:]), {"dtype": self.fake.dtype, "device": self.fake.device}
        row = tensors.function(torch.full, (shape, self.at), kind)
        row.node.meta[EXPERT] = self.at
        return row

    def value(self, row: Any, tensors: TensorOperators) -> Any:
        """What iteration ``at`` begins with. row: the row of the list, as the program sees it."""
        if self.made is None:
            return row
        maker, hits, other = self.made
        numbers = tensors.function(torch.flatten, (tensor_of(hits),), {})  # in ascending order
        if maker is enumerate:
            place = tensors.function(torch.sum, (tensors.function(torch.lt, (numbers, self.at), {}),), {})
            return tensors.method(tensors.function(torch.add, (place, other), {}), "item", (), {}), row
        # (which is looked for, so that it is a number where the expert was not hit)
        here = tensors.function(torch.eq, (numbers, self.at), {})
        item = tensors.function(torch.sum, (tensors.function(torch.mul, (tensor_of(other), here), {}),), {})
        return row, tensors.method(item, "item", (), {}) if type(other) is IndexList else item


def tuples(maker: Any, values: list, kwargs: dict[str, Any]) -> ActiveExperts | None:
    """What stands for ``enumerate(hits)``, or for ``zip(hits, …)`` with what has as many items."""
    hits, *others = values or (None,)
    if maker is enumerate and kwargs.keys() <= {"start"}:
        others, kwargs = [*others, *kwargs.values()] or [0], {}
    elif maker is zip and kwargs.keys() <= {"strict"}:
        kwargs = {}
    if kwargs or len(others) != 1 or not is_kind(hits, IndexList | TensorProxy) or not tensor_of(hits).fake.dim():
        return None
    if maker is enumerate and type(others[0]) is not int:
        return None
    if maker is zip and not has_length_of(others[0], tensor_of(hits)):
        return None
    found = active_iterations(TensorRows(tensor_of(hits), numbers=type(hits) is IndexList))
    if found is not None:
        found.made = maker, hits, others[0]
    return found


def tensor_of(value: Any) -> TensorProxy:
    return value.proxy if type(value) is IndexList else value


def has_length_of(value: Any, other: TensorProxy) -> bool:
    """Whether it is a list of numbers, or a vector of such, with as many items, which only the running step knows."""
    if not is_kind(value, IndexList | TensorProxy) or tensor_of(value).fake.dtype is not torch.int64:
        return False
    sizes = [*tensor_of(value).fake.shape, other.fake.shape[0]]
    return len(sizes) == 2 and len({*map(torch_private.expression, sizes)}) == 1


def active_iterations(rows: TensorRows) -> ActiveExperts | None:
    """The iterations for the rows of a tensor, if it is certainly a list of hits of which nothing was changed."""
    fake = rows.proxy.fake
    if fake.dtype not in WIDE or any(not is_kind(size, int) or size != 1 for size in fake.shape[1:]):
        return None
    node: Any = rows.proxy.node
    watched: list[fx.Node] = []
    while is_kind(node, fx.Node) and (call := read_call(node)) is not None and not call.op.inplace:
        watched.append(node)
        source = call.args.get("input")
        if not is_kind(source, fx.Node) or not is_kind(source.meta.get("val"), torch.Tensor | tuple | list):
            return None
        if call.name == "cast" and call.node.meta["val"].dtype not in WIDE:
            return None
        if call.name in SAME_NUMBERS and not (call.name == "squeeze" and not is_kind(call["dim"], int)):
            node = source
        elif call.name == "getitem" and call["index"] == (slice(None), 0) and len(source.meta["val"].shape) == 2:
            node = source
        elif call.name == "getitem" and call["index"] == 0 and is_kind(source.meta["val"], tuple | list):
            node = source  # of nonzero(as_tuple=True)
        else:
            found = flags_of(call, source)
            if found is None or found[0] > MOST:
                return None
            watched.append(source)
            iterations = ActiveExperts(rows, found[0], source, found[1], watched)
            return iterations if iterations.unwritten() else None
    return None


def flags_of(call: Any, source: fx.Node) -> tuple[int, bool] | None:
    """(E, whether it is of ``unique``) of the operator that made the list."""
    if not is_kind(source.meta["val"], torch.Tensor):
        return None
    shape = source.meta["val"].shape
    if call.name in ("nonzero", "argwhere"):
        return (shape[0], False) if len(shape) == 1 and is_kind(shape[0], int) else None
    if call.name != "unique" or call["dim"] is not None:
        return None
    bounds = index_bounds(source)
    if call["sorted"] is False or bounds is None or bounds[0] != 0:
        return None
    return bounds[1], True


def refuse_kept_row(row: Any, carried: list[TensorProxy]) -> None:
    """The iteration's row is a part of the list of hits to the program, and a tensor of its own in the graph."""
    kept = {torch_private.storage_of(one.fake) for one in carried}
    for part in filter(lambda one: is_kind(one, TensorProxy), row if type(row) is tuple else (row,)):
        if torch_private.version_of(part.fake) or torch_private.storage_of(part.fake) in kept:
            detail = "an iteration writes into its row, or keeps it"
            raise Break("expert loop changes what it runs over", detail, "copy it first")
