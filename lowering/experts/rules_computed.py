"""Rules of what is computed of rows: element by element (activations, piecewise ones, gated halves); with an expert's
result row by row before it is added (norms, scales, anything that looks at one row and at what is the same for all
rows); and, of last resort, row by row, whatever of. For that the experts operator has no word: a layer that is made of
such rows and of projections is lowered projection by projection (by_row.py).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from moebius.lowering.experts.facts import (
    Constant,
    EachRow,
    Fact,
    Invariant,
    Items,
    Linear,
    OwnVector,
    Pointwise,
    Product,
    RowFunction,
    Rows,
    RowWeight,
    Slice,
)
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.rules_rows import DOTS, FULL, is_bias_of, operands_of, part_of, piece_sizes
from moebius.lowering.operators import ELEMENTWISE, PRODUCTS, Call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import dtype_of, rank_of, same_shape, shape_of

REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "var", "softmax"})
NORMS = frozenset({"layer_norm", "rms_norm"})
CASTS = frozenset({"cast", "type_as", "contiguous", "clone"})
ROW_BY_ROW = ELEMENTWISE | REDUCTIONS | NORMS | CASTS
COMPARISONS = frozenset({"gt", "ge", "lt", "le", "where"})
PIECES = frozenset({"chunk", "split", "narrow", "getitem"})


@rule(*ELEMENTWISE, "gt", "ge", "lt", "le", "where")
def pointwise(reader: Reader, call: Call) -> Fact | None:
    """Any other operator that works element by element, on row functions of one selection and plain numbers;
    ``torch.where(h > 0, f(h), g(h))``."""
    dtype = dtype_of(call.node)
    given = {name: reader.fact(value) for name, value in call.args.items()}
    operands = [given.pop(name) for name in ("condition", "input", "other", "exponent") if name in given]
    rows = [fact for fact in operands if isinstance(fact, RowFunction)]
    numbers = [f for f in operands if isinstance(f, Constant) and isinstance(f.value, int | float)]
    if call.op.inplace or dtype is None or not rows or len(rows) + len(numbers) != len(operands):
        return None
    other = RowWeight if call.name in ELEMENTWISE else RowWeight | Rows
    if any(fact.selection != rows[0].selection or isinstance(fact, other) for fact in rows):
        return None
    tensors = [argument for argument in call.node.all_input_nodes if shape_of(argument) is not None]
    if any(not same_shape(shape_of(argument), shape_of(call.node)) for argument in tensors):
        return None
    if not all(isinstance(fact, Constant) for fact in given.values()):
        return None
    parameters = tuple((name, fact.value) for name, fact in given.items() if isinstance(fact, Constant))
    return Pointwise(rows[0].selection, dtype, call.name, tuple(operands), parameters)


@rule("glu", of=RowFunction)
def gated_halves(reader: Reader, call: Call, fact: RowFunction) -> Fact | None:
    """The first half times the sigmoid of the second."""
    shape, dtype = shape_of(call["input"]), dtype_of(call.node)
    if not shape or len(shape) != 2 or call["dim"] not in (-1, 1) or dtype is None:
        return None
    half = shape[1] // 2
    first, second = part_of(fact, range(half)), part_of(fact, range(half, 2 * half))
    if first is None or second is None:
        return None
    factors = (first, Pointwise(fact.selection, dtype, "sigmoid", (second,)))
    return Product(fact.selection, dtype, 1.0, tuple(sorted(factors, key=repr)), ())


@rule(*ROW_BY_ROW, first=True)
def of_a_row_so_far(reader: Reader, call: Call) -> Fact | None:
    """What is computed of one projection's rows stays that, but for its product with the routing weight."""
    found = [reader.facts.get(node) for node in call.node.all_input_nodes]
    if not any(map(is_of_one, found)) or any(isinstance(fact, RowWeight) for fact in found):
        return None
    made = each_row(reader, call)
    return made if is_of_one(made) else None


def is_of_one(fact: Fact | None) -> bool:
    return isinstance(fact, EachRow) and fact.base is not None


@rule(*ROW_BY_ROW)
def own_vector(reader: Reader, call: Call) -> Fact | None:
    """An elementwise operator on vectors of the expert and on what is the same in all iterations."""
    if call.op.inplace or call.name not in ELEMENTWISE | {"cast"} or len(shape_of(call.node) or ()) != 1:
        return None
    if call.node.graph is not reader.body.graph:
        return None
    facts = [reader.facts.get(node) for node in call.node.all_input_nodes]
    own = [fact for fact in facts if is_own_vector(fact)]
    flat = all(len(shape_of(node) or ()) < 2 for node in call.node.all_input_nodes)
    if not own or not flat or not all(is_own_vector(fact) or isinstance(fact, Invariant) for fact in facts):
        return None
    return OwnVector(call.node)


def is_own_vector(fact: Fact | None) -> bool:
    return isinstance(fact, OwnVector) or (isinstance(fact, Slice) and len(fact.axes) == 1)


def bases_of(fact: Fact) -> frozenset[Linear | None]:
    """The projections whose rows a fact is of; None among them where it is of other rows too (of x, say)."""
    match fact:
        case EachRow():
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
    fact, shape = reader.facts.get(node), shape_of(node)
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


# ----------------------------------------------------------------------------------------------------------------------
# Of last resort
# ----------------------------------------------------------------------------------------------------------------------


@rule(*ROW_BY_ROW, *PRODUCTS, *COMPARISONS, *PIECES, "dropout", "glu")
def each_row(reader: Reader, call: Call) -> Fact | None:
    """An operator of rows of one selection that makes rows: row i of row i alone."""
    if call.op.inplace or call.node.graph is not reader.body.graph:
        return None
    rows = [node for node in call.node.all_input_nodes if isinstance(reader.facts.get(node), RowFunction)]
    facts = [reader.facts[node] for node in rows]
    if not rows or len({fact.selection for fact in facts if isinstance(fact, RowFunction)}) != 1:
        return None
    if call.name in PIECES:
        return piece(reader, call)
    shape, dtype = shape_of(call.node), dtype_of(call.node)
    if shape is None or dtype is None or len(shape) != 2 or not isinstance(facts[0], RowFunction):
        return None
    if call.name in PRODUCTS:
        found = is_product(reader, call)
    elif call.name == "dropout":
        found = rank_of(call["input"]) == 2
    elif call.name == "glu":
        found = rank_of(call["input"]) == 2 and call["dim"] in (-1, 1)
    else:
        found = all(aligned(reader, node, shape) for node in call.node.all_input_nodes) and along_rows(reader, call)
    bases = set[Linear | None]().union(*map(bases_of, facts)) if call.name in ROW_BY_ROW else set()
    base = bases.pop() if len(bases) == 1 else None
    return EachRow(facts[0].selection, dtype, call.node, base=base) if found else None


def is_product(reader: Reader, call: Call) -> bool:
    """Rows times a matrix of the expert's own, or one that is the same in all iterations."""
    given, operands = reader.fact(call["input"]), operands_of(reader, call)
    if not isinstance(given, RowFunction) or isinstance(given, RowWeight) or rank_of(call["input"]) != 2:
        return False
    if operands is None:
        return False
    weight, axis, bias = operands
    if isinstance(weight, Slice) and len(weight.axes) == 2:
        return bias is None or (isinstance(bias, Slice) and is_bias_of(bias, weight, weight.axes[axis]))
    shared = isinstance(weight, Invariant) and rank_of(weight.node) == 2
    return shared and (bias is None or (isinstance(bias, Invariant) and rank_of(bias.node) == 1))


def piece(reader: Reader, call: Call) -> Fact | None:
    """Columns of rows: ``h.chunk(2, -1)``, ``h[:, :n]``."""
    fact, shape = reader.fact(call["input"]), shape_of(call["input"])
    dtype = dtype_of(call["input"])
    if not isinstance(fact, RowFunction) or isinstance(fact, RowWeight) or dtype is None:
        return None
    if not shape or len(shape) != 2 or not isinstance(shape[1], int):
        return None
    if call.name == "getitem":
        return EachRow(fact.selection, dtype, call.node) if of_columns(reader.fact(call["index"])) else None
    if call["dim"] not in (-1, 1):
        return None
    if call.name == "narrow":
        plain = isinstance(call["start"], int) and isinstance(call["length"], int)
        return EachRow(fact.selection, dtype, call.node) if plain else None
    sizes = piece_sizes(call, shape[1])
    if sizes is None:
        return None
    return Items(tuple(EachRow(fact.selection, dtype, call.node, i) for i in range(len(sizes))))


def of_columns(key: Fact) -> bool:
    """``[:, a:b]`` or ``[..., a:b]``."""
    keys = key.items if isinstance(key, Items) else ()
    plain = len(keys) == 2 and keys[0] in (FULL, DOTS)
    return plain and isinstance(keys[1], Constant) and isinstance(keys[1].value, slice)
