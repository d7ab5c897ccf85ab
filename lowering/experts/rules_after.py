"""Rules of what is done with an expert's result row by row before it is added: norms, scales, anything that looks at
one row and at what is the same for all rows."""

from __future__ import annotations

from typing import Any

from torch import fx

from moebius.lowering.experts.facts import (
    Constant,
    Fact,
    Invariant,
    Linear,
    OwnVector,
    Pointwise,
    Product,
    RowFunction,
    RowWeight,
    RowWise,
    Slice,
)
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.operators import ELEMENTWISE, Call
from moebius.lowering.torch_private import same_size

REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "var", "softmax"})
NORMS = frozenset({"layer_norm", "rms_norm"})
CASTS = frozenset({"cast", "type_as", "contiguous", "clone"})
ROW_BY_ROW = ELEMENTWISE | REDUCTIONS | NORMS | CASTS


@rule(*ROW_BY_ROW, first=True)
def of_a_row_so_far(reader: Reader, call: Call) -> Fact | None:
    """What is computed of a :class:`RowWise` is one, but for its product with the routing weight."""
    found = [reader.facts.get(node) for node in call.node.all_input_nodes]
    if not any(isinstance(fact, RowWise) for fact in found) or any(isinstance(fact, RowWeight) for fact in found):
        return None
    return row_by_row(reader, call)


@rule(*ROW_BY_ROW)
def own_vector(reader: Reader, call: Call) -> Fact | None:
    """An elementwise operator on vectors of the expert and on what is the same in all iterations."""
    if call.op.inplace or call.name not in ELEMENTWISE | {"cast"} or len(reader.shape(call.node) or ()) != 1:
        return None
    if call.node.graph is not reader.body.graph:
        return None
    facts = [reader.facts.get(node) for node in call.node.all_input_nodes]
    own = [fact for fact in facts if is_own_vector(fact)]
    flat = all(len(reader.shape(node) or ()) < 2 for node in call.node.all_input_nodes)
    if not own or not flat or not all(is_own_vector(fact) or isinstance(fact, Invariant) for fact in facts):
        return None
    return OwnVector(call.node)


def is_own_vector(fact: Fact | None) -> bool:
    return isinstance(fact, OwnVector) or (isinstance(fact, Slice) and len(fact.axes) == 1)


@rule(*ROW_BY_ROW)
def row_by_row(reader: Reader, call: Call) -> Fact | None:
    """The first operator that no other rule has a word for: of one projection's rows, and of what is no row."""
    if call.op.inplace or call.name not in ROW_BY_ROW or call.node.graph is not reader.body.graph:
        return None
    shape, dtype = reader.shape(call.node), reader.dtype(call.node)
    rows = [node for node in call.node.all_input_nodes if isinstance(reader.facts.get(node), RowFunction)]
    if shape is None or dtype is None or len(shape) != 2 or not rows:
        return None
    bases = set[Linear | None]().union(*(bases_of(reader.facts[node]) for node in rows))
    if len(bases) != 1 or None in bases:
        return None
    if not all(aligned(reader, node, shape) for node in call.node.all_input_nodes) or not along_rows(reader, call):
        return None
    (base,) = bases
    assert base is not None
    return RowWise(base.selection, dtype, base, call.node)


def bases_of(fact: Fact) -> frozenset[Linear | None]:
    """The projections whose rows a fact is of; None among them where it is of other rows too (of x, say)."""
    match fact:
        case RowWise():
            return frozenset((fact.base,))
        case Linear():
            return frozenset((fact,))
        case Pointwise():
            return frozenset[Linear | None]().union(*map(bases_of, fact.arguments))
        case Product() if not fact.weights:
            return frozenset[Linear | None]().union(*map(bases_of, fact.factors))
        case RowFunction():
            return frozenset((None,))
    return frozenset()


def aligned(reader: Reader, node: fx.Node, result: tuple) -> bool:
    """Whether row i of the result is made of row i of this operand, or of an operand that has no rows."""
    fact, shape = reader.facts.get(node), reader.shape(node)
    if shape is None:
        return isinstance(fact, Constant)
    if isinstance(fact, RowFunction):
        return len(shape) == 2 and same_size(shape[0], result[0])
    if is_own_vector(fact):
        return True
    return isinstance(fact, Invariant) and (len(shape) < 2 or (len(shape) == 2 and same_size(shape[0], 1)))


def along_rows(reader: Reader, call: Call) -> bool:
    """Whether an operator that looks at more than one element looks at one row."""
    if call.name in REDUCTIONS:
        dim: Any = call["dim"]
        dims = tuple(dim) if isinstance(dim, tuple | list) else (dim,)
        keeps = call.name == "softmax" or call["keepdim"] is True
        return dims in ((-1,), (1,)) and keeps and isinstance(reader.fact(call["input"]), RowFunction)
    if call.name in NORMS:
        whole = call["normalized_shape"]
        row = isinstance(reader.fact(call["input"]), RowFunction)
        others = [reader.fact(call.args.get(name)) for name in ("weight", "bias")]
        plain = all(isinstance(o, Invariant | Constant) for o in others) or all(is_own(o) for o in others)
        return row and len(whole) == 1 and plain
    return True


def is_own(fact: Fact) -> bool:
    """A weight or bias of the expert's own, or none."""
    return is_own_vector(fact) or fact == Constant(None)
