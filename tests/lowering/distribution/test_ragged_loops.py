"""Loops over experts that branch on data, or go by how many tokens each expert has, on ranks whose batches decide in
other ways: as one process on the mean of the ranks' losses."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from moebius import capture
from moebius.lowering.distribution import Sharded

E, D, N, K, OUT = 4, 6, 5, 2, 3


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class OfModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(Expert() for _ in range(E))

    def expert(self, number, x):
        return self.each[number](x)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, D, N) / 2), nn.Parameter(torch.randn(E, N, D) / 2)

    def expert(self, number, x):
        return nn.functional.silu(x @ self.up[number]) @ self.down[number]


class Adapters(Stacked):
    """Experts that are frozen, and two matrices beside each that are trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(E, D, 2) / 2), nn.Parameter(torch.randn(E, 2, D) / 2)

    def expert(self, number, x):
        return super().expert(number, x) + x @ self.a[number] @ self.b[number]


EXPERTS = {kind.__name__: kind for kind in (OfModules, Stacked, Adapters)}


# Loops: tokens x, the experts of each, their weights.


def empty_left_out(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def only_any(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(E):
        mask = index == e
        if mask.any():
            token = mask.any(-1)
            out[token] += self.expert(e, x[token]) * (weights * mask).sum(-1)[token, None]
    return out


def split_by_list(self, x, index, weights):
    order = index.reshape(-1).argsort(stable=True)
    parts = torch.split(x[order // K], torch.bincount(index.reshape(-1), minlength=E).tolist())
    y = torch.cat([self.expert(e, part) for e, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, order // K, y * weights.reshape(-1)[order, None])


def segments(self, x, index, weights):
    order, start, found = index.reshape(-1).argsort(stable=True), 0, []
    rows = x[order // K]
    for e, count in enumerate(torch.bincount(index.reshape(-1), minlength=E).tolist()):
        if count == 0:
            continue
        found.append(self.expert(e, rows[start : start + count]))
        start += count
    y = torch.cat(found) if found else rows
    return torch.zeros_like(x).index_add(0, order // K, y * weights.reshape(-1)[order, None])


def those_there(self, x, index, weights):
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def no_more_than(self, x, index, weights):
    """Some tokens are dropped, as one process drops them that has the ranks' batches one after the other."""
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        if len(token) > 2:
            token, slot = token[:2], slot[:2]
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


LOOPS = {loop.__name__: loop for loop in (
    empty_left_out, only_any, split_by_list, segments, those_there, no_more_than,
)}


class Layer(nn.Module):
    def __init__(self, loop, kind):
        super().__init__()
        self.router, self.experts, self.loop = nn.Linear(D, E, bias=False), EXPERTS[kind](), LOOPS[loop]
        self.router.requires_grad_(kind != "Adapters")

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        return x + self.loop(self.experts, x, index, weights)


class Model(nn.Module):
    """A layer of such a loop before one that is proved, and goes over the ranks; of adapters, which no rank shares, two
    of such loops: where no token comes to one, nothing leads to a parameter."""

    def __init__(self, loop, kind, way):
        super().__init__()
        self.layers = nn.ModuleList([Layer(loop, kind), Layer(loop if kind == "Adapters" else "split_by_list", kind)])
        self.head, self.way = nn.Linear(D, OUT).requires_grad_(kind != "Adapters"), way

    def forward(self, x):
        x = x.clone().requires_grad_()  # as where adapters alone are trained
        for layer in self.layers:
            checkpointed = self.way in ("checkpoint", "reentrant")
            x = checkpoint(layer, x, use_reentrant=self.way == "reentrant") if checkpointed else layer(x)
        return self.head(x)


def loss_of(model, part):
    return nn.functional.cross_entropy(model(part[0]), part[1], reduction="sum") / 8


def step(model, optimizer, parts):
    optimizer.zero_grad()
    loss = 0
    if model.way == "generator":  # a graph break in it does not go on where it was
        loss = sum(loss_of(model, part) / len(parts) for part in parts)
    else:
        for part in parts:
            loss = loss + loss_of(model, part) / len(parts)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def train(loop, kind, way):
    """How far this rank comes from one process, and where gradients are on one side alone."""
    both, norms = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(loop, kind, way).double()
        trained = [p for p in model.parameters() if p.requires_grad]
        both.append((model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator, far = torch.Generator().manual_seed(1), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in ((6, 4), (4, 0), (2, 5)):
            parts = [(torch.randn(n, D, generator=generator, dtype=torch.float64),
                      torch.randint(OUT, (n,), generator=generator)) for n in sizes]
            norms = [run(*both[0], [parts[dist.get_rank()]]), step(*both[1], parts)]
            far = max(far, float((norms[0] - norms[1]).abs()))
            for mine, other in zip(*(model.parameters() for model, _ in both), strict=True):
                far = max(far, float((whole(mine.detach()) - other.detach()).abs().max()))
                assert (mine.grad is None) == (other.grad is None) or not mine.requires_grad
    return far, [isinstance(p, Sharded) for p in both[0][0].parameters()]


WAYS = ("plain", "generator", "checkpoint", "reentrant")
CASES = [(loop, kind, way) for loop in LOOPS for kind in EXPERTS for way in WAYS]


@pytest.mark.share(2)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_ranks_whose_batches_decide_in_other_ways(on_ranks, case):
    for far, _ in on_ranks(2, train, *case):
        assert far < 1e-10
