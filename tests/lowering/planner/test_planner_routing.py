"""Expected destinations and loads: against counting every choice, and against simulated routing."""
from __future__ import annotations

import json
import random
from itertools import combinations
from math import prod

import pytest

from moebius.lowering.planner import PlannerError, balance, routing
from moebius.lowering.planner.traffic import chunk_span, expected_destinations


def owners(experts: int, places: int) -> dict[int, int]:
    return {e: place for place in range(places) for e in range(*chunk_span(experts, places, place))}


@pytest.mark.parametrize("experts, top_k, places", [(8, 2, 2), (7, 3, 4), (9, 3, 3), (8, 3, 8)])
def test_with_odds_by_counting_every_choice(experts, top_k, places):
    odds = tuple(1.0 + e * e for e in range(experts))
    owner = owners(experts, places)
    choices = list(combinations(range(experts), top_k))
    likely = [prod(odds[e] for e in choice) for choice in choices]
    reached = [len({owner[e] for e in choice}) for choice in choices]
    expected = sum(a * b for a, b in zip(likely, reached, strict=True)) / sum(likely)
    parts = balance.in_order(experts, places).parts(places)
    assert routing.reached_with_odds(odds, top_k, parts) == pytest.approx(expected)
    often = [sum(a for a, choice in zip(likely, choices, strict=True) if e in choice) / sum(likely)
             for e in range(experts)]
    assert routing.chosen(odds, top_k) == pytest.approx(often)


def test_equal_counts_are_uniform_routing():
    recorded = routing.from_counts([[5.0] * 64, [2.0] * 64], 6)
    uniform = routing.Routing(64, 6)
    for places in (1, 2, 8, 64):
        one, other = recorded.spread(places, 1), uniform.spread(places, 1)
        assert one.ranks == pytest.approx(other.ranks) == pytest.approx(expected_destinations(places, 64, 6))
        assert one.busiest == pytest.approx(other.busiest) == pytest.approx(1.0)


@pytest.mark.parametrize("places", [2, 4, 8, 16])
def test_groups_against_simulated_routing(places):
    experts, top_k, groups, limit = 64, 6, 8, 3
    draw, owner = random.Random(places), owners(experts, places)
    size, found, tokens = experts // groups, 0, 4000
    for _ in range(tokens):
        inside = [g * size + i for g in draw.sample(range(groups), limit) for i in range(size)]
        found += len({owner[e] for e in draw.sample(inside, top_k)})
    expected = routing.Routing(experts, top_k, groups, limit).spread(places, 1).ranks
    assert found / tokens == pytest.approx(expected, abs=4 * top_k / tokens**0.5)  # four standard errors at most
    assert expected < expected_destinations(places, experts, top_k)


@pytest.mark.parametrize("power", [0.0, 0.6, 1.2, 3.0])
def test_odds_give_the_frequencies_of_a_histogram(power):
    counts = [1 / (e + 1) ** power for e in range(40)]
    wanted = routing.often(counts, 4)
    assert sum(wanted) == pytest.approx(4) and max(wanted) < 1
    assert routing.chosen(routing.odds_for(counts, 4), 4) == pytest.approx(wanted, abs=1e-4)


def test_recorded_routing_against_simulated_tokens():
    counts = [1 / (e + 1) for e in range(16)]
    routed = routing.from_counts([counts], 3)
    draw, odds, owner = random.Random(1), routed.odds[0], owners(16, 4)
    found, tokens = 0, 0
    while tokens < 3000:  # independent draws, kept where they are three: sets are as likely as their odds' product
        chosen = [e for e in range(16) if draw.random() < odds[e] / (1 + odds[e])]
        if len(chosen) == 3:
            found, tokens = found + len({owner[e] for e in chosen}), tokens + 1
    assert found / tokens == pytest.approx(routed.spread(4, 1).ranks, abs=4 / tokens**0.5)
    assert routed.spread(4, 1).busiest == pytest.approx(4 * sum(counts[:4]) / sum(counts))


def test_ranks_that_do_not_divide_the_experts_wait_for_the_fullest():
    assert routing.Routing(10, 2).spread(4, 1).busiest == pytest.approx(3 * 4 / 10)


@pytest.mark.parametrize("held", ["[1, 2", "{}", "[1, 2, 3]", "[1, 0, 0, 0]", '[1, 2, 3, "4"]', "[[1, 2, 3, 4], [1]]",
                                  "[1, 2, 3, Infinity]", "[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]"])
def test_files_that_are_no_histogram_are_refused(held, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(held)
    with pytest.raises(PlannerError, match="counts.json"):
        routing.read(file, 4, 2, 2)
    file.write_text(json.dumps([[1, 2, 3, 4]] * 2))
    assert len(routing.read(file, 4, 2, 2).shares) == 2
