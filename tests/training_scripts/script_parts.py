"""Models that the generated training scripts train, and builders of what is around them. The scripts import this."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, CLASSES = 8, 5


class Stacked(nn.Module):
    """Experts in stacked weights, a loop over those that were hit."""

    def __init__(self, experts=4, narrow=6, top_k=2):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * narrow, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, narrow) * 0.3)
        self.top_k = top_k
        self.aux = None

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.topk(self.top_k, -1)
        mask = functional.one_hot(chosen, self.router.out_features).permute(2, 1, 0)
        self.aux = (probabilities.mean(0) * mask.float().mean((1, 2))).sum()
        out = torch.zeros_like(x)
        for expert in mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[expert])
            gate, up = functional.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            y = functional.linear(functional.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, y * weight[token, slot, None])
        return out


class Listed(nn.Module):
    """Experts as modules of their own: a batch may leave one without gradients."""

    def __init__(self, experts=3, top_k=1):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)) for _ in range(experts)
        )
        self.top_k = top_k
        self.aux = None

    def forward(self, x):
        logits = self.router(x)
        weight, chosen = logits.softmax(-1).topk(self.top_k, -1)
        self.aux = logits.logsumexp(-1).pow(2).mean()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out[token] += expert(x[token]) * weight[token, slot, None]
        return out


class Dense(nn.Module):
    """No experts: two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.aux = torch.zeros(())

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks with a norm before each. tied: the first one is there twice."""

    def __init__(self, blocks, norm, dropout, tied):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for make in blocks)
        self.norm = norm()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.blocks.append(self.blocks[0])

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        for block in self.blocks:
            x = x + self.dropout(block(self.norm(x)))
        return self.head(x)

    def aux_loss(self):
        return sum(block.aux for block in self.blocks)


def decayed(model):
    """Two groups, as people split them: matrices decay, vectors do not."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def head_first(model):
    """Two groups with learning rates of their own."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return [{"params": model.head.parameters(), "lr": 0.02}, {"params": rest}]
