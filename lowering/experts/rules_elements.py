"""Rules of what is computed of row functions element by element: activations, piecewise ones, gated halves."""

from __future__ import annotations

from moebius.lowering.experts.facts import Constant, Fact, Pointwise, Product, RowFunction, Rows, RowWeight
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.rules_rows import part_of
from moebius.lowering.operators import ELEMENTWISE, Call
from moebius.lowering.values import same_shape


@rule(*ELEMENTWISE)
def pointwise(reader: Reader, call: Call) -> Fact | None:
    """Any other operator that works element by element, on row functions of one selection and plain numbers."""
    dtype = reader.dtype(call.node)
    if call.op.inplace or dtype is None:
        return None
    operands, parameters = [], []
    for name, value in call.args.items():
        fact = reader.fact(value)
        if name in ("input", "other", "exponent"):
            operands.append(fact)
        elif isinstance(fact, Constant):
            parameters.append((name, fact.value))
        else:
            return None
    rows = [fact for fact in operands if isinstance(fact, RowFunction)]
    tensors = [argument for argument in call.node.all_input_nodes if reader.rank(argument) is not None]
    if any(not same_shape(reader.shape(argument), reader.shape(call.node)) for argument in tensors):
        return None
    if not rows or any(fact.selection != rows[0].selection or isinstance(fact, RowWeight) for fact in rows):
        return None
    if not all(
        isinstance(f, RowFunction) or (isinstance(f, Constant) and isinstance(f.value, int | float)) for f in operands
    ):
        return None
    return Pointwise(rows[0].selection, dtype, call.name, tuple(operands), tuple(parameters))


@rule("gt", "ge", "lt", "le", "where")
def piecewise(reader: Reader, call: Call) -> Fact | None:
    """``torch.where(h > 0, f(h), g(h))``, of row functions of one selection and plain numbers."""
    dtype, shape = reader.dtype(call.node), reader.shape(call.node)
    names = ("condition", "input", "other") if call.name == "where" else ("input", "other")
    operands = [reader.fact(call[name]) for name in names]
    rows = [fact for fact in operands if isinstance(fact, RowFunction)]
    numbers = [f for f in operands if isinstance(f, Constant) and isinstance(f.value, int | float)]
    if call.op.inplace or dtype is None or not rows or len(rows) + len(numbers) != len(operands):
        return None
    if any(fact.selection != rows[0].selection or isinstance(fact, RowWeight | Rows) for fact in rows):
        return None
    tensors = [argument for argument in call.node.all_input_nodes if reader.rank(argument) is not None]
    if any(not same_shape(reader.shape(argument), shape) for argument in tensors):
        return None
    return Pointwise(rows[0].selection, dtype, call.name, tuple(operands), ())


@rule("glu")
def gated_halves(reader: Reader, call: Call) -> Fact | None:
    """The first half times the sigmoid of the second."""
    fact, shape, dtype = reader.fact(call["input"]), reader.shape(call["input"]), reader.dtype(call.node)
    if not isinstance(fact, RowFunction) or not shape or len(shape) != 2 or call["dim"] not in (-1, 1) or dtype is None:
        return None
    half = shape[1] // 2
    first, second = part_of(fact, range(half)), part_of(fact, range(half, 2 * half))
    if first is None or second is None:
        return None
    factors = (first, Pointwise(fact.selection, dtype, "sigmoid", (second,)))
    return Product(fact.selection, dtype, 1.0, tuple(sorted(factors, key=repr)), ())
