"""Rules of routing: masks, counts, hit lists, and the rows that a mask selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moebius.lowering.experts.facts import (
    Constant,
    Coordinate,
    Counts,
    ExpertId,
    Fact,
    HitList,
    Invariant,
    Items,
    Mask,
    MaskRows,
    OneHot,
    OwnGate,
    RowCount,
    RowWeight,
    Selection,
    Test,
    Unknown,
)
from moebius.lowering.experts.reader import Reader, negate, rule
from moebius.lowering.experts.routing import ALL, DROPPED, SOME, distinct, index_bounds, index_root
from moebius.lowering.experts.views import moved, sized_one
from moebius.lowering.operators import MISSING, Call, read_call
from moebius.lowering.torch_private import same_size
from moebius.lowering.values import dtype_of, rank_of, same_shape, shape_of, tensor_of

FULL = slice(None)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@rule("one_hot")
def one_hot(reader: Reader, call: Call) -> Fact | None:
    index, classes, node = reader.fact(call["input"]), call["num_classes"], call["input"]
    if isinstance(index, OneHot) and isinstance(node, fx.Node) and node.graph is reader.loop.graph:
        index = Invariant(("outside", node), node)  # a mask that is taken for an index (NLLB-MoE)
    if not isinstance(index, Invariant) or not isinstance(classes, int) or shape_of(node) is None:
        return None
    return OneHot(index, classes, (*range(rank_of(node)), "e"))


@rule("permute", "transpose", "t", "T", "mT", of=OneHot | Mask)
def permute(reader: Reader, call: Call, fact: OneHot | Mask) -> Fact | None:
    axes = moved(call, fact.axes)
    return None if axes is None else replace(fact, axes=axes)


@rule("cast", "contiguous", "clone")
def same_numbers(reader: Reader, call: Call) -> Fact | None:
    """A cast keeps what is zero and what is not; of an expert's number, only integer casts are followed."""
    fact, dtype = reader.fact(call["input"]), dtype_of(call.node)
    boolean = dtype is torch.bool
    match fact:
        case OneHot() | Mask():
            return replace(fact, boolean=boolean)
        case Counts():
            # counts in 8 or 16 bits could wrap around to zero
            exact = dtype in (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64)
            return Counts(fact.index, fact.classes, fact.boolean or boolean) if exact else None
        case ExpertId() | HitList() | Coordinate():
            return fact if dtype in (torch.int64, torch.int32) else None
        case MaskRows():
            return fact
    return None


@rule("sum", "any")
def count(reader: Reader, call: Call) -> Fact | None:
    fact = reader.fact(call["input"])
    dims = call["dim"]
    if isinstance(fact, Mask) and call.name == "any" and dims is None:
        return Test("empty", selected(fact), negated=True)
    if isinstance(fact, Mask) and call.name == "any" and call["keepdim"] is False and fact.axes == (0, 1):
        # the tokens with a slot of this expert; that no token has two is for the proof to say
        return replace(fact, axes=(0,)) if dims in (-1, 1, (-1,), (1,)) and fact.boolean else None
    if call["keepdim"] is not False or call.args.get("dtype") not in (None, torch.int64, torch.int32):
        return None
    if isinstance(fact, Mask) and call.name == "sum" and dims is None:
        return RowCount(selected(fact)) if dtype_of(call.node) in (torch.int64, torch.int32) else None
    if not isinstance(fact, OneHot):
        return None
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list):
        return None
    rank = len(fact.axes)
    if {d % rank for d in dims} != {i for i, axis in enumerate(fact.axes) if axis != "e"}:
        return None
    return Counts(fact.index, fact.classes, boolean=call.name == "any")


@rule("eq", "ne", "gt", "ge", "lt", "le")
def compare(reader: Reader, call: Call) -> Fact | None:
    left, right, name = reader.fact(call["input"]), reader.fact(call["other"]), call.name
    if isinstance(left, Constant) or isinstance(right, ExpertId):
        mirrored = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}
        left, right, name = right, left, mirrored.get(name, name)
    number = right.value if isinstance(right, Constant) else None
    match left:
        case Counts() if nonzero_test(name, number):
            return Counts(left.index, left.classes, boolean=True)
        case ExpertId() if isinstance(right, Invariant) and name == "eq":
            tensor = tensor_of(right.node)
            if tensor is not None and tensor.dtype in INTEGERS and tensor.dim() > 0:
                return Mask(right, tuple(range(tensor.dim())), None, boolean=True)
        case ExpertId() if isinstance(number, int):
            if name in ("eq", "ne"):
                return Test("expert", number, negated=name == "ne")
            first = number if name in ("ge", "lt") else number + 1  # e >= first, or its opposite
            return Test("expert from", first, negated=name in ("lt", "le"))
        case RowCount():
            if nonzero_test(name, number):
                return Test("empty", left.selection, negated=True)
            if (name, number) in (("eq", 0), ("le", 0), ("lt", 1)):
                return Test("empty", left.selection)
    return None


def selected(mask: Mask) -> Selection:
    """The positions where the mask holds. Of tokens that have an expert once at most: as positions of their slots."""
    axes = mask.axes
    if axes == (0,) and rank_of(mask.index.node) == 2 and distinct(mask.index.node):
        axes = (0, 1)
    return Selection(mask.index, axes, mask.classes, mask.keep)


@rule("and", "mul")
def drop_from_one_hot(reader: Reader, call: Call) -> Fact | None:
    """``one_hot(index) * (place < capacity)``: the one_hot of an index that is -1 where a slot is dropped."""
    for left, right in call.either_way:
        fact, keep = reader.fact(left), reader.fact(right)
        if not isinstance(fact, OneHot) or not isinstance(keep, Invariant) or call.op.inplace or fact.classes < 0:
            continue
        shape, rank = shape_of(left), len(fact.axes)
        if fact.axes != (*range(rank - 1), "e") or dtype_of(right) is not torch.bool:
            continue
        if keep.node.graph is not reader.loop.graph or fact.index.node.graph is not reader.loop.graph:
            continue
        if not same_shape(shape, shape_of(right)) or dtype_of(call.node) not in (*INTEGERS, torch.bool):
            continue
        index = fact.index.node
        before = index_root(index).meta.get(DROPPED)
        # slots dropped before stay -1, whatever this keeps of expert 0
        places = reader.make(torch.clamp, index, 0) if before else index
        kept = reader.make(torch.gather, keep.node, -1, reader.make(torch.unsqueeze, places, -1))
        with_drops = reader.make(torch.where, reader.make(torch.squeeze, kept, -1), index, -1)
        with_drops.meta[DROPPED] = SOME if before != ALL and keeps_some(right, left) else ALL
        return replace(fact, index=Invariant(("outside", with_drops), with_drops))
    return None


def keeps_some(keep: Any, mask: Any) -> bool:
    """Whether it is ``mask.cumsum(dim) <= capacity``: the first along an axis counts 1."""
    call = read_call(keep)
    if call is None or call.name not in ("le", "lt") or type(call["other"]) is not int:
        return False
    counted, least = call["input"], 1 if call.name == "le" else 2
    made = isinstance(counted, fx.Node) and counted.target in (torch.cumsum, "cumsum")
    return made and counted.args[:1] == (mask,) and call["other"] >= least


@rule("reshape", "flatten", of=OneHot)
def rows_of_one_hot(reader: Reader, call: Call, fact: OneHot) -> Fact | None:
    """``one_hot.view(-1, 1, E)``: the one_hot of the index in that shape."""
    shape, before = shape_of(call.node), shape_of(call["input"])
    if shape is None or before is None or len(shape) < 2 or fact.classes < 0:
        return None
    rank = len(fact.axes)
    if fact.axes != (*range(rank - 1), "e") or shape[-1] != fact.classes or before[-1] != fact.classes:
        return None
    index = fact.index.node
    if index.graph is not reader.loop.graph or call.node.graph is not reader.loop.graph:
        return None
    if same_shape(before, shape):
        return fact
    if call.name == "flatten":
        sizes: tuple[Any, ...] = (-1,) if len(shape) == 2 else ()
    else:
        sizes = tuple(call["shape"])[:-1]
    if len(sizes) != len(shape) - 1 or sum(size == -1 for size in sizes if isinstance(size, int)) > 1:
        return None
    made = reader.make("reshape", index, *sizes)
    dropped = index_root(index).meta.get(DROPPED)
    made.meta.update({DROPPED: dropped} if dropped else {})
    return OneHot(Invariant(("outside", made), made), fact.classes, (*range(len(sizes)), "e"), fact.boolean)


@rule("and", "mul")
def drop_slots(reader: Reader, call: Call) -> Fact | None:
    """``(index == e) & (place < capacity)``: some slots are dropped, whatever their expert."""
    for left, right in call.either_way:
        mask, keep = reader.fact(left), reader.fact(right)
        if not isinstance(mask, Mask) or not isinstance(keep, Invariant) or call.op.inplace:
            continue
        plain = mask.boolean and mask.axes == tuple(range(len(mask.axes))) and dtype_of(right) is torch.bool
        shape = shape_of(left)
        if plain and same_shape(shape, shape_of(right)) and same_shape(shape, shape_of(mask.index.node)):
            return replace(mask, keep=mask.keep | {keep})
    return None


def nonzero_test(name: str, number: Any) -> bool:
    """Whether ``count <name> number`` asks if a count is above zero."""
    return not isinstance(number, bool) and (name, number) in (("gt", 0), ("ne", 0), ("ge", 1))


@rule("not", "logical_not")
def opposite(reader: Reader, call: Call) -> Fact | None:
    fact = reader.fact(call["input"])
    if isinstance(fact, RowCount):
        return Test("empty", fact.selection)
    return negate(fact) if isinstance(fact, Test) else None


@rule("nonzero", "argwhere", "where")
def positions(reader: Reader, call: Call) -> Fact | None:
    """``where(mask)``, ``nonzero(mask)`` and ``nonzero(mask, as_tuple=True)``, of masks and of counts."""
    if call.name == "where":
        if not isinstance(call["input"], type(MISSING)) or not isinstance(call["other"], type(MISSING)):
            return None
        fact, apart = reader.fact(call["condition"]), True
    else:
        fact, apart = reader.fact(call["input"]), call.args.get("as_tuple", False) is True
    if isinstance(fact, Counts):
        hits = HitList(fact.index, fact.classes, column=not apart)
        return Items((hits,)) if apart else hits
    if isinstance(fact, Mask):
        selection = selected(fact)
        if apart:
            return Items(tuple(Coordinate(selection, axis) for axis in fact.axes))
        return selection if len(fact.axes) > 1 else Coordinate(selection, fact.axes[0], column=True)
    return None


@rule("unique", of=Invariant)
def unique(reader: Reader, call: Call, fact: Invariant) -> Fact | None:
    """Every expert that occurs, once. Which axes the index has does not matter."""
    if call["dim"] is not None or dtype_of(fact.node) not in INTEGERS:
        return None
    root, bounds = index_root(fact.node), index_bounds(fact.node)
    if bounds is None or bounds[0] < 0:
        return None  # weights[-1] would be the last expert
    if root.graph is not reader.loop.graph:
        return None
    hits = HitList(Invariant(("outside", root), root), None, column=False)
    beside = [name for name in ("return_inverse", "return_counts") if call[name]]
    return Items((hits, *(Unknown(name, call.node) for name in beside))) if beside else hits


@rule("bincount", of=Invariant)
def bincount(reader: Reader, call: Call, fact: Invariant) -> Fact | None:
    """How often each expert occurs; which axes the index has does not matter."""
    shape = shape_of(call.node)
    if call["weights"] is not None or shape is None or not isinstance(shape[0], int):
        return None
    root = index_root(fact.node)
    return Counts(Invariant(("outside", root), root), shape[0]) if root.graph is reader.loop.graph else None


@rule("item", "tolist")
def numbers(reader: Reader, call: Call) -> Fact | None:
    """``mask.sum().item()``, ``counts.tolist()``, ``e.item()``."""
    fact = reader.fact(call["input"])
    if call.name == "item" and isinstance(fact, ExpertId):
        return ExpertId()
    return fact if isinstance(fact, RowCount if call.name == "item" else Counts) else None


@rule("getitem", of=Counts)
def count_of_the_expert(reader: Reader, call: Call, fact: Counts) -> Fact | None:
    """``counts[e]``."""
    if reader.fact(call["index"]) != ExpertId():
        return None
    whole = RowCount(Selection(fact.index, (), fact.classes))
    return Test("empty", whole.selection, negated=True) if fact.boolean else whole


@rule("full")
def number_in_a_tensor(reader: Reader, call: Call) -> Fact | None:
    """A row of a list of hits, where the iterations were taken by number."""
    size = call["size"]
    if not isinstance(reader.fact(call["fill_value"]), ExpertId):
        return None
    if dtype_of(call.node) not in (torch.int64, torch.int32):
        return None
    return ExpertId(vector=len(size) == 1) if tuple(size) in ((), (1,)) else None


@rule("squeeze", "flatten", "reshape")
def drop_unit_axes(reader: Reader, call: Call) -> Fact | None:
    """Views that only take axes of size one away."""
    fact = reader.fact(call["input"])
    match fact:
        case ExpertId(vector=True) if shape_of(call.node) == ():
            return ExpertId()
        case HitList(column=True) if rank_of(call.node) == 1 and not (call.name == "squeeze" and call["dim"] is None):
            return HitList(fact.index, fact.classes, column=False)
        case Mask() if call.name == "squeeze" and isinstance(call["dim"], int):
            if fact.axes[call["dim"]] != "1":
                return fact if same_shape(shape_of(call["input"]), shape_of(call.node)) else None
            axes = list(fact.axes)
            del axes[call["dim"]]
            return replace(fact, axes=tuple(axes))
    return None


@rule("select", of=OneHot)
def select(reader: Reader, call: Call, fact: OneHot) -> Fact | None:
    if not isinstance(call["dim"], int):
        return None
    keys: list[Fact] = [Constant(FULL)] * len(fact.axes)
    keys[call["dim"]] = reader.fact(call["index"])
    return select_expert(fact, keys)


@rule("getitem")
def getitem(reader: Reader, call: Call) -> Fact | None:
    fact, key = reader.fact(call["input"]), reader.fact(call["index"])
    keys = list(key.items) if isinstance(key, Items) else [key]
    match fact:
        case Items() if isinstance(key, Constant) and isinstance(key.value, int):
            return fact.items[key.value] if -len(fact.items) <= key.value < len(fact.items) else None
        case ExpertId(vector=True) if len(keys) == 1 and isinstance(keys[0], Constant) and keys[0].value in (0, -1):
            return ExpertId() if not isinstance(keys[0].value, bool) else None
        case OneHot():
            return select_expert(fact, keys)
        case HitList() if keys == [Constant(FULL)]:
            return fact
        case HitList(column=True) if keys == [Constant(FULL), Constant(0)]:
            return HitList(fact.index, fact.classes, column=False)
        case Selection() if len(keys) == 2 and keys[0] == Constant(FULL) and isinstance(keys[1], Constant):
            axis = keys[1].value
            if isinstance(axis, int) and -len(fact.axes) <= axis < len(fact.axes):
                return Coordinate(fact, fact.axes[axis])
        case Mask(boolean=True, axes=(0, 1)) if len(keys) == 1 and isinstance(keys[0], Coordinate):
            at = keys[0]
            own = (at.axis, at.column, at.selection.index) == (0, False, fact.index)
            return MaskRows(at.selection) if own else None
    return None


def is_column(reader: Reader, argument: Any) -> bool:
    shape = shape_of(argument)
    return shape is not None and len(shape) == 2 and sized_one(shape[1])


@rule("argmax", of=MaskRows)
def slot_of_the_row(reader: Reader, call: Call, fact: MaskRows) -> Fact | None:
    """``mask[token].int().argmax(-1)``: where in its row of index the expert stands, if it stands there once."""
    if call["dim"] not in (-1, 1) or fact.selection.axes != (0, 1) or not distinct(fact.selection.index.node):
        return None
    return Coordinate(fact.selection, 1, column=call["keepdim"] is True)


def select_expert(fact: OneHot, keys: list[Fact]) -> Fact | None:
    """``one_hot[..., e, ...]`` with full slices elsewhere."""
    dots = [i for i, key in enumerate(keys) if isinstance(key, Constant) and key.value is Ellipsis]
    fill = [Constant(FULL)] * (len(fact.axes) - len(keys) + len(dots))
    if len(dots) > 1:
        return None
    at = dots[0] if dots else len(keys)
    full = [*keys[:at], *fill, *keys[at + len(dots) :]]
    if len(full) != len(fact.axes):
        return None
    axes: list[int | str] = []
    chosen = False
    for axis, key in zip(fact.axes, full, strict=True):
        if isinstance(key, ExpertId) and axis == "e":
            chosen = True
            if key.vector:
                axes.append("1")
        elif key == Constant(FULL):
            axes.append(axis)
        else:
            return None
    return Mask(fact.index, tuple(axes), fact.classes, fact.boolean) if chosen else fact


@rule("unbind", "T", "t", of=Selection)
def columns_apart(reader: Reader, call: Call, fact: Selection) -> Fact | None:
    """``slot, token = mask.nonzero().T`` or ``.unbind(1)``."""
    apart = call.name != "unbind" or call["dim"] in (1, -1)
    return Items(tuple(Coordinate(fact, axis) for axis in fact.axes)) if apart else None


@rule("unsqueeze", "squeeze", "reshape", "flatten", "select", "getitem", of=Coordinate | RowWeight | OwnGate)
def column_or_vector(reader: Reader, call: Call, fact: Coordinate | RowWeight | OwnGate) -> Fact | None:
    """One number a row, as a column [S, 1] or as a vector [S]: ``w[:, None]``, ``token.view(-1)``, ``gate[..., 0]``."""
    before, after = shape_of(call["input"]), shape_of(call.node)
    if before is None or after is None:
        return None
    if len(call.node.all_input_nodes) > 1 and call.name != "reshape":
        return None  # other rows of it
    if {len(before), len(after)} != {1, 2} or fact.column is not (len(before) == 2):
        return None
    if call.name == "getitem" and not same_size(before[0], after[0]):
        return None  # some rows of it
    if call.name == "squeeze" and call["dim"] is None:
        return None  # a row that is alone loses its axis
    return replace(fact, column=not fact.column) if sized_one((before if fact.column else after)[1]) else None


@rule("mul")
def numbers_in_rows(reader: Reader, call: Call) -> Fact | None:
    """``numel()`` of a matrix with one row for each selected position: so many in each row."""
    for rows, each in call.either_way:
        count, times = reader.fact(rows), reader.fact(each)
        if isinstance(count, RowCount) and isinstance(times, Constant) and type(times.value) is int and times.value > 0:
            return count
    return None


@rule("numel", "size")
def row_count(reader: Reader, call: Call) -> Fact | None:
    """S: the length of a coordinate, or of anything that has one row for each selected position."""
    fact = reader.fact(call["input"])
    if call.name == "numel":
        if not isinstance(fact, Coordinate) or (fact.column and not is_column(reader, call["input"])):
            return None
        return RowCount(fact.selection)
    if call["dim"] != 0:
        return None
    if isinstance(fact, Selection):
        return RowCount(fact)
    selection = getattr(fact, "selection", None)
    return RowCount(selection) if isinstance(selection, Selection) else None
