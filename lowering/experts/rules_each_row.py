"""Rules of last resort: what is computed row by row, whatever of. The experts operator has no word for it; a layer that
is made of such rows and of projections is lowered projection by projection (by_row.py)."""

from __future__ import annotations

from moebius.lowering.experts.facts import Constant, EachRow, Fact, Invariant, Items, RowFunction, RowWeight, Slice
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.rules_after import ROW_BY_ROW, aligned, along_rows
from moebius.lowering.experts.rules_rows import DOTS, FULL, is_bias_of, piece_sizes
from moebius.lowering.operators import PRODUCTS, Call

COMPARISONS = frozenset({"gt", "ge", "lt", "le", "where"})
PIECES = frozenset({"chunk", "split", "narrow", "getitem"})


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
    shape, dtype = reader.shape(call.node), reader.dtype(call.node)
    if shape is None or dtype is None or len(shape) != 2 or not isinstance(facts[0], RowFunction):
        return None
    if call.name in PRODUCTS:
        found = is_product(reader, call)
    elif call.name == "dropout":
        found = reader.rank(call["input"]) == 2
    elif call.name == "glu":
        found = reader.rank(call["input"]) == 2 and call["dim"] in (-1, 1)
    else:
        found = all(aligned(reader, node, shape) for node in call.node.all_input_nodes) and along_rows(reader, call)
    return EachRow(facts[0].selection, dtype, call.node) if found else None


def is_product(reader: Reader, call: Call) -> bool:
    """Rows times a matrix of the expert's own, or one that is the same in all iterations."""
    matrix = call["weight"] if call.name == "linear" else call["other"]
    given, weight = reader.fact(call["input"]), reader.fact(matrix)
    bias = reader.fact(None if call.name == "matmul" else call["bias"])
    if not isinstance(given, RowFunction) or isinstance(given, RowWeight) or reader.rank(call["input"]) != 2:
        return False
    if call.name == "addmm" and (call["beta"] != 1 or call["alpha"] != 1):
        return False
    if isinstance(weight, Slice) and len(weight.axes) == 2:
        out_axis = weight.axes[0 if call.name == "linear" else 1]
        return bias == Constant(None) or (isinstance(bias, Slice) and is_bias_of(bias, weight, out_axis))
    shared = isinstance(weight, Invariant) and reader.rank(matrix) == 2
    flat = isinstance(bias, Invariant) and reader.rank(call["bias"]) == 1
    return shared and (bias == Constant(None) or flat)


def piece(reader: Reader, call: Call) -> Fact | None:
    """Columns of rows: ``h.chunk(2, -1)``, ``h[:, :n]``."""
    fact, shape = reader.fact(call["input"]), reader.shape(call["input"])
    dtype = reader.dtype(call["input"])
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
