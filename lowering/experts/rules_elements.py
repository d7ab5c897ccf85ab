"""Rules of what is computed of row functions element by element: activations, piecewise ones, gated halves."""

from __future__ import annotations

from moebius.lowering.experts.facts import Constant, Fact, Pointwise, Product, RowFunction, Rows, RowWeight
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.rules_rows import part_of
from moebius.lowering.operators import ELEMENTWISE, Call
from moebius.lowering.values import same_shape


@rule(*ELEMENTWISE, "gt", "ge", "lt", "le", "where")
def pointwise(reader: Reader, call: Call) -> Fact | None:
    """Any other operator that works element by element, on row functions of one selection and plain numbers;
    ``torch.where(h > 0, f(h), g(h))``."""
    dtype = reader.dtype(call.node)
    given = {name: reader.fact(value) for name, value in call.args.items()}
    operands = [given.pop(name) for name in ("condition", "input", "other", "exponent") if name in given]
    rows = [fact for fact in operands if isinstance(fact, RowFunction)]
    numbers = [f for f in operands if isinstance(f, Constant) and isinstance(f.value, int | float)]
    if call.op.inplace or dtype is None or not rows or len(rows) + len(numbers) != len(operands):
        return None
    other = RowWeight if call.name in ELEMENTWISE else RowWeight | Rows
    if any(fact.selection != rows[0].selection or isinstance(fact, other) for fact in rows):
        return None
    tensors = [argument for argument in call.node.all_input_nodes if reader.rank(argument) is not None]
    if any(not same_shape(reader.shape(argument), reader.shape(call.node)) for argument in tensors):
        return None
    if not all(isinstance(fact, Constant) for fact in given.values()):
        return None
    parameters = tuple((name, fact.value) for name, fact in given.items() if isinstance(fact, Constant))
    return Pointwise(rows[0].selection, dtype, call.name, tuple(operands), parameters)


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
