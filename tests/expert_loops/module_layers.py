"""The layer that spellings with modules or parameters of each expert's own take: a :class:`Layer` beside x [T, D]."""

from __future__ import annotations

import torch
from spellings import D, E, K, N, Spelling
from torch import nn
from torch.nn.functional import softmax

MODULES: dict[str, Spelling] = {}


class SwiGLU(nn.Module):
    """w2(silu(w1(x)) * w3(x)), as Mixtral names them."""

    def __init__(self, bias=False):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, N, bias=bias), nn.Linear(D, N, bias=bias)
        self.w2 = nn.Linear(N, D, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class MLP(nn.Module):
    """fc2(gelu(fc1(x))), with biases."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, N), nn.GELU(), nn.Linear(N, D))

    def forward(self, x):
        return self.net(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    """Everything that the spellings use; each uses a part of it, and the rest gets no gradients."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(E))
        self.biased = nn.ModuleList(SwiGLU(bias=True) for _ in range(E))
        self.mlps = nn.ModuleList(MLP() for _ in range(E))
        self.named = nn.ModuleDict({f"expert_{e}": SwiGLU() for e in range(E)})
        self.shared = SwiGLU()
        self.norm = Norm()
        self.norms = nn.ModuleList(Norm() for _ in range(E))
        self.up = nn.ParameterList(torch.randn(2 * N, D) for _ in range(E))
        self.down = nn.ParameterList(torch.randn(D, N) for _ in range(E))
        self.w1 = nn.Parameter(torch.randn(E, D, N))
        self.w3 = nn.Parameter(torch.randn(E, D, N))
        self.w2 = nn.Parameter(torch.randn(E, N, D))
        self.b1 = nn.Parameter(torch.randn(E, N))
        self.b2 = nn.Parameter(torch.randn(E, D))
        self.num_experts, self.top_k, self.capacity = E, K, 4

    def route(self, x):
        weight, index = torch.topk(softmax(self.gate(x), dim=-1), self.top_k, dim=-1)
        return weight / weight.sum(-1, keepdim=True), index


def spelled(outcome: str):
    def add(function):
        MODULES[function.__name__] = Spelling(function, outcome)
        return function

    return add


def over_range(x, moe, expert):
    """The loop of spellings of which only the expert is of interest: `expert(rows, e)` on its rows, weighted."""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], e) * weight[token, slot, None])
    return out
