"""What reading an expert loop gives: the facts that the steps of the proof judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from moebius.lowering.experts.facts import Accumulated, Fact, Unknown


@dataclass
class Skip:
    """One ``continue``: the condition that was proven, and whether something had been accumulated before it."""

    node: fx.Node
    condition: Fact
    late: bool


@dataclass
class Evidence:
    """What reading the loop gave. The steps of the proof judge it.

    row: what the rows of the source are. sums: accumulations into what the iterations change. writes: other in-place
    writes.
    readbacks: operators that read what earlier iterations wrote. strangers: operators that no table knows. ungraded:
    operators that run with gradients switched otherwise than at the loop. results: facts of the new carried values, in
    order. routing: nodes outside whose values were read as routing facts, with those facts.
    """

    row: Fact = field(default_factory=Unknown)
    sums: list[Accumulated] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    writes: list[Unknown] = field(default_factory=list)
    readbacks: list[Unknown] = field(default_factory=list)
    strangers: list[Unknown] = field(default_factory=list)
    ungraded: list[fx.Node] = field(default_factory=list)
    results: list[Fact] = field(default_factory=list)
    routing: dict[fx.Node, Fact] = field(default_factory=dict)
