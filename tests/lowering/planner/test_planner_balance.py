"""Experts placed by their load: even, whole, no worse than in order; and what tokens then reach, against simulation."""
from __future__ import annotations

import json
import random

import pytest

from moebius.lowering.planner import PlannerError, balance, command, routing


def zipf(experts: int, power: float, seed: int) -> list[float]:
    found = [1 / (e + 1) ** power for e in range(experts)]
    random.Random(seed).shuffle(found)
    return found


@pytest.mark.share(5)
@pytest.mark.parametrize("ranks", [4, 8, 16, 32])
@pytest.mark.parametrize("experts", [64, 128, 256])
def test_zipf_is_even_with_one_replica_a_rank(experts, ranks):
    for seed in range(3):
        slots = zipf(experts, 1.2, seed)
        assert balance.in_order(experts, ranks).imbalance(slots) > 1.5
        assert balance.by_load(slots, ranks, 1).imbalance(slots) <= 1.15


@pytest.mark.parametrize("seed", range(40))
def test_each_expert_stands_somewhere_and_nothing_is_worse_than_in_order(seed):
    draw = random.Random(seed)
    ranks, experts = draw.choice([1, 2, 3, 4, 6, 8]), draw.randrange(8, 40)
    replicas = draw.randrange(0, min(3, experts - -(-experts // ranks)) + 1)
    slots = [draw.choice([0.0, draw.random(), 10 * draw.random()]) for _ in range(experts)]
    slots[0] = 1.0
    found = balance.by_load(slots, ranks, replicas)
    assert min(found.copies()) >= 1 and len(found.places) == ranks
    for place in found.places:
        assert len(set(place)) == len(place) <= -(-experts // ranks) + replicas
    assert sum(found.loads(slots)) == pytest.approx(sum(slots))
    assert found.imbalance(slots) <= balance.in_order(experts, ranks).imbalance(slots) + 1e-12
    for nodes in (n for n in (1, ranks) if ranks % n == 0):
        parts = found.parts(nodes)
        assert [sum(part.get(e, 0.0) for part in parts) for e in range(experts)] == pytest.approx([1.0] * experts)


def test_groups_stay_on_their_node():
    slots = zipf(64, 1.2, 0)
    found = balance.by_load(slots, 8, 1, nodes=4, groups=8)
    for group in range(8):
        nodes = {rank // 2 for rank, place in enumerate(found.places) for e in place if e // 8 == group}
        assert len(nodes) == 1
    assert found.imbalance(slots) < balance.in_order(64, 8).imbalance(slots)


@pytest.mark.parametrize("replicas, nodes", [(0, 4), (1, 4), (2, 2)])
def test_what_tokens_reach_against_simulated_tokens(replicas, nodes):
    """A slot goes to each copy of its expert equally often, whatever the token's other slots do."""
    experts, top_k, ranks = 16, 3, 4
    counts = zipf(experts, 0.8, 5)
    routed = routing.from_counts([counts], top_k)
    placed, = routed.placements(ranks, nodes, replicas)
    homes = [[rank for rank, place in enumerate(placed.places) if e in place] for e in range(experts)]
    draw, odds = random.Random(replicas), routed.odds[0]
    scale = next(s for s in (1.05**i for i in range(-200, 200)) if sum(s * o / (1 + s * o) for o in odds) > top_k)
    odds = [scale * o for o in odds]  # (only their ratios count; so that many draws have top_k)
    on_ranks = on_nodes = tokens = 0
    while tokens < 3000:
        chosen = [e for e in range(experts) if draw.random() < odds[e] / (1 + odds[e])]
        if len(chosen) == top_k:
            went = {draw.choice(homes[e]) for e in chosen}
            on_ranks, tokens = on_ranks + len(went), tokens + 1
            on_nodes += len({rank * nodes // ranks for rank in went})
    found = routed.spread(ranks, nodes, replicas)
    assert on_ranks / tokens == pytest.approx(found.ranks, abs=4 / tokens**0.5)
    assert on_nodes / tokens == pytest.approx(found.nodes, abs=4 / tokens**0.5)


@pytest.mark.parametrize("replicas", [-1, 100])
def test_replicas_that_cannot_be(replicas):
    with pytest.raises(PlannerError, match="replicas"):
        balance.by_load([1.0] * 8, 4, replicas)


def test_the_plan_shows_imbalance_before_and_after(tmp_path, capsys):
    file = tmp_path / "slots.json"
    file.write_text(json.dumps([zipf(64, 1.2, layer) for layer in range(16)]))
    words = ["--model", "olmoe-1b-7b", "--gpus", "16", "--routing", str(file)]
    assert command.run([*words, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["balance"]
    rows = told["placements"]
    assert [row["replicas"] for row in rows] == [None, 0, 1]
    assert rows[0]["highest"] > 1.5 and rows[2]["highest"] <= 1.15 and rows[0]["moved"] == 0 < rows[2]["moved"]
    assert command.run(words) == 0
    text = capsys.readouterr().out
    assert f"in order{rows[0]['highest']:>30.2f}" in text and "█" in text and "GB to move" in text
