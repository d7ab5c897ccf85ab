"""Rules of what is computed for the selected rows: lookups, weights of one expert, products, activations, the sum."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import fx

from moebius.lowering.experts.facts import (
    Accumulated,
    Constant,
    Coordinate,
    EachRow,
    ExpertId,
    Fact,
    Invariant,
    Items,
    Linear,
    Mask,
    Pointwise,
    Product,
    Raised,
    RowFunction,
    Rows,
    RowWeight,
    Slice,
    State,
    StateRows,
    Unknown,
    as_product,
    simplify,
)
from moebius.lowering.experts.loops import OURS
from moebius.lowering.experts.reader import Reader, rule
from moebius.lowering.experts.rules_routing import selected
from moebius.lowering.experts.views import moved
from moebius.lowering.operators import Call, draws, read_call, target_name
from moebius.lowering.values import dtype_of, rank_of, same_shape, shape_of, tensor_of, value_of

FULL = Constant(slice(None))
NONE = Constant(None)
DOTS = Constant(...)
WIDE = (torch.float32, torch.float64)
ADDED = {"index_add": "source", "index_put": "values", "scatter_add": "src"}  # what each adds


@rule("select", "pick", of=Invariant)
def own_parameter(reader: Reader, call: Call, source: Invariant) -> Fact | None:
    """``w.select(0, e)``; an expert's parameter out of those that were stacked (unrolled_loops.py)."""
    own = isinstance(reader.fact(call["index"]), ExpertId) and call.args.get("dim", 0) == 0
    return expert_slice(reader, call["input"], source) if own else None


@rule("getitem", of=Invariant)
def part_of_unbound(reader: Reader, call: Call, source: Invariant) -> Fact | None:
    """``w.unbind(0)[e]``, and ``w.chunk(experts, 0)[e]``, [1, …], of which the axis of size one is taken next."""
    made = read_call(source.node) if reader.fact(call["index"]) == ExpertId() else None
    if made is None or made.name not in ("unbind", "chunk", "split") or not isinstance(made["input"], fx.Node):
        return None
    whole, shape = made["input"], shape_of(made["input"])
    piece = expert_slice(reader, whole, Invariant(("outside", whole), whole))
    if piece is None or shape is None or made["dim"] not in (0, -len(shape)):
        return None
    if made.name == "unbind":
        return piece
    pieces = value_of(made.node)
    one_each = isinstance(pieces, tuple | list) and len(pieces) == shape[0]
    return Raised(piece) if one_each and all(part.shape[0] == 1 for part in pieces) else None


def expert_slice(reader: Reader, whole: fx.Node, source: Invariant) -> Slice | None:
    """One expert's part of a tensor of all experts' weights, which is ``source``."""
    shape, dtype = shape_of(whole), dtype_of(whole)
    if shape is None or len(shape) not in (2, 3) or dtype is None or not all(isinstance(size, int) for size in shape):
        return None
    return Slice(source, tuple(range(1, len(shape))), tuple(range(size) for size in shape[1:]), dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Lookups
# ----------------------------------------------------------------------------------------------------------------------


@rule("getitem", of=Invariant)
def lookup(reader: Reader, call: Call, source: Invariant) -> Fact | None:
    """``x[token]``, ``weight[token, slot, None]``, ``scores[token, e]``, ``w[e]``."""
    key = reader.fact(call["index"])
    keys = list(key.items) if isinstance(key, Items) else [key]
    rank, dtype = rank_of(call["input"]), dtype_of(call["input"])
    if dtype is None:
        return None
    column = len(keys) == rank + 1 and keys[-1] == NONE
    if column:
        keys.pop()
    while len(keys) > 1 and keys[-1] in (FULL, DOTS):
        keys.pop()
    if isinstance(keys[0], ExpertId) and not keys[0].vector and len(keys) == 1 and rank in (2, 3) and not column:
        return expert_slice(reader, call["input"], source)
    keys = masks_as_positions(keys)
    if keys and keys[0] == NONE and rank == 2 and not column:
        rows = positions_lookup(source, keys[1:], rank, dtype, False)
        return Raised(rows) if isinstance(rows, Rows) else None
    return positions_lookup(source, keys, rank, dtype, column)


def masks_as_positions(keys: list[Fact]) -> list[Fact]:
    """``w[index == e]`` looks up at the positions where the mask holds."""
    found: list[Fact] = []
    for key in keys:
        if isinstance(key, Mask) and key.boolean and "1" not in key.axes:
            selection = selected(key)
            found += [Coordinate(selection, axis) for axis in key.axes]
        else:
            found.append(key)
    return found


def row_positions(key: Fact) -> Coordinate | None:
    """The positions that ``out[key]`` reads or writes, along the first axis."""
    if isinstance(key, Items) and key.items and all(rest in (FULL, DOTS) for rest in key.items[1:]):
        key = key.items[0]
    keys = masks_as_positions([key])
    position = keys[0] if len(keys) == 1 else None
    return position if isinstance(position, Coordinate) and not position.column else None


@rule("reshape", "squeeze", "flatten", "getitem", "select", of=Raised)
def lower_rows(reader: Reader, call: Call, fact: Raised) -> Fact | None:
    """``x[None, token].reshape(-1, D)``."""
    if call.name == "getitem" and reader.fact(call["index"]) != Constant(0):
        return None
    before, after = shape_of(call["input"]), shape_of(call.node)
    return fact.rows if before and same_shape(before[1:], after) else None


def positions_lookup(source: Invariant, keys: list[Fact], rank: int, dtype: torch.dtype, column: bool) -> Fact | None:
    """A lookup at a selection's coordinates (and at this iteration's expert)."""
    picked = tuple((axis, key.value) for axis, key in enumerate(keys) if is_position(key))
    if picked and len(keys) != rank:
        return None
    keys = [key for key in keys if not is_position(key)]
    coordinates = [key for key in keys if isinstance(key, Coordinate)]
    if not coordinates or any(key.column or key.selection != coordinates[0].selection for key in coordinates):
        return None
    if not all(isinstance(key, Coordinate) or (isinstance(key, ExpertId) and not key.vector) for key in keys):
        return None
    selection = coordinates[0].selection
    axes = tuple(key.axis if isinstance(key, Coordinate) else "e" for key in keys)
    if len(keys) + len(picked) == rank:
        return RowWeight(selection, dtype, source, axes, column, picked)
    if len(keys) == 1 and rank == 2 and not column:
        return Rows(selection, dtype, source, axes[0])
    return None


def is_position(key: Fact) -> TypeGuard[Constant]:
    """A plain number in an index, as ``k`` in ``weight[token, k]``."""
    return isinstance(key, Constant) and isinstance(key.value, int) and not isinstance(key.value, bool)


@rule("index_select", of=Invariant)
def index_select(reader: Reader, call: Call, source: Invariant) -> Fact | None:
    index, dtype = reader.fact(call["index"]), dtype_of(call["input"])
    if call["dim"] != 0 or dtype is None or not isinstance(index, Coordinate):
        return None
    return positions_lookup(source, [index], rank_of(call["input"]), dtype, False)


@rule("gather", of=Rows)
def gathered_weight(reader: Reader, call: Call, rows: Rows) -> Fact | None:
    """``weight[token].gather(-1, slot)``: one number of each looked up row."""
    index = reader.fact(call["index"])
    if not isinstance(index, Coordinate) or call["dim"] not in (-1, 1):
        return None
    if rows.axis != 0 or not index.column or index.selection != rows.selection:
        return None
    return RowWeight(rows.selection, rows.dtype, rows.source, (0, index.axis), True)


# ----------------------------------------------------------------------------------------------------------------------
# Views and casts
# ----------------------------------------------------------------------------------------------------------------------


@rule("transpose", "permute", "t", "T", "mT", of=Slice)
def iteration_slice(reader: Reader, call: Call, fact: Slice) -> Fact | None:
    axes = moved(call, fact.axes) if len(fact.axes) == 2 else None
    return None if axes is None else replace(fact, axes=axes)


@rule("cast", "type_as")
def cast(reader: Reader, call: Call) -> Fact | None:
    """Casts of lookups and slices move onto what they look up; a cast that changes no dtype is nothing."""
    fact, dtype = reader.fact(call["input"]), dtype_of(call.node)
    before = dtype_of(call["input"])
    if dtype is None or before is None:
        return None
    if isinstance(fact, Slice) and dtype != before and dtype.is_floating_point:
        whole = fact.weight.node
        if is_rounded(fact, before) or whole in reader.made.values():
            return through(reader, call, fact, before, dtype)
    if isinstance(fact, Rows | RowWeight) and rounds_alone(dtype):
        return None
    return of_dtype(fact, before, dtype)


def rounds_alone(dtype: torch.dtype) -> bool:
    """fp8: each cast rounds its own gradient, by much, and there are no sums in this dtype."""
    return dtype.itemsize == 1


def through(reader: Reader, call: Call, fact: Slice, before: torch.dtype, dtype: torch.dtype) -> Slice | None:
    """A weight that went through a narrower dtype: so do those of all experts, element by element. The iteration's cast
    into that dtype keeps a node of its own, which rounds the gradient that goes through it, and all parts of what comes
    back are summed before."""
    whole = fact.weight.node
    outer = reader.outer_of(whole) if whole.graph is reader.body.graph and whole.op == "placeholder" else whole
    if not isinstance(outer, fx.Node) or outer.graph is not reader.loop.graph:
        return None
    inwards: Any = call["input"]
    while (made := read_call(inwards)) is not None and made.name not in ("cast", "type_as"):
        inwards = made["input"]
        if not isinstance(inwards, fx.Node):
            return None
    wide = reader.make("to", reader.make("to", outer, before, each=inwards), dtype)
    return Slice(Invariant(("outside", wide), wide), fact.axes, fact.ranges, dtype)


def of_dtype(fact: Fact, before: torch.dtype, dtype: torch.dtype) -> Fact | None:
    """What is of one dtype, in another."""
    if not dtype.is_floating_point:
        return None
    if dtype != before and isinstance(fact, Slice | Rows | RowWeight) and is_rounded(fact, before):
        return None
    match fact:
        case Slice() | Rows() | RowWeight():
            return replace(fact, dtype=dtype)
        case RowFunction() if dtype == before:
            return fact
        case Product() if fact.weights and (dtype in WIDE or all(factor.dtype == dtype for factor in fact.factors)):
            # routing weights in another precision than the rows: the product comes back to what it was, or goes out
            return Product(fact.selection, dtype, fact.coefficient, fact.factors, fact.weights)
        case Linear() if dtype in WIDE:
            return Product(fact.selection, dtype, 1.0, (fact,), ())
    return None


def is_rounded(fact: Slice | Rows | RowWeight, dtype: torch.dtype) -> bool:
    """Whether what was looked up lost digits in this dtype: a cast from there does not bring them back."""
    value = tensor_of((fact.weight if isinstance(fact, Slice) else fact.source).node)
    return value is None or not holds(dtype, value.dtype)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether numbers of another dtype are the same in this one."""
    if dtype == other:
        return True
    floats = dtype.is_floating_point and other.is_floating_point
    if floats and 1 in (dtype.itemsize, other.itemsize):  # (torch promotes no fp8)
        return other.itemsize == 1 and dtype in WIDE
    return torch.promote_types(other, dtype) == dtype


@rule("contiguous", "clone", "reshape", "flatten", "squeeze", "expand", "dropout", of=RowFunction | Slice)
def same_value(reader: Reader, call: Call, fact: RowFunction | Slice) -> Fact | None:
    """Views that keep the shape, copies, and dropout that is switched off."""
    if draws(call.node) if call.name == "dropout" else call.op.inplace:
        return None
    return fact if same_shape(shape_of(call["input"]), shape_of(call.node)) else None


# ----------------------------------------------------------------------------------------------------------------------
# Parts of the last axis
# ----------------------------------------------------------------------------------------------------------------------


@rule("chunk", "split", of=RowFunction | Slice)
def pieces(reader: Reader, call: Call, fact: RowFunction | Slice) -> Fact | None:
    shape, dim = shape_of(call["input"]) or (), call["dim"]
    if not shape or not isinstance(shape[-1], int) or not isinstance(dim, int):
        return None
    axis = dim % len(shape)
    if not isinstance(shape[axis], int) or (isinstance(fact, RowFunction) and axis != len(shape) - 1):
        return None
    sizes = piece_sizes(call, shape[axis])
    if sizes is None:
        return None
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    found = [part_along(fact, axis, range(a, b)) for a, b in itertools.pairwise(bounds)]
    return Items(tuple(f for f in found if f is not None)) if None not in found else None


def piece_sizes(call: Call, width: int) -> list[int] | None:
    if call.name == "chunk":
        if not isinstance(call["chunks"], int) or call["chunks"] < 1:
            return None
        step = -(-width // call["chunks"])
    else:
        step = call["split_size_or_sections"]
        if isinstance(step, tuple | list):
            return list(step) if all(isinstance(s, int) for s in step) and sum(step) == width else None
    if not isinstance(step, int) or step < 1:
        return None
    return [min(step, width - start) for start in range(0, width, step)]


@rule("getitem", of=RowFunction | Slice)
def sliced(reader: Reader, call: Call, fact: RowFunction | Slice) -> Fact | None:
    """``h[..., ::2]``, ``h[:, :n]``, ``w[e][n:]``."""
    key, shape = reader.fact(call["index"]), shape_of(call["input"])
    if shape is None:
        return None
    keys = list(key.items) if isinstance(key, Items) else [key]
    if DOTS in keys:
        at = keys.index(DOTS)
        keys[at : at + 1] = [FULL] * (len(shape) - len(keys) + 1)
    if len(keys) > len(shape):
        return None
    current: Fact | None = fact
    for axis, one in enumerate(keys):
        if not isinstance(one, Constant) or not isinstance(one.value, slice):
            return None
        if one == FULL:
            continue
        size = shape[axis]
        if not isinstance(size, int) or current is None or (isinstance(fact, RowFunction) and axis != len(shape) - 1):
            return None
        current = part_along(current, axis, range(size)[one.value])
    return current


@rule("narrow", of=RowFunction | Slice)
def narrow(reader: Reader, call: Call, fact: RowFunction | Slice) -> Fact | None:
    rank, numbers = rank_of(call["input"]), (call["dim"], call["start"], call["length"])
    if not rank or not all(isinstance(n, int) for n in numbers):
        return None
    dim, start, length = numbers
    if start < 0 or (isinstance(fact, RowFunction) and dim % rank != rank - 1):
        return None
    return part_along(fact, dim % rank, range(start, start + length))


def part_along(fact: Fact, axis: int, part: range) -> Fact | None:
    """The positions ``part`` of a fact's axis. Of a row function: of its last axis."""
    match fact:
        case Slice():
            which = fact.axes[axis]
            ranges = tuple(
                r[part.start : part.stop : part.step] if i + 1 == which else r for i, r in enumerate(fact.ranges)
            )
            return replace(fact, ranges=ranges)
        case RowFunction():
            return part_of(fact, part)
    return None


def part_of(fact: Fact, part: range) -> RowFunction | None:
    """Columns of a row function. Columns of a product with W are a product with rows of W."""
    match fact:
        case Linear():
            weight = part_along(fact.weight, fact.weight.axes.index(fact.out_axis), part)
            bias = None if fact.bias is None else part_along(fact.bias, 0, part)
            assert isinstance(weight, Slice) and (bias is None or isinstance(bias, Slice))
            return replace(fact, weight=weight, bias=bias)
        case Product():
            factors = [part_of(factor, part) for factor in fact.factors]
            if any(factor is None for factor in factors):
                return None
            kept = tuple(factor for factor in factors if factor is not None)
            return Product(fact.selection, fact.dtype, fact.coefficient, kept, fact.weights)
        case Pointwise():
            arguments = [part_of(a, part) if isinstance(a, RowFunction) else a for a in fact.arguments]
            if any(argument is None for argument in arguments):
                return None
            kept_arguments = tuple(argument for argument in arguments if argument is not None)
            return Pointwise(fact.selection, fact.dtype, fact.operator, kept_arguments, fact.parameters)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Arithmetic
# ----------------------------------------------------------------------------------------------------------------------


def operands_of(reader: Reader, call: Call) -> tuple[Fact, int, Fact | None] | None:
    """(a product's matrix, which axis of it runs along the result, the bias); None where they are scaled."""
    if call.name == "addmm" and (call["beta"] != 1 or call["alpha"] != 1):
        return None
    bias = reader.fact(call["bias"]) if call.args.get("bias") is not None else None
    return (reader.fact(call["weight"]), 0, bias) if call.name == "linear" else (reader.fact(call["other"]), 1, bias)


@rule("linear", "matmul", "addmm", of=RowFunction)
def linear(reader: Reader, call: Call, rows: RowFunction) -> Fact | None:
    dtype, operands = dtype_of(call.node), operands_of(reader, call)
    if operands is None or dtype is None or isinstance(rows, RowWeight):
        return None
    weight, axis, bias = operands
    if not isinstance(weight, Slice) or len(weight.axes) != 2:
        return None
    out_axis = weight.axes[axis]
    if bias is not None and not (isinstance(bias, Slice) and is_bias_of(bias, weight, out_axis)):
        return None
    if not isinstance(rows, Product):
        return Linear(rows.selection, dtype, rows, weight, out_axis, bias)
    if bias is not None and (rows.weights or rows.coefficient != 1.0):
        return None  # a bias is not scaled by what scales the rows
    inner = Product(rows.selection, rows.dtype, 1.0, rows.factors, ())
    result = Linear(rows.selection, dtype, simplify(inner), weight, out_axis, bias)
    return simplify(Product(rows.selection, dtype, rows.coefficient, (result,), rows.weights))


@rule("mul", "div")
def multiply(reader: Reader, call: Call) -> Fact | None:
    left, right, dtype = reader.fact(call["input"]), reader.fact(call["other"]), dtype_of(call.node)
    if dtype is None or (call.name == "div" and call["rounding_mode"] is not None):
        return None
    if isinstance(left, Constant) and call.name == "mul":
        left, right = right, left
    if not isinstance(left, RowFunction) or call.op.inplace:
        return None
    a = as_product(left)
    if isinstance(right, Constant) and isinstance(right.value, int | float) and not isinstance(right.value, bool):
        if call.name == "div" and right.value == 0:
            return None
        factor = right.value if call.name == "mul" else 1.0 / right.value
        return Product(a.selection, dtype, a.coefficient * factor, a.factors, a.weights)
    if call.name == "div" or not isinstance(right, RowFunction) or right.selection != left.selection:
        return None
    if not (stretches(left) and stretches(right)):
        return None
    single = isinstance(left, RowWeight) or isinstance(right, RowWeight)
    if not single and not same_shape(shape_of(call["input"]), shape_of(call["other"])):
        return None
    b = as_product(right)
    factors = tuple(sorted(a.factors + b.factors, key=repr))
    return Product(a.selection, dtype, a.coefficient * b.coefficient, factors, a.weights + b.weights)


def stretches(fact: RowFunction) -> bool:
    """One number a row multiplies whole rows only as a column; as a plain [S] it would line up with the wrong axis."""
    return not isinstance(fact, RowWeight) or fact.column


@rule("add")
def add_bias(reader: Reader, call: Call) -> Fact | None:
    """``x @ w[e] + b[e]``."""
    left, right, dtype = reader.fact(call["input"]), reader.fact(call["other"]), dtype_of(call.node)
    if isinstance(left, Slice):
        left, right = right, left
    if not isinstance(left, Linear) or left.bias is not None or not isinstance(right, Slice) or len(right.axes) != 1:
        return None
    if call["alpha"] != 1 or dtype is None or call.op.inplace or not is_bias_of(right, left.weight, left.out_axis):
        return None
    return replace(left, dtype=dtype, bias=right)


def is_bias_of(bias: Slice, weight: Slice, out_axis: int) -> bool:
    """Whether a slice is a vector with one number for each output (not one that is broadcast)."""
    return len(bias.axes) == 1 and len(bias.ranges[0]) == len(weight.range_of(out_axis))


# ----------------------------------------------------------------------------------------------------------------------
# Accumulation
# ----------------------------------------------------------------------------------------------------------------------


@rule("index_add", "index_put", "scatter_add", of=State)
def accumulate(reader: Reader, call: Call, state: State) -> Fact | None:
    """Rows added at a selection's positions: in place into a tensor, or as a new carried value."""
    if state.carried == call.op.inplace:
        return None
    position, rows = accumulation_parts(reader, call)
    if not isinstance(position, Coordinate) or rows is None:
        return None
    own, given = dtype_of(call["input"]), dtype_of(call[ADDED[call.name]])
    if own != given and not call.node.meta.get(OURS):  # (no kernel promotes here, and fake tensors do not say so)
        return Unknown(f"{target_name(call.node)} adds rows of {given} to a sum of {own}, which raises", call.node)
    return Accumulated(state, position, rows, call.node)


@rule("getitem", of=State)
def rows_of_the_sum(reader: Reader, call: Call, state: State) -> Fact | None:
    """``out[token]``, read in order to be added to and written back."""
    key = row_positions(reader.fact(call["index"]))
    return None if state.carried or key is None else StateRows(state, key)


@rule("add", of=StateRows)
def add_to_the_sums_rows(reader: Reader, call: Call, copied: StateRows) -> Fact | None:
    """``out[token] + rows``, into the copy or not."""
    rows, own, given = reader.fact(call["other"]), dtype_of(call["input"]), dtype_of(call["other"])
    if copied.rows is not None or call["alpha"] != 1:
        return None
    if own is None or given is None or own != dtype_of(call.node):
        return None
    if not isinstance(rows, RowFunction) or not same_shape(shape_of(call["input"]), shape_of(call["other"])):
        return None
    last_resort = isinstance(rows, EachRow) and rows.base is None
    if given != own and not last_resort:  # autocast's rows, which are added to a wider sum
        wider = of_dtype(rows, given, own) if holds(own, given) else None
        if not isinstance(wider, RowFunction):
            return None
        rows = wider
    return StateRows(copied.state, copied.coordinate, rows)


@rule("setitem")
def write_the_sums_rows(reader: Reader, call: Call) -> Fact | None:
    """``out[token] = …``, of the same positions of the same sum."""
    state, value = reader.fact(call["input"]), reader.fact(call["value"])
    key = row_positions(reader.fact(call["index"]))
    if not isinstance(value, StateRows) or value.rows is None or value.state != state or value.coordinate != key:
        return None
    return Accumulated(value.state, value.coordinate, value.rows, call.node, once=True)


def accumulation_parts(reader: Reader, call: Call) -> tuple[Fact | None, Fact | None]:
    if call.name == "index_add":
        if call["dim"] not in (0, -2) or (call["dim"] == -2 and rank_of(call["input"]) != 2):
            return None, None
        return plain(reader.fact(call["index"])), scaled(reader.fact(call["source"]), call["alpha"])
    if call.name == "index_put":
        indices = reader.fact(call["indices"])
        if call["accumulate"] is not True or not isinstance(indices, Items) or len(indices.items) != 1:
            return None, None
        return plain(indices.items[0]), reader.fact(call["values"])
    index = reader.fact(call["index"])  # token[:, None].expand(-1, D)
    whole = same_shape(shape_of(call["index"]), shape_of(call["src"]))
    if call["dim"] != 0 or not whole or not isinstance(index, Coordinate) or not index.column:
        return None, None
    return Coordinate(index.selection, index.axis), reader.fact(call["src"])


def scaled(fact: Fact, factor: Any) -> Fact | None:
    if factor == 1:
        return fact
    if not isinstance(fact, RowFunction) or not isinstance(factor, int | float):
        return None
    product = as_product(fact)
    return Product(fact.selection, fact.dtype, product.coefficient * factor, product.factors, product.weights)


def plain(fact: Fact) -> Fact | None:
    return None if isinstance(fact, Coordinate) and fact.column else fact


@rule("expand", "repeat", of=Coordinate)
def widen(reader: Reader, call: Call, fact: Coordinate) -> Fact | None:
    """A column of positions repeated along the columns says the same; as a copy, ``token.view(-1, 1).repeat(1, D)``,
    too."""
    shape = shape_of(call.node) or ()
    whole = call.name == "expand" or same_shape((shape_of(call["input"]) or ())[:1], shape[:1])
    return fact if fact.column and len(shape) == 2 and whole else None
