"""The expert layer of the tests of checkpoints: a loop over the experts that were hit, as transformers writes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class HitExperts(nn.Module):
    """Four gated experts of width 8 in two parameters, two of them for each row."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=bias)
        self.gate_up = nn.Parameter(torch.randn(4, 24, 8) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 8, 12) * 0.2)

    def note(self, logits: torch.Tensor) -> None:
        """Told of the router's logits, for those who collect them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        self.note(logits)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            expert = hit[0]
            slot, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, slot, None])
        return out
