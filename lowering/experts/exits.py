"""Experts between which the step may be left, where data decide a branch of Python's: ``if start == len(rows): break``.

The branch is a node that holds the step to the way that was captured (step/branches.py). Experts behind it may run
before it, on no rows if the step will be left there: then it is as if they had not run. For that, what decides must be
known before the first expert. Whether they then become one operator is found out as for all experts that stand one
after another (blocks.py); if not, all is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.contract import Work
from moebius.lowering.experts.batched import INTEGERS
from moebius.lowering.experts.blocks import EXITS, expert_rows, inside, runs
from moebius.lowering.experts.stacking import is_left, rows_if
from moebius.lowering.operators import is_size, read_call
from moebius.lowering.step.branches import require_branch
from moebius.lowering.values import computed_of, same_shape, shape_of, stands_at, tensor_of

CALM = frozenset(
    {"getitem", "cast", "contiguous", "clone", "size", "numel", "item", "tolist", "not", "logical_not", "eq", "ne",
     "gt", "ge", "lt", "le", "sum", "any", "where", "nonzero", "argwhere", "split", "unbind", "squeeze", "reshape"}
)  # fmt: skip
# what does not fail here, as it has not where the loop goes on


@dataclass
class Cut:
    """An expert behind exits. down: its last product. asked: whether the step is left before it. rows: what it ran on,
    each with what it runs on now."""

    down: fx.Node
    asked: fx.Node
    rows: list[tuple[fx.Node, fx.Node]]


def cut_behind_exits(work: Work) -> list[Cut]:
    """Cuts the rows of all experts that stand behind such a branch and have others before it."""
    graph = work.gm.graph
    exits = graph.find_nodes(op="call_function", target=require_branch)
    found: list[Cut] = []
    for downs in runs(graph) if exits else ():
        between = [node for node in exits if downs[0] < node < downs[-1]]
        storage = Storage(graph) if between else None
        if storage is not None and all(is_known(node.args[0], downs[0], storage) for node in between):
            found += cuts(graph, downs, between, storage)
    return found


def cuts(graph: fx.Graph, downs: list[fx.Node], exits: list[fx.Node], storage: Storage) -> Iterator[Cut]:
    later = [down for down in downs if exits[0] < down]
    if not all(is_known(rows, exits[0], storage) for down in later for rows in expert_rows(down) or ()):
        return
    first = downs[0]
    for one in sorted(set().union(*(made_since(node.args[0], first) for node in exits))):
        first.prepend(one)
    for down in later:
        before = [node for node in exits if node < down]
        with graph.inserting_before(first):
            asked = graph.call_function(is_left, tuple(one for node in before for one in node.args[:2]))
        stands_at(asked, before[0]).meta["val"] = None
        pairs = [(rows, cut(rows, asked, first)) for rows in dict.fromkeys(expert_rows(down) or ())]
        for rows, now in pairs:
            for user in [user for user in rows.users if user in inside(down) or user is down]:
                user.replace_input_with(rows, now)
        down.meta[EXITS] = set(before)
        yield Cut(down, asked, pairs)


def made_since(node: Any, first: fx.Node) -> set[fx.Node]:
    """What a value is computed of from a node on."""
    if not isinstance(node, fx.Node) or node < first:
        return set()
    return computed_of([node], lambda one: [argument for argument in one.all_input_nodes if first < argument])


def is_known(node: Any, first: fx.Node, storage: Storage) -> bool:
    """Whether a value may be computed before ``first``: nothing there may fail, but for a lookup in itself, which will
    be of no rows; and nothing that it is made of is written by then."""
    made = made_since(node, first)
    for one in made:
        call = read_call(one)
        known = call is not None and call.name in CALM and not call.op.inplace
        keys = one.all_input_nodes[1:] if call is not None and call.name == "getitem" else []
        lists = [key for key in keys if shape_of(key) and not is_mask_of(key, one.args[0])]
        if not (known or is_size(one)) or (lists and not (one is node and all(map(is_list, lists)))):
            return False
    read = made | {argument for one in made for argument in one.all_input_nodes}
    return not made or storage.writer_into(read, max(made)) is None


def is_list(key: fx.Node) -> bool:
    value = tensor_of(key)
    return value is not None and value.dim() == 1 and value.dtype in INTEGERS


def is_mask_of(key: fx.Node, tensor: Any) -> bool:
    """Whether it is a mask of the first axes of a tensor, which picks rows that are there."""
    value, axes = tensor_of(key), shape_of(key) or ()
    return value is not None and value.dtype is torch.bool and same_shape(axes, (shape_of(tensor) or ())[: len(axes)])


def cut(rows: fx.Node, asked: fx.Node, first: fx.Node) -> fx.Node:
    """None of the rows where the step is left: behind them, and behind what is asked before ``first``."""
    graph, keys = rows.graph, [key for key in rows.all_input_nodes[1:] if shape_of(key)]
    at = rows.next if first < rows else first
    with graph.inserting_before(at):
        if not keys or not all(map(is_list, keys)) or (call := read_call(rows)) is None or call.name != "getitem":
            made = graph.call_function(rows_if, (rows, asked))
        else:
            few = {key: stands_at(graph.call_function(rows_if, (key, asked)), rows) for key in keys}
            for key, one in few.items():
                one.meta["val"] = key.meta["val"]
            made = graph.node_copy(rows, lambda argument: few.get(argument, argument))
    stands_at(made, rows).meta["val"] = rows.meta["val"]
    return made


def settle(work: Work, found: list[Cut]) -> None:
    """Experts that became part of no operator run on the rows that they had."""
    replaced = set(work.loose)
    for one in found:
        one.down.meta.pop(EXITS, None)
        for rows, now in one.rows if one.down not in replaced else ():
            now.replace_all_uses_with(rows)
            work.loose.append(now)
