"""The algebra: what can be known of a value in the body of an expert loop.

An iteration has one unknown, the expert e. Facts say what a value is as a function of e and of values that are the same
in each iteration. They compare equal when they mean the same, so a proof step is often just ``==``.

Letters: T tokens, K slots, S the rows selected by one iteration, D model width, N expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx


@dataclass(frozen=True)
class Fact:
    """Base of all facts."""

    words: ClassVar[str] = "a value"


@dataclass(frozen=True)
class Unknown(Fact):
    """Nothing is proven. ``reason`` and ``node`` say where knowledge ended; they do not take part in equality."""

    reason: str = field(compare=False, default="")
    node: fx.Node | None = field(compare=False, default=None)


@dataclass(frozen=True)
class Constant(Fact):
    """A Python value (number, dtype, slice, None, ...)."""

    words = "constants"

    value: Any


@dataclass(frozen=True)
class Items(Fact):
    """A tuple of values."""

    words = "several values"

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Invariant(Fact):
    """The same tensor (or number) in every iteration. key: equal keys, equal values. node: computes it, in the outer
    graph or, from invariants alone, in the body."""

    words = "what is the same for all experts"

    key: Hashable
    node: fx.Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class State(Fact):
    """What the iterations change: a placeholder of the body (a carried value, or a tensor that is written in place)."""

    words = "what iterations change"

    placeholder: fx.Node
    carried: bool


# ----------------------------------------------------------------------------------------------------------------------
# Which rows
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertId(Fact):
    """This iteration's expert e: a number or a tensor without axes, or (vector) a tensor of one element."""

    words = "the expert's number"

    vector: bool = False


@dataclass(frozen=True)
class OneHot(Fact):
    """(index == e) for all e below ``classes`` (-1: as many as occur). axes: index's axes by number, and "e"."""

    words = "the mask of all experts"

    index: Invariant
    classes: int
    axes: tuple[int | str, ...]
    boolean: bool = False


@dataclass(frozen=True)
class Counts(Fact):
    """[classes]: how many slots go to each expert. ``boolean``: only whether any does."""

    words = "the counts of all experts"

    index: Invariant
    classes: int | None
    boolean: bool = False


@dataclass(frozen=True)
class HitList(Fact):
    """Every expert that some slot goes to, once: [hits], or [hits, 1] as ``nonzero()`` gives (column)."""

    words = "the experts that are hit"

    index: Invariant
    classes: int | None
    column: bool


@dataclass(frozen=True)
class Mask(Fact):
    """(index == e) for this iteration's e. ``axes``: index's axes in the mask's order; "1" is an axis of size one.

    classes: of the one_hot that it was taken from, which raises for an index beyond; None where it was compared with e.
    keep: booleans of index's shape that all hold where the mask does: slots that are not dropped.
    """

    words = "the mask of one expert"

    index: Invariant
    axes: tuple[int | str, ...]
    classes: int | None
    boolean: bool = False
    keep: frozenset[Invariant] = frozenset()


@dataclass(frozen=True)
class MaskedWeights(Fact):
    """[T, K]: weight where index is this iteration's e, zero elsewhere."""

    words = "the weights of one expert's tokens"

    index: Invariant
    weight: Invariant


@dataclass(frozen=True)
class OwnGate(Fact):
    """source[:, e] of a matrix [T, E]: one number a token, [T] or [T, 1] (column)."""

    words = "the weights of one expert"

    source: Invariant
    column: bool = False


@dataclass(frozen=True)
class Selection(Fact):
    """The positions where index == e, in the row-major order of ``axes``: S of them. keep: as of a mask."""

    words = "the positions of one expert's tokens"

    index: Invariant
    axes: tuple[int | str, ...]
    classes: int | None
    keep: frozenset[Invariant] = frozenset()


@dataclass(frozen=True)
class Coordinate(Fact):
    """[S]: the positions of a selection along one axis of index (0: the token, 1: the slot)."""

    words = "the positions of one expert's tokens"

    selection: Selection
    axis: int | str
    column: bool = False


@dataclass(frozen=True)
class MaskRows(Fact):
    """[S, slots]: the rows of the mask (index == e) at the selected tokens. ``selection``: of that index."""

    selection: Selection


@dataclass(frozen=True)
class RowCount(Fact):
    """S, as a number, or a multiple of it: it is asked whether that is 0."""

    words = "the number of one expert's rows"

    selection: Selection


@dataclass(frozen=True)
class Test(Fact):
    """A condition of this iteration, by kind: "expert": e == value; "expert from": e >= value; "empty": S == 0.

    negated: the opposite holds.
    """

    words = "a condition"

    kind: str
    value: int | Selection
    negated: bool = False


# ----------------------------------------------------------------------------------------------------------------------
# What is computed for each row. A row function has ``selection`` and ``dtype``.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice(Fact):
    """weight[e], perhaps viewed and cast: a matrix (of a rank-3 weight) or a vector (of a rank-2 one).

    axes: which axes of ``weight`` this value's axes are (1, 2 as they come). ranges: which positions along axes 1, 2.
    """

    words = "one expert's weight"

    weight: Invariant
    axes: tuple[int, ...]
    ranges: tuple[range, ...]
    dtype: torch.dtype

    def range_of(self, axis: int) -> range:
        return self.ranges[axis - 1]


@dataclass(frozen=True)
class RowFunction(Fact):
    """[S, ...]: one value a selected row, made from that row alone."""

    words = "the rows of one expert"

    selection: Selection
    dtype: torch.dtype


@dataclass(frozen=True)
class Rows(RowFunction):
    """source[token]: rows [S, D] of a matrix. ``axis``: along which axis of index the rows were looked up."""

    source: Invariant
    axis: int | str


@dataclass(frozen=True)
class Raised(Fact):
    """[1, …]: rows, or an expert's weight, with an axis of size one before them, as ``x[None, token]`` gives."""

    words = "the rows of one expert"

    rows: Rows | Slice


@dataclass(frozen=True)
class RowWeight(RowFunction):
    """source[token, slot]: one number a row, [S] or [S, 1] (column).

    axes: what stands at each axis of source: an axis of index, or "e" for this iteration's expert. picked: of a source
    with more axes, which (axis, position) are chosen in every iteration alike; ``axes`` are the others.
    """

    source: Invariant
    axes: tuple[int | str, ...]
    column: bool = False
    picked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Linear(RowFunction):
    """input @ weight[e].T + bias[e]. out_axis: the axis (1 or 2) of ``weight`` that the result runs along."""

    input: RowFunction
    weight: Slice
    out_axis: int
    bias: Slice | None = None


@dataclass(frozen=True)
class Pointwise(RowFunction):
    """An operator applied element by element to row functions and constants; parameters: its other arguments."""

    operator: str
    arguments: tuple[Fact, ...]
    parameters: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Product(RowFunction):
    """coefficient · Π factors · Π weights: factors are row functions [S, N], weights one number a row."""

    coefficient: float
    factors: tuple[RowFunction, ...]
    weights: tuple[RowWeight, ...]


@dataclass(frozen=True)
class EachRow(RowFunction):
    """[S, …]: what ``node`` computes (the ``part``-th of it, where it gives several), row by row, of any rows, of this
    iteration's expert and of what is the same for all rows. It may draw random numbers. base: the projection of whose
    rows alone it is, by operators that draw none and multiply with no matrix; None of others."""

    node: fx.Node
    part: int | None = None
    base: Linear | None = None


@dataclass(frozen=True)
class OwnVector(Fact):
    """What ``node`` computes of vectors of this iteration's expert, element by element: ``1 + scale[e]``."""

    words = "a vector of one expert"

    node: fx.Node


@dataclass(frozen=True)
class StateRows(Fact):
    """state[coordinate], a copy, and with ``rows`` added to it: half of ``out[token] += rows``."""

    words = "rows of the result"

    state: State
    coordinate: Coordinate
    rows: Fact | None = None


@dataclass(frozen=True)
class Accumulated(Fact):
    """state + (rows added at the positions of ``coordinate``), written at ``node``.

    once: right only if no position occurs twice in an iteration, as in ``out[token] += rows``.
    """

    words = "the result"

    state: State
    coordinate: Coordinate
    rows: Fact
    node: fx.Node = field(compare=False, repr=False)
    once: bool = False


def as_product(fact: RowFunction) -> Product:
    """Any row function as a product of one factor (a weight counts as a weight)."""
    if isinstance(fact, Product):
        return fact
    if isinstance(fact, RowWeight):
        return Product(fact.selection, fact.dtype, 1.0, (), (fact,))
    return Product(fact.selection, fact.dtype, 1.0, (fact,), ())


def simplify(product: Product) -> RowFunction:
    """A product of nothing but one factor is that factor."""
    if product.coefficient == 1.0 and not product.weights and len(product.factors) == 1:
        factor = product.factors[0]
        if factor.dtype == product.dtype:
            return factor
    return product


def linears(fact: Fact) -> frozenset[Linear]:
    """The outermost Linear facts that a row function is made of."""
    if isinstance(fact, Linear):
        return frozenset((fact,))
    if isinstance(fact, Pointwise):
        return frozenset().union(*(linears(argument) for argument in fact.arguments))
    if isinstance(fact, Product):
        return frozenset().union(*(linears(factor) for factor in fact.factors))
    return frozenset()


# ----------------------------------------------------------------------------------------------------------------------
# What reading a loop gives
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Skip:
    """One ``continue``: the condition that was proven, and whether something had been accumulated before it."""

    node: fx.Node
    condition: Fact
    late: bool


@dataclass
class Evidence:
    """What reading the loop gave. The steps of the proof judge it.

    sums: accumulations into what the iterations change. writes: other in-place writes.
    readbacks: operators that read what earlier iterations wrote. strangers: operators that no table knows. ungraded:
    operators that run with gradients switched otherwise than at the loop. results: facts of the new carried values, in
    order. routing: nodes outside whose values were read as routing facts, with those facts.
    """

    sums: list[Accumulated] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    writes: list[Unknown] = field(default_factory=list)
    readbacks: list[Unknown] = field(default_factory=list)
    strangers: list[Unknown] = field(default_factory=list)
    ungraded: list[fx.Node] = field(default_factory=list)
    results: list[Fact] = field(default_factory=list)
    routing: dict[fx.Node, Fact] = field(default_factory=dict)
