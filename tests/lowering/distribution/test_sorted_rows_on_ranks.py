"""Layers that sort rows by expert and project all of them, as torchtitan and transformers have them: the
tokens travel, and training on ranks with batches of their own is that of one process on the mean of their losses."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import grouped_mm, silu

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.distribution import traffic

D, N, E, K = 16, 8, 4, 2
SIZES = ((6, 4), (4, 0), (6, 4), (1, 5), (0, 0))


def split_at(w1, w2, w3, rows, counts):
    """torchtitan's experts without grouped products: a loop over pieces, and rows behind them."""
    counts = counts.tolist()
    found = []
    for e, part in enumerate(torch.split(rows[: sum(counts)], counts)):
        found.append((silu(part @ w1[e].T) * (part @ w3[e].T)) @ w2[e].T)
    y = torch.cat(found)
    return torch.vstack((y, y.new_zeros((len(rows) - sum(counts), D))))


def grouped(w1, w2, w3, rows, counts):
    """torchtitan's with them, and transformers'."""
    ends = counts.cumsum(0, dtype=torch.int32)
    h = silu(grouped_mm(rows, w1.mT, offs=ends)) * grouped_mm(rows, w3.mT, offs=ends)
    return grouped_mm(h, w2.mT, offs=ends)


PROJECTED = {one.__name__: one for one in (split_at, grouped)}
SCORED = ("before", "after", "in a product")  # when rows are scaled with their scores


class Layer(nn.Module):
    def __init__(self, how, scored):
        super().__init__()
        self.router, self.shared = nn.Linear(D, E, bias=False), nn.Linear(D, D)
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, N, D) / 2) for _ in range(2))
        self.w2, self.how, self.scored = nn.Parameter(torch.randn(E, D, N) / 2), PROJECTED[how], scored

    def forward(self, x):
        scores, index = self.router(x).softmax(-1).topk(K)
        counts = torch.histc(index.flatten().double(), E, 0, E - 1).long()
        order = index.flatten().argsort(stable=True)
        rows, score = x[order // K], scores.flatten()[order, None]
        y = self.how(self.w1, self.w2, self.w3, rows * score if self.scored == "before" else rows, counts)
        if self.scored == "in a product":
            back = torch.zeros_like(y).index_copy(0, order, y).view(-1, K, D)
            return self.shared(x) + torch.bmm(scores.unsqueeze(1), back).squeeze(1)
        return self.shared(x).index_add(0, order // K, y * score if self.scored == "after" else y)


def step(model, optimizer, parts):
    optimizer.zero_grad()
    loss = 0
    for x in parts:
        loss = loss + model(x).tanh().square().sum() / len(parts)
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(tensor):
    return getattr(tensor, "full_tensor", tensor.detach)().detach()


def train(how, scored):
    dtype = torch.float32 if how == "grouped" else torch.float64  # (which torch's grouped products have not)
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(how, scored), Layer(how, scored)).to(dtype)
        both.append((model, torch.optim.SGD(model.parameters(), lr=1e-2)))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator, near = torch.Generator().manual_seed(1), 1e-4 if dtype == torch.float32 else 1e-10
    traffic.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in SIZES:
            parts = [torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype) for rows in sizes]
            run(*both[0], [parts[dist.get_rank()]])
            step(*both[1], parts)
            for mine, other in zip(both[0][0].parameters(), both[1][0].parameters(), strict=True):
                torch.testing.assert_close(whole(mine), other.detach(), rtol=near, atol=near)
                assert (mine.grad is None) == (other.grad is None)
    report = report_of(captured_of(run))
    return len(report.breaks), [one.refusal for one in report.expert_regions if not one.lowered], bool(traffic.dispatch)


@pytest.mark.share(3)
@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("how", PROJECTED)
def test_tokens_travel_and_training_is_that_of_one_process(on_ranks, how, scored):
    assert on_ranks(2, train, how, scored) == [(0, [], True)] * 2
