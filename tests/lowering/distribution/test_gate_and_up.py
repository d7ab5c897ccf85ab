"""Experts with a parameter for the gate and one for what it gates, which one product of all experts takes together:
both are split over the ranks, or neither is."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from moebius import capture, stats
from moebius.lowering.distribution import Sharded

E, D, N, K = 5, 8, 6, 2
NAMES = ("gate", "up", "down")
WAYS = {  # the parameters that are split
    "plain": NAMES, "a frozen gate": NAMES, "cast": NAMES, "transposed": NAMES, "up is read besides": ("down",),
    "gate is the same in both layers": NAMES, "two calls": NAMES,
}


class Layer(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.router, self.way = nn.Linear(D, E), way
        shape = (E, D, N) if way == "transposed" else (E, N, D)
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(each) / 3) for each in (shape, shape, (E, D, N)))
        self.gate.requires_grad_(way != "a frozen gate")

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        gate, up = (p.transpose(1, 2) if self.way == "transposed" else p for p in (self.gate, self.up))
        gate, up, down = (p.double() if self.way == "cast" else p for p in (gate, up, self.down))
        out, mask = torch.zeros_like(x), functional.one_hot(index, E).permute(2, 1, 0)
        for e in mask.sum((1, 2)).nonzero().flatten():
            slot, token = torch.where(mask[e])
            rows = x[token]
            rows = functional.silu(functional.linear(rows, gate[e])) * functional.linear(rows, up[e])
            out.index_add_(0, token, functional.linear(rows, down[e]) * weights[token, slot, None])
        return x + out


def step(model, optimizer, batches):
    optimizer.zero_grad()
    loss = sum(model(x).square().mean() for x in batches) / len(batches)
    if model[0].way == "up is read besides":
        loss = loss + model[0].up.square().sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), norm


def build(way):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(way), nn.Tanh(), Layer(way)).double()
    if way == "gate is the same in both layers":
        model[2].gate = model[0].gate
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(way, sizes):
    """The parameters of the first layer that are split; all are compared with one process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    (model, optimizer), (plain, theirs) = build(way), build(way)
    run = capture(step, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :]))
    generator = torch.Generator().manual_seed(1)
    for number in range(6):
        batches = [torch.randn(3 + (number + i) % 3, D, generator=generator, dtype=torch.float64) for i in range(ranks)]
        mine = batches[rank : rank + 1]
        loss, norm = run(model, optimizer, [*mine, mine[0] / 2] if way == "two calls" else mine)
        expected = step(plain, theirs, [*batches, *(x / 2 for x in batches)] if way == "two calls" else batches)
        dist.all_reduce(loss)
        same(loss / ranks, expected[0])
        same(norm, expected[1])
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine, other)
        for key, value in theirs.state[other].items():
            same(optimizer.state[mine][key], value)
    assert stats(run).breaks == 0
    return [name for name in NAMES if isinstance(getattr(model[0], name), Sharded)]


def same(ours, theirs):
    whole = ours.full_tensor() if isinstance(ours, Sharded) else ours
    torch.testing.assert_close(whole.detach(), theirs.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.share(2)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("way", WAYS)
def test_both_are_split_or_neither(on_ranks, way, sizes):
    found = on_ranks(2 ** len(sizes), train, way, sizes)
    print(way, found[0])
    assert all(each == [*WAYS[way]] for each in found)
