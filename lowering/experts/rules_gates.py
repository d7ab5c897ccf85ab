"""Rules of gates of all tokens, of which an iteration takes this expert's: ``(weight * (index ==
e)).sum(-1)[token]``."""

from __future__ import annotations

import torch

from moebius.lowering.experts.facts import (
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
from moebius.lowering.values import dtype_of, rank_of, same_shape, shape_of


@rule("mul")
def masked_weights(reader: Reader, call: Call) -> Fact | None:
    """``weight * (index == e)``, the mask cast or not."""
    for left, right in call.either_way:
        weight, mask, dtype = reader.fact(left), reader.fact(right), dtype_of(left)
        if not isinstance(weight, Invariant) or not isinstance(mask, Mask) or call.op.inplace or dtype is None:
            continue
        shape, index = shape_of(left), shape_of(mask.index.node)
        plain = mask.axes == (0, 1) and not mask.keep and dtype.is_floating_point and dtype == dtype_of(call.node)
        if plain and same_shape(shape, index) and same_shape(shape, shape_of(right)):
            return MaskedWeights(mask.index, weight)
    return None


@rule("sum", of=MaskedWeights)
def gate_of_weights(reader: Reader, call: Call, fact: MaskedWeights) -> Fact | None:
    """Its sum over the slots: column e of a matrix of all experts' gates."""
    if call.args.get("dtype") is not None or call["dim"] not in (-1, 1, (-1,), (1,)):
        return None
    index, weight = fact.index.node, fact.weight.node
    bounds, inside = index_bounds(index), reader.loop.graph
    if bounds is None or bounds[0] != 0 or index.graph is not inside or weight.graph is not inside:
        return None
    if dtype_of(index) is not torch.int64:
        index = reader.make("long", index)
    one = reader.make(torch.select, reader.make(torch.nn.functional.one_hot, index, bounds[1]), 1, 0)
    zeros = reader.make("type_as", reader.make(torch.zeros_like, one), weight)
    gates = reader.make(torch.scatter_add, zeros, 1, index, weight)
    return OwnGate(Invariant(("outside", gates), gates), column=call["keepdim"] is True)


@rule("getitem", of=Invariant)
def own_gate(reader: Reader, call: Call, fact: Invariant) -> Fact | None:
    """``gates[:, e]``."""
    key = reader.fact(call["index"])
    own = isinstance(key, Items) and len(key.items) == 2 and key.items[0] in (FULL, DOTS) and key.items[1] == ExpertId()
    return OwnGate(fact) if own and rank_of(call["input"]) == 2 else None


@rule("getitem", "index_select", of=OwnGate)
def at_rows(reader: Reader, call: Call, fact: OwnGate) -> Fact | None:
    """What it is for the selected tokens."""
    at, dtype = row_positions(reader.fact(call["index"])), dtype_of(call.node)
    if at is None or at.axis != 0 or dtype is None or call.args.get("dim", 0) != 0:
        return None
    return RowWeight(at.selection, dtype, fact.source, (0, "e"), fact.column)
