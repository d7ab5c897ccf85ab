"""The expert layer of the tests of ranks: a Python loop over the experts that were hit, as people write it."""
from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """E gated experts of width N in two stacked parameters, for tokens of width D."""

    def __init__(self, E, D, N):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * N, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(E, D, N) / N**0.5)

    def mix(self, x, index, weights):
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = nn.functional.one_hot(index, num_classes=len(self.gate_up)).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for row in hit:
            expert = row[0]
            slot, token = torch.where(mask[expert])
            gate, up = nn.functional.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            current = nn.functional.linear(nn.functional.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, (current * weights[token, slot, None]).to(out.dtype))
        return out

    def forward(self, x, index, weights):
        return self.mix(x, index, weights)


class Layer(Experts):
    """The same with a router, which sends each token to K of them."""

    def __init__(self, E=4, D=8, N=6, K=2):
        super().__init__(E, D, N)
        self.router, self.K = nn.Linear(D, E), K

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(self.K)
        return x + self.mix(x, index, weights)
