"""Rules of gates of all tokens, of which an iteration takes this expert's: ``(weight * (index ==
e)).sum(-1)[token]``."""

from __future__ import annotations

import torch

from moebius.lowering.experts.facts import (
    Coordinate,
    ExpertId,
    Fact,
    Invariant,
    Items,
    Mask,
    MaskedWeights,
    OwnGate,
    RowWeight,
)
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.routing import index_bounds
from moebius.lowering.experts.rules_rows import DOTS, FULL, row_positions
from moebius.lowering.operators import Call
from moebius.lowering.values import same_shape


@rule("mul")
def masked_weights(reader: Reader, call: Call) -> Fact | None:
    """``weight * (index == e)``, the mask cast or not."""
    for left, right in ((call["input"], call["other"]), (call["other"], call["input"])):
        weight, mask, dtype = reader.fact(left), reader.fact(right), reader.dtype(left)
        if not isinstance(weight, Invariant) or not isinstance(mask, Mask) or call.op.inplace or dtype is None:
            continue
        shape, index = reader.shape(left), reader.shape(mask.index.node)
        plain = mask.axes == (0, 1) and not mask.keep and dtype.is_floating_point and dtype == reader.dtype(call.node)
        if plain and same_shape(shape, index) and same_shape(shape, reader.shape(right)):
            return MaskedWeights(mask.index, weight)
    return None


@rule("sum")
def gate_of_weights(reader: Reader, call: Call) -> Fact | None:
    """Its sum over the slots: column e of a matrix of all experts' gates."""
    fact, dims = reader.fact(call["input"]), call["dim"]
    if not isinstance(fact, MaskedWeights) or call.args.get("dtype") is not None or dims not in (-1, 1, (-1,), (1,)):
        return None
    index, weight = fact.index.node, fact.weight.node
    bounds, inside = index_bounds(index), reader.loop.graph
    if bounds is None or bounds[0] != 0 or index.graph is not inside or weight.graph is not inside:
        return None
    if reader.dtype(index) is not torch.int64:
        index = reader.make("long", index)
    one = reader.make(torch.select, reader.make(torch.nn.functional.one_hot, index, bounds[1]), 1, 0)
    zeros = reader.make("type_as", reader.make(torch.zeros_like, one), weight)
    gates = reader.make(torch.scatter_add, zeros, 1, index, weight)
    return OwnGate(Invariant(("outside", gates), gates), column=call["keepdim"] is True)


@rule("getitem")
def own_gate(reader: Reader, call: Call) -> Fact | None:
    """``gates[:, e]``, and what it is for the selected tokens."""
    fact, key = reader.fact(call["input"]), reader.fact(call["index"])
    if isinstance(fact, Invariant) and reader.rank(call["input"]) == 2 and isinstance(key, Items):
        whole, own = (key.items[0], key.items[-1]) if len(key.items) == 2 else (None, None)
        return OwnGate(fact) if whole in (FULL, DOTS) and own == ExpertId() else None
    if not isinstance(fact, OwnGate):
        return None
    return at_rows(reader, call, fact, row_positions(key))


@rule("index_select")
def own_gate_selected(reader: Reader, call: Call) -> Fact | None:
    fact, key = reader.fact(call["input"]), reader.fact(call["index"])
    if not isinstance(fact, OwnGate) or call["dim"] != 0 or not isinstance(key, Coordinate) or key.column:
        return None
    return at_rows(reader, call, fact, key)


def at_rows(reader: Reader, call: Call, fact: OwnGate, at: Coordinate | None) -> Fact | None:
    dtype = reader.dtype(call.node)
    if at is None or at.axis != 0 or dtype is None:
        return None
    return RowWeight(at.selection, dtype, fact.source, (0, "e"), fact.column)
