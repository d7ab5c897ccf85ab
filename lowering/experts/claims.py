"""What an expert loop is claimed to compute, taken apart of what its iterations were read to add up (reader.py).

A claim says nothing yet: every step of a proof (proof.py, by_row.py) judges it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from moebius.lowering.aliasing import Storage
from moebius.lowering.experts import expressions
from moebius.lowering.experts.activations import match_activation
from moebius.lowering.experts.facts import (
    Accumulated,
    EachRow,
    Fact,
    HitList,
    Linear,
    OwnVector,
    Product,
    RowFunction,
    Rows,
    RowWeight,
    Slice,
    Unknown,
    as_product,
    linears,
)
from moebius.lowering.experts.reader import Reader
from moebius.lowering.graph import ProofStep
from moebius.lowering.values import computed_of, describe_where, shape_of, where_of


class Refused(Exception):
    """The proof failed. ``step``: which; ``reason``: what it found; ``node``: where; ``proof``: the steps before it."""

    def __init__(self, step: str, reason: str, node: fx.Node, proof: Sequence[ProofStep] = ()):
        self.step, self.reason, self.node, self.proof = step, reason, node, proof
        super().__init__(f"{step}: {reason} ({describe_where(placed(node))})")


def placed(node: fx.Node) -> fx.Node:
    """The node, or the first that uses it whose line is known (arithmetic on sizes has none)."""
    seen = [node]
    for one in seen:
        if where_of(one)[0] or len(seen) > 50:
            return one
        seen += one.users
    return node


@dataclass(kw_only=True)
class Claim:
    """What every claim says: rows are added up where they were looked up, one expert an iteration.

    hits, limit: what the loop runs over. experts: how many have weights and an iteration. proof: of it, so far."""

    reader: Reader
    sum: Accumulated
    storage: Storage = field(repr=False)
    hits: HitList | None = None
    limit: int | None = None
    experts: int = 0
    proof: list[ProofStep] = field(default_factory=list)

    @property
    def function(self) -> str:
        """What an expert computes, for people."""
        return "rows of its own, row by row"

    @property
    def node(self) -> fx.Node:
        return self.sum.node

    @property
    def selection(self) -> Any:
        return self.sum.coordinate.selection

    @property
    def index(self) -> fx.Node:
        return self.selection.index.node

    @property
    def lookups(self) -> list[Rows]:
        """The tensors of which the iterations read rows."""
        raise NotImplementedError

    weights: tuple[RowWeight, ...]

    @property
    def slices(self) -> list[Slice]:
        """The expert's own weights and vectors."""
        raise NotImplementedError

    def count_experts(self) -> None:
        """Fills in what the loop runs over, and how many experts there are."""
        reader, held = self.reader, [shape_of(piece.weight.node) for piece in self.slices[:1]]
        source = reader.call["source"]
        fact = reader.outside.get(source) if isinstance(source, fx.Node) else None
        self.hits = fact if isinstance(fact, HitList) else None
        self.limit = source if isinstance(source, int) else None  # n of ``range(n)``
        self.experts = next((shape[0] for shape in held if shape and isinstance(shape[0], int)), 0)
        if self.limit is not None:  # the first ones run, and what goes to the others goes nowhere
            self.experts = min(self.experts, self.limit)


@dataclass(kw_only=True)
class Fused(Claim):
    """A layer that the experts operator has. coefficient · Π weights scales each row; without gating, up is None.
    after: what is done with each row of the down-projection first, if anything is."""

    down: Linear
    gate: Linear
    up: Linear | None
    activation: str
    coefficient: float
    after: EachRow | None = None

    @property
    def function(self) -> str:
        gate = f"{self.activation}(gate(x))"
        return f"down({gate})" if self.up is None else f"down({gate} * up(x))"

    @property
    def x(self) -> Rows:
        assert isinstance(self.gate.input, Rows)
        return self.gate.input

    @property
    def lookups(self) -> list[Rows]:
        return [self.x]

    @property
    def vectors(self) -> list[Slice]:
        """The expert's own vectors that ``after`` reads."""
        if self.after is None:
            return []
        facts = [self.reader.facts.get(node) for node in nodes_after(self.reader, self.after)]
        return [fact for fact in facts if isinstance(fact, Slice)]

    @property
    def slices(self) -> list[Slice]:
        found = [self.gate.weight, self.down.weight] + ([self.up.weight] if self.up else [])
        found += self.vectors
        return found + [linear.bias for linear in (self.down, self.gate, self.up) if linear is not None and linear.bias]


# ----------------------------------------------------------------------------------------------------------------------
# Taking the sum apart
# ----------------------------------------------------------------------------------------------------------------------


def what_is_added(reader: Reader) -> Accumulated:
    """The sum that the iterations add to. Raises Refused."""
    evidence, loop = reader.evidence, reader.loop
    if not evidence.sums:
        causes = [
            *evidence.writes,
            *evidence.readbacks,
            *(fact for fact in evidence.results if isinstance(fact, Unknown)),
        ]
        cause = causes[0] if causes else Unknown("no iteration adds its rows to anything", loop)
        raise Refused("accumulation", cause.reason, cause.node or loop)
    return evidence.sums[0]


def make_claim(reader: Reader, storage: Storage) -> Fused:
    """The claim, or Refused where what is accumulated has another form than an expert of the operator."""
    total = what_is_added(reader)
    rows = known(total.rows, "expert function", total.node)
    outer = as_product(rows)
    last = outer.factors[0] if len(outer.factors) == 1 else None
    after = last if isinstance(last, EachRow) and last.base is not None else None
    if after is not None and after.base is not None:
        bare = as_product(after.base)
        outer = Product(outer.selection, outer.dtype, outer.coefficient, bare.factors, outer.weights)
    if len(outer.factors) != 1 or not isinstance(outer.factors[0], Linear):
        raise Refused(
            "expert function", f"what is added is not a down-projection but {describe(outer.factors)}", total.node
        )
    down = outer.factors[0]
    inner = as_product(down.input)
    gate, up, activation, scale = take_gate_apart(inner.factors, total.node)
    claim = Fused(
        reader=reader,
        sum=total,
        storage=storage,
        weights=outer.weights + inner.weights,
        down=down,
        gate=gate,
        up=up,
        activation=activation,
        coefficient=outer.coefficient * inner.coefficient * scale,
    )
    claim.after = after
    if after is not None and (inner.weights or inner.coefficient * scale != 1.0):
        raise Refused("expert function", "what is done with each row follows a scaled down-projection", total.node)
    for linear in (gate, up):
        if linear is not None and not isinstance(linear.input, Rows):
            raise Refused(
                "expert function",
                f"the gate or up projection reads {describe((linear.input,))}, not rows of x",
                total.node,
            )
    claim.count_experts()
    return claim


def nodes_after(reader: Reader, after: EachRow) -> list[fx.Node]:
    """The nodes of the body from the base's rows (not these) to ``after``, and what they read, in order."""

    def onwards(node: fx.Node) -> list[fx.Node]:
        made = isinstance(reader.facts.get(node), RowFunction | OwnVector)
        return [one for one in node.all_input_nodes if reader.facts.get(one) != after.base] if made else []

    return sorted(computed_of([after.node], onwards))


def known(fact: Fact, step: str, node: fx.Node) -> RowFunction:
    if isinstance(fact, RowFunction):
        return fact
    if isinstance(fact, Unknown):
        raise Refused(step, fact.reason, fact.node or node)
    raise Refused(step, f"what is added is {describe((fact,))}", node)


def take_gate_apart(factors: tuple[RowFunction, ...], node: fx.Node) -> tuple[Linear, Linear | None, str, float]:
    """(gate, up, activation, c): Π factors = c · activation(gate) · up; up is None where there is no gating.

    What is none of the named activations is an expression of gate and up."""
    leaves = sorted(frozenset().union(*(linears(factor) for factor in factors)), key=repr)
    if len(leaves) == 1:
        found = match_activation(factors, leaves[0])
        if found is not None:
            return leaves[0], None, *found
    if len(leaves) == 2:
        for gate, up in (leaves, leaves[::-1]):
            rest = list(factors)
            if up not in rest:
                continue
            rest.remove(up)
            if rest and all(linears(factor) == {gate} for factor in rest):
                found = match_activation(tuple(rest), gate)
                if found is not None:
                    return gate, up, *found
    if len(leaves) in (1, 2):
        try:
            first, second = expressions.letters_of(leaves)
            return first, second, expressions.say(factors, first, second), 1.0
        except expressions.NotSaid:
            pass
    raise Refused(
        "expert function",
        f"the down-projection reads {describe(factors)}, which is no activation times a projection that "
        "the operator has",
        node,
    )


def describe(facts: tuple[Fact, ...]) -> str:
    """Row functions in a few words, for messages."""
    words = []
    for fact in facts:
        match fact:
            case Linear():
                words.append("a projection")
            case Rows():
                words.append("rows of x")
            case EachRow():
                words.append("something else that is computed of each row")
            case RowFunction():
                name = getattr(fact, "operator", None)
                words.append(f"{name} of {len(linears(fact))} projection(s)" if name else type(fact).__name__)
            case _:
                words.append(type(fact).__name__)
    return " times ".join(words) or "nothing"
