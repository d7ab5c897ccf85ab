"""Experts spread over real gloo processes compute what one process computes: output, every gradient, and the bytes."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebius.kernels import experts
from moebius.lowering.distribution import RanksDisagreeError, RegionShape, bytes_for, traffic
from moebius.lowering.distribution.exchange import gather_experts, own_experts, remember_group
from moebius.lowering.distribution.expert_parallel import combine, dispatch
from moebius.lowering.distribution.plan import chunk_span

WIDTH, EXPERT_WIDTH = 6, 5


def spread(x, gate_up_L, down_L, index, weight, num_experts, group, **options):
    x_RD, expert_R1, weight_R1, *ticket = dispatch(x, index, weight, num_experts, group)
    return combine(experts(x_RD, gate_up_L, down_L, expert_R1, weight_R1, **options), *ticket, x, group)


def rows_between_ranks(index, num_experts, ranks):
    """[from][to] counts of (token, rank) pairs, by plain Python: an independent account of what must travel."""
    counts = [[0] * ranks for _ in range(ranks)]
    owner = {e: r for r in range(ranks) for e in range(*chunk_span(num_experts, ranks, r))}
    for source in range(ranks):
        for token in range(*chunk_span(len(index), ranks, source)):
            for to in {owner[e] for e in index[token] if e in owner}:
                counts[source][to] += 1
    return counts


def check_layer(index_list, top_k, num_experts, dtype, weighted, seed):
    """One layer, forward and backward, against the same operator on whole weights in this process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = remember_group(dist.group.WORLD)
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor(index_list, dtype=torch.int64).reshape(-1, top_k)
    tokens = index.shape[0]

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    whole = [
        draw(tokens, WIDTH), draw(num_experts, 2 * EXPERT_WIDTH, WIDTH), draw(num_experts, WIDTH, EXPERT_WIDTH),
        draw(tokens, top_k),
    ]
    grad = draw(tokens, WIDTH)
    low, high = chunk_span(num_experts, ranks, rank)
    local = [whole[0].clone(), whole[1][low:high].clone(), whole[2][low:high].clone(), whole[3].clone()]
    for tensor in (*whole, *local):
        tensor.requires_grad_()

    expected = experts(whole[0], whole[1], whole[2], index, whole[3] if weighted else None)
    traffic.reset()
    found = spread(local[0], local[1], local[2], index, local[3] if weighted else None, num_experts, group)
    expected.backward(grad)
    found.backward(grad)

    close = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(local[0].grad, whole[0].grad, **close)
    torch.testing.assert_close(local[1].grad, whole[1].grad[low:high], **close)
    torch.testing.assert_close(local[2].grad, whole[2].grad[low:high], **close)
    if weighted:
        torch.testing.assert_close(local[3].grad, whole[3].grad, **close)

    counts = rows_between_ranks(index.tolist(), num_experts, ranks)
    shape = RegionShape(tokens, top_k, num_experts, WIDTH, whole[0].element_size(), whole[3].element_size(),
                        weighted=weighted)
    sent = sum(counts[rank]) - counts[rank][rank]
    received = sum(row[rank] for row in counts) - counts[rank][rank]
    own = chunk_span(tokens, ranks, rank)
    predicted = bytes_for(shape, ranks, sent, received, own[1] - own[0])
    assert (traffic.header, traffic.dispatch, traffic.combine, traffic.gather) == (
        predicted.header, predicted.dispatch, predicted.combine, predicted.gather)
    return [tensor.tolist() for tensor in (found.detach(), local[0].grad)] if dtype == torch.float64 else None


def same_everywhere(results):
    assert all(result == results[0] for result in results), "replicated results differ between ranks"


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, min(3, num_experts)))
    tokens = draw(st.integers(0, 9))
    # -1 and num_experts are sentinels; a narrow range sends everything to one rank and nothing to another
    low = draw(st.integers(-1, num_experts))
    high = draw(st.integers(low, num_experts))
    return draw(st.lists(st.integers(low, high), min_size=tokens * top_k, max_size=tokens * top_k)), top_k, num_experts


@pytest.mark.parametrize("ranks", [2, 3])
def test_generated_routings_match_one_process(on_ranks, ranks):
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(routings(), st.booleans())
    def check(routing, weighted):
        index, top_k, num_experts = routing
        same_everywhere(on_ranks(ranks, check_layer, index, top_k, num_experts, torch.float64, weighted, len(index)))

    check()


@pytest.mark.parametrize(
    "index, num_experts",
    [
        ([[0, 1]] * 7, 4),  # every token to the first rank, none to the second
        ([[3, 2]] * 7, 4),  # the other way round
        ([[4, -1]] * 5, 4),  # sentinels only: nothing travels
        ([[0, 3]], 4),  # one token: the second rank serves none
        ([], 4),  # no token
        ([[0, 0], [1, 0], [2, 2]], 3),  # the same expert twice; ranks with two experts and one
        ([[0]] * 4, 1),  # fewer experts than ranks
    ],
)
def test_corner_routings_match_one_process(on_ranks, index, num_experts):
    top_k = len(index[0]) if index else 2
    flat = [e for row in index for e in row]
    same_everywhere(on_ranks(2, check_layer, flat, top_k, num_experts, torch.float64, True, 1))


def test_bfloat16(on_ranks):
    on_ranks(2, check_layer, [0, 1, 2, 3, 1, 2, 3, 0], 2, 4, torch.bfloat16, True, 2)


def pass_different_batches(tokens_differ):
    group = remember_group(dist.group.WORLD)
    rank = dist.get_rank()
    index = torch.tensor([[0, 1], [2, 3], [1, 2]])
    index = index[: 3 - rank] if tokens_differ else index.roll(rank, 0)
    with pytest.raises(RanksDisagreeError, match="same batch on every rank"):
        dispatch(torch.ones(len(index), 4), index, torch.ones(len(index), 2), 4, group)


@pytest.mark.parametrize("tokens_differ", [True, False])
def test_ranks_with_different_batches_are_told(on_ranks, tokens_differ):
    on_ranks(2, pass_different_batches, tokens_differ)


def shard_a_whole_weight(num_experts):
    group = remember_group(dist.group.WORLD)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    low, high = chunk_span(num_experts, ranks, rank)
    whole = torch.arange(num_experts * 3.0).reshape(num_experts, 3).requires_grad_()
    local = own_experts(whole, group)
    assert torch.equal(local, whole[low:high])
    (local * (rank + 1)).sum().backward()
    expected = torch.cat([torch.full((chunk_span(num_experts, ranks, r)[1] - chunk_span(num_experts, ranks, r)[0], 3),
                                     r + 1.0) for r in range(ranks)])
    assert torch.equal(whole.grad, expected)
    assert torch.equal(gather_experts(local, num_experts, group), whole)


@pytest.mark.parametrize("num_experts", [4, 5, 1])
def test_gradient_of_own_experts_is_whole_on_every_rank(on_ranks, num_experts):
    on_ranks(2, shard_a_whole_weight, num_experts)
