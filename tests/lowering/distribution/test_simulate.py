"""Many ranks in one process, on torch's LocalTensorMode: the same operators give what one rank alone computes."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moebius.kernels import experts
from moebius.lowering.distribution import RanksDisagreeError, RegionShape, expected_bytes, traffic
from moebius.lowering.distribution.exchange import remember_group
from moebius.lowering.distribution.expert_parallel import combine, dispatch
from moebius.lowering.planner.traffic import chunk_span

D, N = 6, 5


@pytest.fixture
def simulated_ranks():
    """ranks -> the name of a group of so many simulated ranks."""

    def start(ranks):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        return remember_group(dist.group.WORLD)

    yield start
    dist.destroy_process_group()


def replicate(tensor, ranks):
    return LocalTensor({rank: tensor.detach().clone() for rank in range(ranks)}).requires_grad_(tensor.requires_grad)


def split(tensor, ranks):
    rows = [slice(*chunk_span(tensor.shape[0], ranks, rank)) for rank in range(ranks)]
    pieces = {rank: tensor.detach()[rows[rank]].clone() for rank in range(ranks)}
    return LocalTensor(pieces).requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize("ranks, tokens, num_experts, top_k", [(4, 11, 8, 2), (5, 9, 7, 3), (16, 70, 32, 4)])
def test_ranks_in_one_process(simulated_ranks, ranks, tokens, num_experts, top_k):
    torch.manual_seed(0)
    group = simulated_ranks(ranks)
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    gate_up = torch.randn(num_experts, 2 * N, D, dtype=torch.float64, requires_grad=True)
    down = torch.randn(num_experts, D, N, dtype=torch.float64, requires_grad=True)
    weight, index = torch.randn(tokens, num_experts, dtype=torch.float64).softmax(-1).topk(top_k)
    weight.requires_grad_()
    expected = experts(x, gate_up, down, index, weight)
    expected.sin().sum().backward()

    traffic.reset()
    with LocalTensorMode(ranks):
        whole = x, weight, gate_up, down
        mine = [split(tensor, ranks) for tensor in whole]
        ours = dispatch(mine[0], split(index, ranks), mine[1], num_experts, group)
        x_RD, expert_R1, weight_R1, *ticket = ours
        out = combine(experts(x_RD, mine[2], mine[3], expert_R1, weight_R1), *ticket)
        out.sin().sum().backward()
        for found, theirs in ((out, expected), *((m.grad, w.grad) for m, w in zip(mine, whole, strict=True))):
            for rank in range(ranks):
                low, high = chunk_span(len(theirs), ranks, rank)
                torch.testing.assert_close(found._local_tensors[rank], theirs[low:high], rtol=1e-12, atol=1e-12)
    shape = RegionShape(-(-tokens // ranks), top_k, num_experts, D, 8, 8)
    assert traffic.total / ranks == pytest.approx(expected_bytes(shape, ranks).total, rel=0.25)


def test_ranks_that_disagree(simulated_ranks):
    group = simulated_ranks(3)
    index = {rank: torch.zeros(1, 1 + int(rank == 1), dtype=torch.int64) for rank in range(3)}
    with LocalTensorMode(3), pytest.raises(RanksDisagreeError):
        dispatch(replicate(torch.ones(1, D), 3), LocalTensor(index), None, 4, group)
