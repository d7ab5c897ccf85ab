"""How many ranks, and how many nodes, a token is expected to reach, and how much more the busiest rank has to do.

Uniform routing: each set of K of E experts is as likely as any other. With a recorded histogram: a set of K different
experts is as likely as the product of its experts' odds, and the odds are chosen so that each expert is chosen as often
as the histogram says (conditional Poisson sampling: of all ways to choose K with these frequencies the one with the
greatest entropy). Equal counts give the uniform case. Expected values are exact for both, not simulated.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb, inf
from pathlib import Path

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.files import read_json
from moebius.lowering.planner.traffic import chunk_span

ROUNDS, CLOSE = 100, 1e-6  # of the search for odds


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

    def reached(self, places: int) -> float:
        """Distinct places that a token goes to where so many share the experts as ranks do. Mean over layers."""
        if places == 1:
            return 1.0
        if self.odds:
            return sum(reached_with_odds(odds, self.top_k, places) for odds in self.odds) / len(self.odds)
        if self.groups > 1 and self.limit < self.groups:
            return reached_in_groups(self.experts, self.top_k, self.groups, self.limit, places)
        return reached_uniformly(self.experts, self.top_k, places)

    def busiest(self, places: int) -> float:
        """Slots of the place with most of them, over the mean. Mean over layers: all wait for it in each."""
        spans = [chunk_span(self.experts, places, place) for place in range(places)]
        if not self.shares:
            return max(high - low for low, high in spans) * places / self.experts
        return sum(max(sum(s[low:high]) for low, high in spans) for s in self.shares) * places / len(self.shares)


@cache
def reached_uniformly(experts: int, top_k: int, places: int) -> float:
    """Σ over places of 1 − C(E − E_p, K) / C(E, K)."""
    spans = (chunk_span(experts, places, place) for place in range(places))
    return sum(1.0 - comb(experts - (high - low), top_k) / comb(experts, top_k) for low, high in spans)


@cache
def reached_in_groups(experts: int, top_k: int, groups: int, limit: int, places: int) -> float:
    """The same where a token's experts lie in ``limit`` of ``groups`` groups: each set of groups is as likely as any
    other, and so is each set of K experts of those. (A router that ranks groups by their best experts spreads a token
    a little more evenly over its groups than that.)"""
    size = experts // groups
    inside = limit * size
    found = 0.0
    for place in range(places):
        low, high = chunk_span(experts, places, place)
        owned = [max(0, min(high, (g + 1) * size) - max(low, g * size)) for g in range(groups)]
        missed = 0.0
        if max(owned) == min(owned):
            missed = comb(inside - limit * owned[0], top_k) / comb(inside, top_k)
        else:
            for chosen in combinations(owned, limit):
                missed += comb(inside - sum(chosen), top_k) / comb(inside, top_k)
            missed /= comb(groups, limit)
        found += 1.0 - missed
    return found


def symmetric(values: Sequence[float], degree: int) -> list[float]:
    """Elementary symmetric polynomials e_0 … e_degree of the values."""
    found = [1.0] + [0.0] * degree
    for value in values:
        for k in range(degree, 0, -1):
            found[k] += value * found[k - 1]
    return found


@cache
def reached_with_odds(odds: tuple[float, ...], top_k: int, places: int) -> float:
    """Σ over places of 1 − e_K(odds of all others' experts) / e_K(odds)."""
    whole = symmetric(odds, top_k)[top_k]
    found = 0.0
    for place in range(places):
        low, high = chunk_span(len(odds), places, place)
        found += 1.0 - symmetric(odds[:low] + odds[high:], top_k)[top_k] / whole
    return found


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
