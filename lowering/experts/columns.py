"""Columns of a matrix, one for each expert, however they were cut apart."""

from __future__ import annotations

import operator

from torch import fx

from moebius.lowering.operators import read_call
from moebius.lowering.values import shape_of, value_of

TURNED = frozenset({"t", "T", "mT", "transpose"})


def column_cut(nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, bool] | None:
    """The tensor of which node e is column e, and whether that keeps its axis: ``g.unbind(-1)[e]``, ``g.t()[e]``,
    ``g.split(1, -1)[e]``, ``g.chunk(experts, -1)[e]``."""
    pieces = nodes[0].args[0] if nodes[0].target is operator.getitem else None
    if not isinstance(pieces, fx.Node) or any(node.args != (pieces, e) for e, node in enumerate(nodes)):
        return None
    cut, value = read_call(pieces), value_of(pieces)
    if cut is None:
        return None
    if cut.name in TURNED:
        return turned(pieces, len(nodes))
    if cut.name not in ("unbind", "split", "chunk") or not isinstance(value, tuple | list) or len(value) != len(nodes):
        return None
    whole: fx.Node = cut["input"]
    if cut.name == "unbind" and cut["dim"] in (0, -2):
        return turned(whole, len(nodes))
    shape = shape_of(whole)
    if shape is None or len(shape) < 2 or shape[-1] != len(nodes) or cut["dim"] not in (-1, len(shape) - 1):
        return None
    return whole, cut.name != "unbind"


def turned(node: fx.Node, count: int) -> tuple[fx.Node, bool] | None:
    """Of the rows of a matrix: that of which they are the columns, if it was turned for them."""
    call, shape = read_call(node), shape_of(node)
    if call is None or call.name not in TURNED or shape is None or len(shape) != 2 or shape[0] != count:
        return None
    return call["input"], False
