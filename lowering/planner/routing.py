"""How many ranks, and how many nodes, a token is expected to reach, and how much more the busiest rank has to do.

Uniform routing: each set of K of E experts is as likely as any other. With a recorded histogram: a set of K different
experts is as likely as the product of its experts' odds, and the odds are chosen so that each expert is chosen as often
as the histogram says (conditional Poisson sampling: of all ways to choose K with these frequencies the one with the
greatest entropy). Equal counts give the uniform case. Expected values are exact for both, not simulated.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean as mean

from moebius.lowering.planner import balance
from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.files import read_json
from moebius.lowering.planner.traffic import expected_destinations

ROUNDS, CLOSE = 100, 1e-6  # of the search for odds


@dataclass(frozen=True)
class Spread:
    """Means over layers. ranks, nodes: distinct ones that a token goes to. busiest: slots of the rank with most of them
    over the mean (all wait for it in each layer). shared: experts on an average rank that stand on others too."""

    ranks: float
    nodes: float
    busiest: float
    shared: float


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts. odds: of each expert, for each layer that differs; empty: uniform. shares: of each
    expert among the slots of these layers, sums 1. groups, limit: of E experts in so many groups, a token's lie in
    ``limit`` of them (uniform routing only)."""

    experts: int
    top_k: int
    groups: int = 1
    limit: int = 1
    odds: tuple[tuple[float, ...], ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()

    known: dict[tuple[int, int, int | None], Spread] = field(default_factory=dict, compare=False, repr=False)

    def spread(self, ranks: int, nodes: int, replicas: int | None = None) -> Spread:
        """Where so many ranks, in so many nodes, share the experts: in the order of their numbers, or (replicas, which
        needs recorded slots) by load, each layer for itself."""
        key = (ranks, nodes, replicas)
        if key not in self.known:
            self.known[key] = self._spread(*key)
        return self.known[key]

    def placements(self, ranks: int, nodes: int, replicas: int | None) -> list[balance.Placement]:
        """Of each layer that was recorded; of one, where none was."""
        if replicas is None:
            return [balance.in_order(self.experts, ranks) for _ in self.loads]
        groups = self.groups if self.limit < self.groups else 1
        return [balance.by_load(layer, ranks, replicas, nodes, groups) for layer in self.loads]

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """Shares of slots, of the layers that were recorded; equal ones of one layer, where none was."""
        return self.shares or ((1 / self.experts,) * self.experts,)

    def _spread(self, ranks: int, nodes: int, replicas: int | None) -> Spread:
        placed = self.placements(ranks, nodes, replicas)
        busiest = mean(one.imbalance(layer) for one, layer in zip(placed, self.loads, strict=True))
        copies = mean(sum(n for n in one.copies() if n > 1) / ranks for one in placed)
        return Spread(self._reached(placed, ranks), self._reached(placed, nodes), busiest, copies)

    def _reached(self, placed: list[balance.Placement], places: int) -> float:
        if self.odds:
            return mean(reached_with_odds(odds, self.top_k, one.parts(places))
                        for odds, one in zip(self.odds, placed, strict=True))
        grouped = (self.groups, self.limit) if self.limit < self.groups else (1, 1)
        return expected_destinations(places, self.experts, self.top_k, *grouped)


def times(polynomial: list[float], values: Iterable[float]) -> list[float]:
    """Times 1 + value · x for each value, as many terms."""
    found = list(polynomial)
    for value in values:
        for k in range(len(found) - 1, 0, -1):
            found[k] += value * found[k - 1]
    return found


def reached_with_odds(odds: Sequence[float], top_k: int, parts: Sequence[dict[int, float]]) -> float:
    """Distinct places. parts: of each, the part of an expert's slots that goes there, each slot for itself. A place p
    is missed with e_K(odds · (1 − part of p)) / e_K(odds), e_K the elementary symmetric polynomial.

    Halves of the places share what is no part of either, so that this takes E · log(places) steps, of K each.
    """
    one = [1.0] + [0.0] * top_k
    whole = times(one, odds)[top_k]

    def missed(low: int, high: int, outside: list[float]) -> float:
        """Σ over places [low, high) of the numerator. outside: the polynomial of all experts with no part in any."""
        if high - low == 1:
            return times(outside, [odds[e] * (1 - part) for e, part in parts[low].items()])[top_k]
        half = (low + high) // 2
        left, right = (set().union(*parts[a:b]) for a, b in ((low, half), (half, high)))
        return (missed(low, half, times(outside, [odds[e] for e in sorted(right - left)]))
                + missed(half, high, times(outside, [odds[e] for e in sorted(left - right)])))

    nowhere = set(range(len(odds))).difference(*parts)
    return len(parts) - missed(0, len(parts), times(one, [odds[e] for e in sorted(nowhere)])) / whole


def chosen(odds: Sequence[float], top_k: int) -> list[float]:
    """How often each expert is among the K: its odds · e_{K−1}(the others) / e_K(all)."""
    before = [[1.0] + [0.0] * top_k]  # polynomials of the experts before each
    for value in odds:
        last = before[-1]
        before.append([last[0], *(last[k] + value * last[k - 1] for k in range(1, top_k + 1))])
    whole, after, found = before[-1][top_k], [1.0] + [0.0] * top_k, [0.0] * len(odds)
    for e in range(len(odds) - 1, -1, -1):
        others = sum(before[e][k] * after[top_k - 1 - k] for k in range(top_k))
        found[e] = odds[e] * others / whole
        after = [after[0], *(after[k] + odds[e] * after[k - 1] for k in range(1, top_k + 1))]
    return found


def often(counts: Sequence[float], top_k: int) -> list[float]:
    """In which share of the tokens each expert is chosen; together top_k. No more than (nearly) all of them, which a
    histogram may ask for that a rounding or another K has made: what is over goes to the others, in proportion."""
    full = 1 - 1e-6
    found, fixed = [0.0] * len(counts), [False] * len(counts)
    while True:
        left = sum(count for count, done in zip(counts, fixed, strict=True) if not done)
        open_slots = top_k - full * sum(fixed)
        found = [full if done else open_slots * count / left for count, done in zip(counts, fixed, strict=True)]
        over = [not done and value > full for value, done in zip(found, fixed, strict=True)]
        if not any(over):
            return found
        fixed = [a or b for a, b in zip(fixed, over, strict=True)]


def odds_for(counts: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Odds with which each expert is chosen as often as in ``counts`` (of slots; any scale).

    """
    wanted = often(counts, top_k)
    odds = [w / (1 - w) for w in wanted]
    for _ in range(ROUNDS):
        now = chosen(odds, top_k)
        if max(abs(a - b) for a, b in zip(now, wanted, strict=True)) < CLOSE:
            break
        odds = [o * w * (1 - a) / (a * (1 - w)) if a and w else 0.0
                for o, a, w in zip(odds, now, wanted, strict=True)]
        mean = sum(odds) / len(odds)
        odds = [o / mean for o in odds]  # only their ratios count; so that no product leaves what a float can hold
    return tuple(odds)


def from_counts(counts: Sequence[Sequence[float]], top_k: int) -> Routing:
    """Routing that was recorded: for each layer, how many slots each expert had."""
    shares = tuple(tuple(count / sum(layer) for count in layer) for layer in counts)
    return Routing(len(counts[0]), top_k, odds=tuple(odds_for(layer, top_k) for layer in shares), shares=shares)


def read(path: str | Path, experts: int, top_k: int, expert_layers: int) -> Routing:
    """A recorded histogram: JSON, [E] numbers or [layers][E]. Raises PlannerError where it does not fit."""
    held = read_json(path)
    layers = held if isinstance(held, list) and held and isinstance(held[0], list) else [held]
    for layer in layers:
        numbers = isinstance(layer, list) and all(type(n) in (int, float) and 0 <= n < inf for n in layer)
        if not numbers or len(layer) != experts or sum(n > 0 for n in layer) < top_k:
            raise PlannerError(f"{path}: a list of {experts} numbers is wanted, slots of each expert (or such a list "
                               f"for each layer), at least {top_k} of them above 0")
    if len(layers) not in (1, expert_layers):
        raise PlannerError(f"{path} has counts of {len(layers)} layers, and the model has {expert_layers} with experts")
    return from_counts(layers, top_k)
