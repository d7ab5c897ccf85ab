"""Loops over experts that leave out those without a token, in the spellings that people write: with a mesh one graph
without a break, whatever this rank's batch leaves out, and as one process on the mean of the ranks' losses."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture, stats
from moebius.lowering.distribution import traffic

E, D, N, K, OUT = 4, 6, 5, 2, 3


class OfModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(D, N), nn.GELU(), nn.Linear(N, D)) for _ in range(E))

    def expert(self, number, x):
        return self.each[number](x)


class Normed(OfModules):
    """What is sent requires a gradient where the branch that makes it was taken."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), *each) for each in self.each)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * N, D) / 2), nn.Parameter(torch.randn(E, D, N) / 2)

    def expert(self, number, x):
        gate, up = nn.functional.linear(x, self.up[number]).chunk(2, -1)
        return nn.functional.linear(nn.functional.silu(gate) * up, self.down[number])


KINDS = {kind.__name__: kind for kind in (OfModules, Normed, Stacked)}


# Loops: tokens x, the experts of each, their weights.


def matrix(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        found = (index == e).nonzero()
        if found.numel() == 0:
            continue
        out.index_add_(0, found[:, 0], self.expert(e, x[found[:, 0]]) * weights[found[:, 0], found[:, 1]].unsqueeze(-1))
    return out


def length(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        found = (index == e).nonzero()
        if len(found) > 0:
            token, slot = found.unbind(1)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def columns(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = (index == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        out[token] += self.expert(e, x[token]) * weights[token, slot].unsqueeze(-1)
    return out


def any_of_mask(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        mask = index == e
        if mask.any():
            token, slot = torch.where(mask)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def sum_of_mask(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = (index == e).any(-1)
        if chosen.sum() == 0:
            continue
        out[chosen] += self.expert(e, x[chosen]) * (weights * (index == e)).sum(-1)[chosen].unsqueeze(-1)
    return out


def top_1(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        token = (index[:, 0] == e).nonzero().squeeze(-1)
        if token.shape[0] == 0:
            continue
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, 0].unsqueeze(-1))
    return out


def those_hit(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


# These are one operator on blocks of rows, which branches on this rank's data read.


def slots(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        slot = (index.reshape(-1) == e).nonzero().flatten()
        if slot.numel() == 0:
            continue
        out.index_add_(0, slot // K, self.expert(e, x[slot // K]) * weights.reshape(-1)[slot].unsqueeze(-1))
    return out


def written(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        token = (index[:, 0] == e).nonzero(as_tuple=True)[0]
        if token.numel() == 0:
            continue
        out[token] = self.expert(e, x[token]) * weights[token, 0].unsqueeze(-1)
    return out


def summed(self, x, index, weights):
    """Whose sum has no history where no expert has a row: nor has what the next layer sends."""
    out = torch.zeros_like(x)
    for e in range(E):
        slot = (index.reshape(-1) == e).nonzero().flatten()
        if len(slot) > 0:
            out = out.index_add(0, slot // K, self.expert(e, x[slot // K]) * weights.reshape(-1)[slot, None])
    return out


LOOPS = {loop.__name__: loop for loop in
         (matrix, length, columns, any_of_mask, sum_of_mask, top_1, those_hit, slots, written, summed)}


class Model(nn.Module):
    def __init__(self, loop, kind):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(D, E, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(KINDS[kind]() for _ in range(2))
        self.head, self.loop = nn.Linear(D, OUT), LOOPS[loop]

    def forward(self, x):
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, index = router(x).topk(K)
            y = self.loop(experts, x, index, weights.softmax(-1))
            x = y if self.loop is summed else x + y
        return self.head(x)


def step(model, optimizer, parts):
    optimizer.zero_grad()
    loss = 0
    for x, labels in parts:
        loss = loss + nn.functional.cross_entropy(model(x), labels, reduction="sum") / 8 / len(parts)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def train(loop, kind):
    """How far this rank comes from one process, its graph breaks, and whether rows travelled."""
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(loop, kind).double()
        both.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator, far = torch.Generator().manual_seed(1), 0.0
    traffic.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in ((6, 4), (4, 0), (1, 5), (0, 0)):
            parts = [(torch.randn(n, D, generator=generator, dtype=torch.float64),
                      torch.randint(OUT, (n,), generator=generator)) for n in sizes]
            norms = [run(*both[0], [parts[dist.get_rank()]]), step(*both[1], parts)]
            far = max(far, float((norms[0] - norms[1]).abs()))
            for mine, other in zip(*(model.parameters() for model, _ in both), strict=True):
                whole = getattr(mine, "full_tensor", mine.detach)()
                far = max(far, float((whole.detach() - other.detach()).abs().max()))
                assert (mine.grad is None) == (other.grad is None)
    return far, stats(run).breaks, bool(traffic.dispatch)


@pytest.mark.share(4)
@pytest.mark.parametrize("case", [(loop, kind) for loop in LOOPS for kind in KINDS], ids=", ".join)
def test_loop_is_in_the_graph_of_the_step(on_ranks, case):
    for far, breaks, travelled in on_ranks(2, train, *case):
        assert far < 1e-10
        assert breaks == 0
        assert travelled
