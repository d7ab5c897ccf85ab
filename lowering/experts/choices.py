"""One expert's rows or those so far: ``out = torch.where(index == e, expert(x), out)``, as a sum of masked rows.

Where no two of the conditions hold for one token, and where the chain begins with zeros, each token has the rows of
the one expert whose condition holds, or zeros: Σ_e where(condition_e, rows_e, 0). Two conditions exclude one another
if they compare the same integers with different numbers. What that sum computes is for dense.py to prove.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts.dense import DenseSum
from moebius.lowering.experts.masked import chooses, is_zero, same_reading
from moebius.lowering.experts.unrolled_loops import Differ
from moebius.lowering.operators import read_call
from moebius.lowering.values import add_call, dtype_of

WHOLE = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
VIEWS = frozenset({"unsqueeze", "getitem", "expand", "reshape"})


@dataclass(frozen=True)
class Link:
    """``torch.where(condition, rows, before)``."""

    condition: fx.Node
    rows: fx.Node
    before: fx.Node


def link_of(node: fx.Node) -> Link | None:
    call = read_call(node)
    if call is None or call.name != "where":
        return None
    condition, rows, before = call["condition"], call["input"], call["other"]
    return Link(condition, rows, before) if all(chooses(node, condition, one) for one in (rows, before)) else None


def choices(graph: fx.Graph) -> list[DenseSum]:
    """Such chains of two links and more on zeros."""
    chains: dict[fx.Node, list[Link]] = {}
    for node in graph.nodes:
        link = link_of(node)
        if link is None:
            continue
        zeros = read_call(link.before)
        if is_zero(link.before) and zeros is not None and zeros["requires_grad"] is not True:
            chains[node] = [link]
        elif link.before in chains and len(link.before.users) == 1:
            chains[node] = [*chains.pop(link.before), link]
    found = [(last, links) for last, links in chains.items() if len(links) > 1 and exclude_one_another(links)]
    return [Choices(last, links) for last, links in found]


def exclude_one_another(links: list[Link]) -> bool:
    numbers = {differ_in_number(links[0].condition, link.condition) for link in links}
    return None not in numbers and len(numbers) == len(links)


def differ_in_number(first: Any, other: Any) -> int | None:
    """The number that ``other`` compares integers with, where it is otherwise what ``first`` is: the same view of the
    same integers."""
    one, two = (read_call(node) for node in (first, other))
    if one is None or two is None or one.name != two.name or one.op.inplace or two.op.inplace:
        return None
    if one.name in VIEWS:
        rest, others = (tuple(given for name, given in call.args.items() if name != "input") for call in (one, two))
        return differ_in_number(one["input"], two["input"]) if same_reading(rest, others) else None
    numbers = one.name == "eq" and type(one["other"]) is type(two["other"]) is int
    if not numbers or dtype_of(one["input"]) not in WHOLE or not same_reading(one["input"], two["input"]):
        return None
    return int(two["other"])


def made_of(condition: fx.Node) -> list[fx.Node]:
    """The views of a condition, its comparison, and what is compared, with the views of that."""
    found = [condition]
    while (call := read_call(found[-1])) is not None and isinstance(call.args.get("input"), fx.Node):
        if call.name not in VIEWS | {"eq", "select"}:
            break
        found.append(call["input"])
    return found


class Choices(DenseSum):
    """Such a chain as a sum."""

    def __init__(self, last: fx.Node, links: list[Link]):
        super().__init__(last, last)
        self.links = links

    def parts(self, storage: Storage) -> tuple[fx.Node | None, list[fx.Node]]:
        graph, last = self.last.graph, self.last
        read = {part for link in self.links for part in (link.condition, link.rows, link.before)}
        read |= {behind for link in self.links for behind in made_of(link.condition)}
        if (writer := storage.writer_into(read, last)) is not None:
            raise Differ("what is chosen between is changed in place", writer)
        with graph.inserting_before(last):
            return None, [add_call(graph, last, torch.where, link.condition, link.rows, 0.0) for link in self.links]
