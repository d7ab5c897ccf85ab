"""The arithmetic of plans, against torch and against counting."""
from __future__ import annotations

from itertools import combinations

import pytest
import torch

from moebius.lowering.distribution import Plan, RegionShape, bytes_for, expected_bytes
from moebius.lowering.planner.traffic import chunk_span, expected_destinations


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_spans_are_those_of_torch_chunk(length, ranks):
    rows = torch.arange(length)
    spans = [rows[slice(*chunk_span(length, ranks, rank))].tolist() for rank in range(ranks)]
    assert [span for span in spans if span] == [chunk.tolist() for chunk in rows.chunk(ranks) if len(chunk)]
    assert sum(spans, []) == rows.tolist()


@pytest.mark.parametrize("ranks, num_experts, top_k", [(2, 8, 2), (3, 7, 2), (4, 6, 3), (5, 3, 1)])
def test_destinations_by_counting_every_choice(ranks, num_experts, top_k):
    owner = {e: rank for rank in range(ranks) for e in range(*chunk_span(num_experts, ranks, rank))}
    choices = [len({owner[e] for e in choice}) for choice in combinations(range(num_experts), top_k)]
    assert expected_destinations(ranks, num_experts, top_k) == pytest.approx(sum(choices) / len(choices))


def test_destinations_of_a_large_layer():
    # the figures of a layer of 256 experts, 8 a token (design notes; the formula counted above)
    found = [round(expected_destinations(ranks, 256, 8), 2) for ranks in (4, 8, 64)]
    assert found == [3.61, 5.29, 7.68]


def test_deduplicated_dispatch_never_sends_more_than_gathering_every_token():
    for ranks in (2, 4, 8):
        shape = RegionShape(tokens=4096, top_k=8, num_experts=64, width=512, item_bytes=2, weight_bytes=4)
        remote_rows = shape.tokens * expected_destinations(ranks, 64, 8) * (ranks - 1) / ranks
        assert remote_rows <= shape.tokens * (ranks - 1)
        assert expected_bytes(shape, ranks).combine <= remote_rows * 2 * (512 * 2 + 8 * 4)


def test_one_rank_sends_nothing():
    assert expected_bytes(RegionShape(10, 2, 4, 8, 4, 4), 1).total == 0


def test_bytes_of_a_case_by_hand():
    # 3 rows of 4 floats, 2 float weights and 2 int64 indices leave; 5 rows come
    found = bytes_for(RegionShape(12, 2, 4, 4, 4, 4), 2, sent=3, received=5)
    assert found.header == 16
    assert found.dispatch == 3 * (16 + 8 + 16) + 3 * 16
    assert found.combine == 5 * 16 + 5 * (16 + 8)
    assert found.total == 16 + 168 + 200


def test_text_says_what_was_planned():
    plan = Plan(axis="ep", parameters={"model.w": (8, 4)}, regions=[RegionShape(12, 2, 8, 4, 4, 4)], ranks=2)
    text = str(plan)
    assert "over 2 ranks (mesh axis 'ep')" in text and "model.w: 8 experts, at most 4 on a rank" in text
    assert f"{plan.expected().total / 1e6:.3f} MB" in text
