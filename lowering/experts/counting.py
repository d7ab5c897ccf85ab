"""How many slots go to each expert, and where each expert's rows end, however it is counted.

    torch.histc(ids.float(), E, 0, E - 1)      torch.bincount(ids, minlength=E)      one_hot(ids, E).sum(0)
    (ids[:, None] == torch.arange(E)).sum(0)   zeros(E).scatter_add(0, ids, ones)
    zeros(T, E).scatter(1, index, 1).sum(0)    torch.searchsorted(ids.sort()[0], torch.arange(E), right=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.positions import is_sorted, keeps_order, root_of, uncast
from moebius.lowering.experts.routing import EXACT, distinct, is_among
from moebius.lowering.experts.zeros import number_of, scatter_into
from moebius.lowering.operators import Call, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import dtype_of, rank_of, shape_of

FEW = 2048  # experts up to which a histogram's bins, which are computed in float32, hold one number each


@dataclass
class Counted:
    """slots: the experts' numbers that are counted, each in [0, E). through: what else it was computed of. own: a table
    that was counted in, of which it is known who writes into it."""

    slots: fx.Node
    through: list[fx.Node] = field(default_factory=list)
    own: list[fx.Node] = field(default_factory=list)


class Counting:
    """Looks from where rows end back to what was counted. experts: how many; end: where all of it is read."""

    def __init__(self, experts: Any, storage: Storage, end: fx.Node):
        self.experts, self.storage, self.end = experts, storage, end

    def by_ends(self, ends: fx.Node) -> Counted | None:
        """What was counted, where ``ends`` [E] is where each expert's rows end."""
        call = read_call(uncast(ends))
        if call is None or type(self.experts) is not int or not 1 < self.experts <= FEW:
            return None
        if call.name == "cumsum" and call["dim"] in (0, -1) and is_exact(call.node):
            return self.within(self.by_counts(uncast(call["input"])))
        ids = call["sorted_sequence"] if call.name == "searchsorted" and call["sorter"] is None else None
        right = ids is not None and (call["right"] is True or call["side"] == "right")
        if not isinstance(ids, fx.Node) or not is_sorted(uncast(ids)):
            return None
        return self.within(Counted(ids)) if self.every(call["input"], 0 if right else 1) else None

    def within(self, counted: Counted | None) -> Counted | None:
        return counted if counted is not None and is_among(root_of(counted.slots), self.experts) else None

    def by_counts(self, counts: Any) -> Counted | None:
        """What was counted, where ``counts`` [E] has how many there are of each number."""
        call = read_call(counts)
        if call is None or not is_exact(counts):
            return None
        if call.name == "bincount":  # (its size is not known to be E, where a number may be greater)
            return self.slots(call["input"]) if call["weights"] is None and call["minlength"] == self.experts else None
        if shape_of(counts) != (self.experts,):
            return None
        if call.name == "histc":
            bins, low, high = call["bins"], call["min"], call["max"]
            whole = (bins, low) == (self.experts, 0) and high in (self.experts - 1, self.experts)
            return self.slots(call["input"]) if whole else None
        if call.name == "sum":
            return None if call["keepdim"] else self.by_table(uncast(call["input"]), call["dim"])
        added = self.written(counts, "scatter_add") or self.written(counts, "index_add")
        values = None if added is None else added.args.get("src", added.args.get("source"))
        if added is None or added.args.get("alpha", 1) != 1 or number_of(values) != 1:
            return None
        return self.slots(added["index"], added, counts)

    def by_table(self, table: fx.Node, dims: Any) -> Counted | None:
        """What a table [..., E] says of each number, 1 for yes: its sum over all axes but the last."""
        rank = rank_of(table)
        along = dims if isinstance(dims, tuple | list) else (dims,)
        if rank < 2 or None in along or {dim % rank for dim in along} != set(range(rank - 1)):
            return None
        call = read_call(table)
        if call is not None and call.name == "one_hot":
            return self.slots(call["input"]) if call["num_classes"] == self.experts else None
        if call is not None and call.name == "eq":
            for one, other in call.either_way:
                if self.every(other, 0) and isinstance(one, fx.Node) and same_size((shape_of(one) or (0,))[-1], 1):
                    return self.slots(one)
        marked = self.written(table, "scatter")
        if marked is None or rank != 2 or marked["dim"] not in (1, -1) or number_of(marked["src"]) != 1:
            return None
        index = marked["index"]
        return self.slots(index, marked, table) if isinstance(index, fx.Node) and distinct(index) else None

    def slots(self, numbers: Any, written: Call | None = None, table: fx.Node | None = None) -> Counted | None:
        slots = uncast(numbers)
        if not isinstance(slots, fx.Node) or table is None or written is None:
            return Counted(slots) if isinstance(slots, fx.Node) else None
        through = [one for one in written.node.all_input_nodes if one not in (written["input"], table)]
        return Counted(slots, through, [table, written["input"]])

    def written(self, table: fx.Node, name: str) -> Call | None:
        """The one call of this name by which a table of zeros became what it is."""
        return scatter_into(0, table, self.end, self.storage, (name,))

    def every(self, numbers: Any, first: int) -> bool:
        """``torch.arange(first, first + E)``, with axes of size 1 or without."""
        call = read_call(uncast(numbers)) if isinstance(numbers, fx.Node) else None
        while call is not None and call.name in ("reshape", "unsqueeze", "getitem"):
            if call.name == "getitem" and not keeps_order(call["index"]):
                return False
            call = read_call(uncast(call["input"]))
        if call is None or call.name != "arange" or not same_size((shape_of(numbers) or (0,))[-1], self.experts):
            return False
        return call["bounds"] == (first, first + self.experts) or (first == 0 and call["bounds"] == (self.experts,))


def is_exact(node: fx.Node) -> bool:
    """Whether its type has every whole number that counts come to."""
    return dtype_of(node) in EXACT
