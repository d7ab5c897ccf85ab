"""What tests of gradients share: layers whose gradients take every way that there is, and what is kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def tanh_net() -> nn.Sequential:
    """A net with a second derivative."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class FusedExperts(nn.Module):
    """Four experts in two parameters; how: the way that the loop is written ("hits", "range", "dense", "product")."""

    def __init__(self, how: str = "hits"):
        super().__init__()
        self.how, self.router = how, nn.Linear(4, 4, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.rand(4, 12, 4)), nn.Parameter(torch.rand(4, 4, 6))

    def expert(self, rows: torch.Tensor, e: Any) -> torch.Tensor:
        gate, up = (rows @ self.gate_up[e].T).chunk(2, -1)
        return (F.silu(gate) * up) @ self.down[e].T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.router(x).softmax(-1)
        weight, chosen = p.topk(2)
        dense = torch.zeros_like(p).scatter(1, chosen, weight)
        if self.how == "dense":
            return sum(self.expert(x, e) * dense[:, e : e + 1] for e in range(4))
        if self.how == "product":
            gate, up = torch.einsum("td,ehd->eth", x, self.gate_up).chunk(2, -1)
            return torch.einsum("eth,edh,te->td", F.silu(gate) * up, self.down, dense)
        out, mask = torch.zeros_like(x), F.one_hot(chosen, 4).permute(2, 1, 0)
        for e in range(4) if self.how == "range" else mask.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.expert(x[token], e) * weight[token, slot, None])
        return out


def kept(function: Callable[..., Any], *args: Any) -> int:
    """How many numbers autograd keeps of a call for backward, one tensor as often as it is kept."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        function(*args)
    return sum(sizes)
