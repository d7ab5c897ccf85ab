"""Projections of experts in phases: all of the first one joined, an activation of the whole, and cut up again.

    h = torch.cat([linear(part, w1[e]) for e, part in enumerate(x.split(sizes))])
    y = torch.cat([linear(part, w2[e]) for e, part in enumerate(act(h).split(sizes))])

Where what is between is a function of each row by itself, and the cuts are those of the parts that were joined, piece e
is that function of part e. So written, each expert stands by itself and may become part of an operator
(blocks.py).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.operators import ELEMENTWISE, is_pure, read_call
from moebius.lowering.torch_private import same_size, set_grad_enabled
from moebius.lowering.values import certain, infer, shape_of, value_of

ALONG_ROWS = ELEMENTWISE | {"cast", "contiguous", "clone", "chunk", "getitem", "glu"}
FAR = 64
Joins = dict[fx.Node, list[fx.Node]]
Pieces = dict[int, tuple[fx.Node, fx.Node]]  # by number: (the result, its core: see Provisional)


def pieces_by_themselves(split: fx.Node) -> Pieces | None:
    """Each piece of such a split, made of its part of each join before the split; None where this is none."""
    call = read_call(split)
    if call is None or call["dim"] != 0 or not isinstance(call["input"], fx.Node):
        return None
    sizes = sizes_of(split)
    between, joins = joined_behind(split, call["input"], sizes)
    if sizes is None or not joins or not is_quiet(split, {*between, *joins, *itertools.chain(*joins.values())}):
        return None
    found: Pieces = {}
    for number in range(len(sizes)):
        own = {join: parts[number] for join, parts in joins.items()}
        for node in sorted(between):
            own[node] = split.graph.node_copy(node, lambda one, own=own: own.get(one, one))  # type: ignore[misc]
            try:
                own[node].meta["val"] = infer(own[node])
            except Exception:  # it does not work on the rows of one expert
                return None
        found[number] = own[call["input"]], own[call["input"]]
    return found


def is_quiet(end: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether nobody writes into what is between the parts and the split, nor switches gradients there."""
    switches = end.graph.find_nodes(op="call_function", target=set_grad_enabled)
    return not any(min(nodes) < node < end for node in switches) and not any(Storage(end.graph).writers_of(nodes))


def sizes_of(split: fx.Node) -> list[Any] | None:
    """The sizes of the pieces, one each; None unless each piece is taken once, by its number."""
    call = certain(read_call(split))
    sizes = call["split_size_or_sections"]
    if not isinstance(sizes, tuple | list):
        return None
    numbers = [user.args[1] if user.target is operator.getitem else None for user in split.users]
    return list(sizes) if sorted(map(str, numbers)) == sorted(map(str, range(len(sizes)))) else None


def joined_behind(split: fx.Node, node: fx.Node, sizes: list[Any] | None) -> tuple[list[fx.Node], Joins]:
    """(the nodes from joins to what is split, the joins with the parts of each), if that is cut as they were joined.

    Nobody else may read them: what the parts are joined for would be computed twice."""
    between: list[fx.Node] = []
    joins: Joins = {}
    pending = [node] if sizes is not None else []
    rows = (shape_of(node) or (None,))[0]
    while pending:
        one = pending.pop()
        if one in between or one in joins:
            continue
        parts = parts_of(one, sizes)
        if parts is not None:
            joins[one] = parts
        elif keeps_to_rows(one, rows) and len(between) < FAR:
            between.append(one)
            pending += [argument for argument in one.all_input_nodes if not is_feature(argument)]
        else:
            return [], {}
    inside = {split, *between}
    users = [user for one in (*between, *joins) for user in one.users if user not in inside]
    if any(user.users or user.target is not operator.getitem for user in users):  # (pieces that nobody uses)
        return [], {}
    if any(len(part.users) > 1 for parts in joins.values() for part in parts):
        return [], {}
    return between, joins


def parts_of(node: fx.Node, sizes: list[Any] | None) -> list[fx.Node] | None:
    """What a node joins, one under another, if they have such sizes."""
    call = read_call(node)
    parts = call["tensors"] if call is not None and call.name == "cat" and call["dim"] == 0 else None
    if sizes is None or not isinstance(parts, tuple | list) or len(parts) != len(sizes):
        return None
    return list(parts) if are_cut(parts, sizes) else None


def keeps_to_rows(node: fx.Node, rows: Any) -> bool:
    call, shape = read_call(node), shape_of(node)
    if call is None or not is_pure(node) or call.name not in ALONG_ROWS:
        return False
    if call.name in ("chunk", "glu"):
        return call["dim"] == -1
    if call.name == "getitem":
        return along_features(call["index"]) or isinstance(call["index"], int) and shape_of(call["input"]) is None
    return shape is not None and len(shape) == 2 and same_size(shape[0], rows)


def along_features(index: Any) -> bool:
    """``[..., a:b]`` or ``[:, a:b]``."""
    keys = index if isinstance(index, tuple) else ()
    plain = len(keys) == 2 and isinstance(keys[1], slice) and not any(isinstance(key, fx.Node) for key in keys)
    return plain and (keys[0] is ... or keys[0] == slice(None))


def is_feature(node: fx.Node) -> bool:
    """A tensor of one axis, the features', or a number."""
    shape = shape_of(node)
    return shape is not None and len(shape) < 2


def are_cut(parts: Sequence[fx.Node], sizes: list[Any]) -> bool:
    """Whether each of the parts has as many rows as its piece."""
    return all(same_size((shape_of(p) or (None,))[0], value_of(n)) for p, n in zip(parts, sizes, strict=True))
