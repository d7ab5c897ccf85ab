"""A graph break between backward() and the optimizer: the optimizer's graph, with clipping in it, works on this rank's
rows of the experts. Nothing is gathered, and it trains as one process does."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from rank_layers import Layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moebius
from moebius import capture, stats
from moebius.lowering.distribution import Sharded

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adam, one by one": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=False, amsgrad=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
}


@moebius.disable
def look():
    """A graph break."""


def step(model, optimizer, batches, clip):
    optimizer.zero_grad()
    loss = sum((model(batch) ** 2).mean() for batch in batches) / len(batches)
    loss.backward()
    look()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def beside_one_process(name, clip):
    """What the last step gathered, and how many graph breaks there were."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
        pairs.append((model, OPTIMIZERS[name](model.parameters())))
    (plain, _), (spread, _) = pairs
    captured = capture(step, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batches = [torch.randn(9, 8, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            captured(*pairs[1], [batches[rank]], clip)
        step(*pairs[0], batches, clip)
    for mine, theirs in zip(spread.parameters(), plain.parameters(), strict=True):
        full = mine.full_tensor() if isinstance(mine, Sharded) else mine
        torch.testing.assert_close(full, theirs, rtol=1e-10, atol=1e-10)
    assert isinstance(spread[0].down, Sharded)
    collectives = [event.name for event in profile.events() if event.name.startswith("c10d::")]
    assert collectives.count("c10d::allreduce_") == 1 + clip  # of gradients, and of the norms of all experts together
    return [one for one in collectives if "gather" in one], stats(captured).breaks


@pytest.mark.share(3)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_graph_gathers_nothing(on_ranks, name, clip):
    assert on_ranks(2, beside_one_process, name, clip) == [([], 1)] * 2
