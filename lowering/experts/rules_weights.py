"""Rules of an expert's own weights and vectors: what is looked up by the iteration's number."""

from __future__ import annotations

import torch
from torch import fx

from moebius.lowering.experts.facts import ExpertId, Fact, Invariant, Raised, Slice
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.operators import Call, read_call
from moebius.lowering.values import value_of


@rule("select", "pick")
def own_parameter(reader: Reader, call: Call) -> Fact | None:
    """``w.select(0, e)``; an expert's parameter out of those that were stacked (unrolled_loops.py)."""
    source, index, dtype = reader.fact(call["input"]), reader.fact(call["index"]), reader.dtype(call["input"])
    if not isinstance(source, Invariant) or not isinstance(index, ExpertId) or call.args.get("dim", 0) != 0:
        return None
    return None if dtype is None else expert_slice(reader, call, source, dtype)


@rule("getitem")
def part_of_unbound(reader: Reader, call: Call) -> Fact | None:
    """``w.unbind(0)[e]``, and ``w.chunk(experts, 0)[e]``, [1, …], of which the axis of size one is taken next."""
    source, index = reader.fact(call["input"]), reader.fact(call["index"])
    if not isinstance(source, Invariant) or not isinstance(index, ExpertId) or index.vector:
        return None
    made = read_call(source.node)
    if made is None or made.name not in ("unbind", "chunk", "split") or not isinstance(made["input"], fx.Node):
        return None
    whole, shape, dtype = made["input"], reader.shape(made["input"]), reader.dtype(made["input"])
    if shape is None or len(shape) not in (2, 3) or dtype is None or not all(isinstance(size, int) for size in shape):
        return None
    if made["dim"] not in (0, -len(shape)):
        return None
    held = Invariant(("outside", whole), whole)
    piece = Slice(held, tuple(range(1, len(shape))), tuple(range(size) for size in shape[1:]), dtype)
    if made.name == "unbind":
        return piece
    pieces = value_of(made.node)
    one_each = isinstance(pieces, tuple | list) and len(pieces) == shape[0]
    return Raised(piece) if one_each and all(part.shape[0] == 1 for part in pieces) else None


def expert_slice(reader: Reader, call: Call, source: Invariant, dtype: torch.dtype) -> Slice | None:
    shape = reader.shape(call["input"])
    if shape is None or len(shape) not in (2, 3) or not all(isinstance(size, int) for size in shape):
        return None
    return Slice(source, tuple(range(1, len(shape))), tuple(range(size) for size in shape[1:]), dtype)
