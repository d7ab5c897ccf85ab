"""A captured training step on ranks that have batches of their own: nothing of the model or the step says so, and it
trains as one process does on the mean of the ranks' losses."""
from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.kernels.native import panel_work
from moebius.lowering.distribution import Bytes, RegionShape, Sharded, Traffic, bytes_for, traffic
from moebius.lowering.planner.traffic import chunk_span, reduced_bytes

E, D, N, K = 5, 12, 7, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.norm = nn.LayerNorm(D)
        self.experts = Experts(E, D, N)

    def forward(self, x):
        h = self.norm(x)
        weights, index = torch.topk(self.router(h).softmax(-1), K)
        return x + self.experts(h, index, weights / weights.sum(-1, keepdim=True))


def step(model, optimizer, scheduler, batches):
    """One process: the mean of the losses on the ranks' batches. A rank has a list of its one batch."""
    optimizer.zero_grad()
    loss = sum((model(batch) ** 2).mean() for batch in batches) / len(batches)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    return loss.detach(), norm


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)


def rows_between_ranks(indices, num_experts):
    """[from][to] counts of (token, rank) pairs."""
    ranks = len(indices)
    owner = {e: r for r in range(ranks) for e in range(*chunk_span(num_experts, ranks, r))}
    went = [[{owner[e] for e in token} for token in index] for index in indices]
    return [[sum(to in token for token in index) for to in range(ranks)] for index in went]


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def same(ours, theirs):
    torch.testing.assert_close(whole(ours).detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


def mean_over_ranks(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def train(sizes, tokens):
    """20 steps, beside one process. tokens: of each rank, in turn."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plain, spread = build(), build()
    captured = capture(step, mesh=mesh_of(*sizes))
    for number in range(20):
        counts = [tokens[(number // 3 + i) % len(tokens)] for i in range(ranks)]
        batches = [torch.randn(count, D, generator=generator, dtype=torch.float64) for count in counts]
        loss, norm = captured(*spread, [batches[rank]])
        expected, expected_norm = step(*plain, batches)
        same(mean_over_ranks(loss), expected)
        same(norm, expected_norm)
        assert type(norm) is torch.Tensor
    for mine, theirs in zip(spread[0].parameters(), plain[0].parameters(), strict=True):
        same(mine, theirs)
        same(mine.grad, theirs.grad)
        for name, value in plain[1].state[theirs].items():
            same(spread[1].state[mine][name], value)
    return check_layout(spread), stats(captured).breaks, stats(captured).misses


def check_layout(training):
    """Experts, and all that belongs to them, take this rank's part of the memory."""
    model, optimizer, _ = training
    sharded = [(name, p) for name, p in model.named_parameters() if isinstance(p, Sharded)]
    for _, parameter in sharded:
        axis = parameter.shards.device_mesh.ndim - 1
        mesh = parameter.shards.device_mesh
        low, high = chunk_span(E, mesh.size(axis), mesh.get_local_rank(axis))
        for tensor in (parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]):
            assert tensor.untyped_storage().nbytes() == parameter.numel() // E * (high - low) * 8
    return [name for name, _ in sharded]


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "sizes, tokens", [((2,), [9, 30, 1]), ((4,), [5, 8]), ((2, 2), [12]), ((2, 2), [9, 3, 14, 1, 6])]
)
def test_trains_as_one_process_on_the_joined_batch(on_ranks, sizes, tokens):
    ranks = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    for names, breaks, misses in on_ranks(ranks, train, sizes, tokens):
        assert names == [f"{layer}.experts.{name}" for layer in (0, 2) for name in ("gate_up", "down")]
        assert breaks == 0 and misses < 20


def operations(run, *args):
    """Of a warm step's products, by torch's profiler: experts', and all others. (FlopCounterMode sets hooks on modules:
    another capture. Of products that C calls the profiler sees nothing.)"""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True)
    with mock.patch.object(panel_work, "MULTIPLIED", {}), profiler as profile:
        run(*args)
    found = {True: 0, False: 0}
    for event in profile.events():
        if event.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            around = event
            while around is not None and not around.name.startswith("moebius::experts"):
                around = around.cpu_parent
            found[around is not None] += event.flops
    return found[True], found[False]


def count(sizes):
    """What one warm step sends and multiplies on this rank, and what it should."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    experts_ranks = sizes[-1]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, D, generator=generator, dtype=torch.float64) for _ in range(ranks)]
    plain, alone, spread = build(), build(), build()
    captured, in_one = capture(step, mesh=mesh_of(*sizes)), capture(step)
    for _ in range(3):
        captured(*spread, [batches[rank]])
        in_one(*alone, [torch.cat(batches)])
        step(*plain, [torch.cat(batches)])
    traffic.reset()
    captured(*spread, [batches[rank]])
    sent = Traffic(**{field.name: getattr(traffic, field.name) for field in dataclasses.fields(Traffic)})
    ours, theirs = operations(captured, *spread, [batches[rank]]), operations(in_one, *alone, [torch.cat(batches)])
    shares = [mine / whole for mine, whole in zip(ours, theirs, strict=True)]

    routings = []
    for layer in (plain[0][0], plain[0][2]):
        layer.experts.register_forward_pre_hook(lambda module, args: routings.append(args[1].tolist()))
    first = rank - rank % experts_ranks
    for batch in batches[first : first + experts_ranks]:
        plain[0](batch)
    expected = Bytes(0, 0, 0)
    for layer in range(2):
        counts = rows_between_ranks(routings[layer::2], E)
        me = rank - first
        shape = RegionShape(16, K, E, D, 8, 8)
        leave = sum(counts[me]) - counts[me][me]
        arrive = sum(row[me] for row in counts) - counts[me][me]
        expected += bytes_for(shape, experts_ranks, leave, arrive)
    dense = sum(p.nbytes for p in spread[0].parameters() if not isinstance(p, Sharded))
    experts = sum(p.local.nbytes for p in spread[0].parameters() if isinstance(p, Sharded))
    reduced = sum(reduced_bytes(dense, size) for size in sizes) + sum(reduced_bytes(experts, n) for n in sizes[:-1])
    # the ranks ask one another whether all are at the end of backward, and at the norms of the gradients
    ends = 2 * sum(16 * (size - 1) for size in sizes)
    ends += 16 * (ranks - 1) if len(sizes) > 1 else 0  # and all of them, over several axes, before weights are written
    found = sent.dispatch, sent.combine, sent.reduce, sent.header
    return found, (expected.dispatch, expected.combine, reduced, expected.header + ends), shares


@pytest.mark.share(1)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_what_a_step_sends_and_computes(on_ranks, sizes):
    ranks = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    results = on_ranks(ranks, count, sizes)
    for found, expected, (_, dense) in results:
        assert found == expected
        assert 0 < dense <= 1.1 / ranks
    assert sum(experts for _, _, (experts, _) in results) == pytest.approx(1)
