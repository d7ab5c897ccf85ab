"""Experts spread over real gloo processes compute what one process computes: output, every gradient, and the bytes."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moebius.kernels import experts
from moebius.lowering.distribution import RanksDisagreeError, RegionShape, bytes_for, traffic
from moebius.lowering.distribution.exchange import own_experts, pad_experts, reached_experts, remember_group
from moebius.lowering.distribution.expert_parallel import (
    combine,
    dispatch,
    start_combine,
    start_dispatch,
    wait_combine,
    wait_dispatch,
)
from moebius.lowering.planner.traffic import chunk_span

WIDTH, EXPERT_WIDTH = 6, 5


def spread(x, gate_up_L, down_L, index, weight, num_experts, group, chunks=1, **options):
    if chunks > 1:
        sent, coming = start_dispatch(x, index, weight, num_experts, group, "experts", 0, 0, False, chunks), []
        for chunk in range(chunks):
            x_RD, expert_R1, weight_R1, token_R = wait_dispatch(sent, chunk)
            y_RD = experts(x_RD, gate_up_L, down_L, expert_R1, weight_R1, **options)
            coming.append(start_combine(sent, chunk, y_RD, token_R))
        return wait_combine(sent, *coming)
    x_RD, expert_R1, weight_R1, *ticket = dispatch(x, index, weight, num_experts, group)
    return combine(experts(x_RD, gate_up_L, down_L, expert_R1, weight_R1, **options), *ticket)


def rows_between_ranks(indices, num_experts):
    """[from][to] counts of (token, rank) pairs, by plain Python: an independent account of what must travel."""
    ranks = len(indices)
    counts = [[0] * ranks for _ in range(ranks)]
    owner = {e: r for r in range(ranks) for e in range(*chunk_span(num_experts, ranks, r))}
    for source, index in enumerate(indices):
        for token in index:
            for to in {owner[e] for e in token if e in owner}:
                counts[source][to] += 1
    return counts


def check_layer(indices, top_k, num_experts, dtype, weighted, seed, chunks=1):
    """One layer, forward and backward, each rank with its own tokens, against the same operator on whole weights in
    this process: of this rank's tokens, and, for the weights' gradients, of all ranks' tokens."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = remember_group(dist.group.WORLD)
    generator = torch.Generator().manual_seed(seed)
    index = [torch.tensor(flat, dtype=torch.int64).reshape(-1, top_k) for flat in indices]

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    gate_up, down = draw(num_experts, 2 * EXPERT_WIDTH, WIDTH), draw(num_experts, WIDTH, EXPERT_WIDTH)
    x, weight = [draw(len(i), WIDTH) for i in index], [draw(len(i), top_k) for i in index]
    grad = [draw(len(i), WIDTH) for i in index]
    low, high = chunk_span(num_experts, ranks, rank)
    own = gate_up[low:high].clone(), down[low:high].clone()
    mine = x[rank].clone(), weight[rank].clone()
    for tensor in (gate_up, down, *x, *weight, *own, *mine):
        tensor.requires_grad_()

    expected = [
        experts(x[r], gate_up, down, index[r], weight[r] if weighted else None) for r in range(ranks)
    ]
    traffic.reset()
    found = spread(mine[0], *own, index[rank], mine[1] if weighted else None, num_experts, group, chunks)
    torch.autograd.backward(expected, grad)
    found.backward(grad[rank])

    close = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(found, expected[rank], **close)
    torch.testing.assert_close(mine[0].grad, x[rank].grad, **close)
    torch.testing.assert_close(own[0].grad, gate_up.grad[low:high], **close)
    torch.testing.assert_close(own[1].grad, down.grad[low:high], **close)
    if weighted:
        torch.testing.assert_close(mine[1].grad, weight[rank].grad, **close)

    counts = rows_between_ranks([i.tolist() for i in index], num_experts)
    sizes = gate_up.element_size(), weight[rank].element_size()
    shape = RegionShape(len(index[rank]), top_k, num_experts, WIDTH, *sizes, weighted=weighted)
    sent = sum(counts[rank]) - counts[rank][rank]
    received = sum(row[rank] for row in counts) - counts[rank][rank]
    predicted = bytes_for(shape, ranks, sent, received, headers=2)  # no graph has both forward and backward
    assert (traffic.header, traffic.dispatch, traffic.combine) == (
        predicted.header, predicted.dispatch, predicted.combine)


@st.composite
def routings(draw, ranks):
    num_experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, min(3, num_experts)))
    # -1 and num_experts are sentinels; a narrow range sends everything to one rank and nothing to another
    low = draw(st.integers(-1, num_experts))
    high = draw(st.integers(low, num_experts))
    tokens = [draw(st.integers(0, 9)) for _ in range(ranks)]
    indices = [draw(st.lists(st.integers(low, high), min_size=t * top_k, max_size=t * top_k)) for t in tokens]
    return indices, top_k, num_experts


@pytest.mark.parametrize("ranks", [2, 3])
def test_generated_routings_match_one_process(on_ranks, ranks):
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(routings(ranks), st.booleans(), st.integers(1, 4))
    def check(routing, weighted, chunks):
        indices, top_k, num_experts = routing
        on_ranks(ranks, check_layer, indices, top_k, num_experts, torch.float64, weighted, len(indices[0]), chunks)

    check()


@pytest.mark.parametrize(
    "index, other, num_experts",
    [
        ([[0, 1]] * 7, [[0, 1]] * 3, 4),  # every token to the first rank, none to the second
        ([[3, 2]] * 7, [[0, 1]] * 2, 4),  # each to the other
        ([[4, -1]] * 5, [], 4),  # sentinels only: nothing travels
        ([[0, 3]], [], 4),  # one token, and a rank without
        ([], [], 4),  # no token
        ([[0, 0], [1, 0], [2, 2]], [[1, 1]], 3),  # the same expert twice; ranks with two experts and one
        ([[0, 0]] * 4, [[0, 0]], 1),  # fewer experts than ranks
    ],
)
def test_corner_routings_match_one_process(on_ranks, index, other, num_experts):
    flat = [[e for row in rows for e in row] for rows in (index, other)]
    on_ranks(2, check_layer, flat, 2, num_experts, torch.float64, True, 1)


def test_bfloat16(on_ranks):
    on_ranks(2, check_layer, [[0, 1, 2, 3], [1, 2, 3, 0, 0, 3]], 2, 4, torch.bfloat16, True, 2)


def come_to_different_layers(what):
    group = remember_group(dist.group.WORLD)
    rank = dist.get_rank()
    index = torch.tensor([[0, 1], [2, 3], [1, 2]])[:, : 2 - rank * (what == "top-k")]
    num_experts = 4 + rank * (what == "experts")
    x = torch.ones(3, 4, dtype=torch.float64 if what == "dtype" and rank else None)
    x.requires_grad_(what == "gradients" and rank == 1)
    with pytest.raises(RanksDisagreeError, match="the same program"):
        if what == "whose experts are reached":
            reached_experts(index, 4 + rank, group)
        dispatch(x, index, None, num_experts, group, f"graph {rank * (what == 'graph')}")


@pytest.mark.parametrize(
    "what", ["top-k", "experts", "graph", "whose experts are reached", "dtype", "gradients"]
)
def test_ranks_at_different_layers_are_told(on_ranks, what):
    on_ranks(2, come_to_different_layers, what)


def go_back_in_another_order(alike):
    """Two exchanges of the same layer, with as many rows: nothing but their number tells one's backward from the
    other's."""
    group = remember_group(dist.group.WORLD)
    x = [torch.full((2, 3), 1.0 + number, requires_grad=True) for number in range(2)]
    index = torch.tensor([[0], [1]])
    out = []
    for x_TD in x:
        x_RD, _, _, *ticket = dispatch(x_TD, index, None, 2, group)
        out.append(combine(x_RD, *ticket))
    for number, out_TD in enumerate(out if alike or dist.get_rank() else out[::-1]):
        if alike:
            out_TD.sum().backward()
            assert torch.equal(x[number].grad, torch.ones(2, 3))
        else:
            with pytest.raises(RanksDisagreeError, match="which was exchange"):
                out_TD.sum().backward()
            return


@pytest.mark.parametrize("alike", [True, False])
def test_backward_passes_in_another_order_are_told(on_new_ranks, alike):
    on_new_ranks(2, go_back_in_another_order, alike)


def count_collectives(weighted):
    """The all-to-alls that this process sends in a layer's forward and backward, by torch's own account."""
    group = remember_group(dist.group.WORLD)
    x, weight = torch.randn(4, WIDTH, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    gate_up, down = torch.randn(1, 2 * EXPERT_WIDTH, WIDTH), torch.randn(1, WIDTH, EXPERT_WIDTH)
    index = torch.tensor([[0, 1]] * 4)
    counts, out = [], None
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if out is None:
                out = spread(x, gate_up, down, index, weight if weighted else None, 2, group)
            else:
                out.sum().backward()
        counts.append(sum(event.name.startswith("c10d::alltoall") for event in profile.events()))
    return counts


@pytest.mark.parametrize("weighted", [True, False])
def test_all_that_a_token_takes_along_travels_in_one_exchange(on_ranks, weighted):
    assert on_ranks(2, count_collectives, weighted) == [[3, 3]] * 2


def take_from_a_whole_weight(num_experts):
    group = remember_group(dist.group.WORLD)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    low, high = chunk_span(num_experts, ranks, rank)
    whole = torch.arange(num_experts * 3.0).reshape(num_experts, 3).requires_grad_()
    local = own_experts(whole, group)
    assert torch.equal(local, whole[low:high])
    (local * (rank + 1)).sum().backward()
    expected = torch.zeros_like(whole)
    expected[low:high] = rank + 1.0
    assert torch.equal(whole.grad, expected)
    assert torch.equal(pad_experts(local, num_experts, group)[low:high], local)


@pytest.mark.parametrize("num_experts", [4, 5, 1])
def test_gradient_of_own_experts_is_this_ranks_part(on_ranks, num_experts):
    on_ranks(2, take_from_a_whole_weight, num_experts)
