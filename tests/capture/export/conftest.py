"""A small MoE training step, and its file."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebius import capture


class Experts(nn.Module):
    """A mixture of experts, written as a plain loop."""

    def __init__(self, width: int = 12, experts: int = 4, hidden: int = 16):
        super().__init__()
        self.experts = experts
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * hidden, width) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_TD):
        self.calls += 1
        weight, chosen = self.router(self.norm(x_TD)).softmax(-1).topk(2)
        mask = F.one_hot(chosen, self.experts).permute(2, 1, 0)
        out = torch.zeros_like(x_TD)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[expert])
            gate, up = (x_TD[token] @ self.gate_up[expert].T).chunk(2, -1)
            out.index_add_(0, token, F.silu(gate) * up @ self.down[expert].T * weight[token, slot, None])
        return x_TD + out


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 12), Experts(), nn.Linear(12, 20))


def make_training(kind=torch.optim.AdamW):
    """(model, optimizer, scheduler, step) of a training run."""
    model = make_model()
    optimizer = kind(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def step(model, optimizer, scheduler, tokens, labels):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return model, optimizer, scheduler, step


def batch(size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 20, (size,), generator=generator), torch.randint(0, 20, (size,), generator=generator)


@pytest.fixture(scope="session")
def training_file(tmp_path_factory):
    """(path, the live captured run: model, optimizer, scheduler, captured step) after a few steps."""
    model, optimizer, scheduler, step = make_training()
    captured = capture(step)
    for i, size in enumerate((30, 33, 36, 31)):
        captured(model, optimizer, scheduler, *batch(size, i))
    path = tmp_path_factory.mktemp("export") / "step.moebius"
    captured.export(path)
    return path


@pytest.fixture(scope="session")
def forward_file(tmp_path_factory):
    """A forward pass of fixed sizes: a small file."""

    def forward(x_TD, scale):
        return {"y": (x_TD @ weight).relu() * scale, "sizes": [x_TD.shape[0], (x_TD.sum(), None)]}

    weight = torch.linspace(-1, 1, 12).reshape(4, 3)
    captured = capture(forward)
    captured(torch.ones(5, 4), 2.0)
    path = tmp_path_factory.mktemp("export") / "forward.moebius"
    captured.export(path)
    return path
