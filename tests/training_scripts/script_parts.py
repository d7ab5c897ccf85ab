"""Models that the generated training scripts train, and builders of what is around them. The scripts import this."""

from __future__ import annotations

from collections import defaultdict, deque

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


class WithLoss(torch.autograd.Function):
    """How DeepSeek's modelling code gives a loss to the router: the tokens pass, the loss gets a gradient of one."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype, ctx.wanted = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=ctx.dtype) if ctx.wanted else None


class Balanced(nn.Module):
    """Sigmoid scores, a bias that chooses and does not weigh, loads that a buffer counts, and a shared expert."""

    def __init__(self, experts=4, narrow=6, top_k=2):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, narrow, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, narrow) * 0.3)
        self.shared = nn.Sequential(nn.Linear(WIDTH, narrow), nn.SiLU(), nn.Linear(narrow, WIDTH))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.top_k = top_k
        self.aux = 0.0

    def forward(self, x):
        scores = self.router(x.float()).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, -1, sorted=False).indices
        weight = scores.gather(-1, chosen)
        weight = (weight / (weight.sum(-1, keepdim=True) + 1e-9)).to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.up))
        if self.training:
            with torch.no_grad():
                self.load += counts
        y = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            rows = token[start : start + count]
            inner = functional.silu(x[rows] @ self.up[expert].T) @ self.down[expert].T
            y.index_add_(0, rows, (inner * weight.flatten()[order[start : start + count], None]).to(y.dtype))
            start += count
        balance = (scores.mean(0) * counts / counts.sum()).sum()
        return WithLoss.apply(y + self.shared(x), 0.01 * balance)

    @torch.no_grad()
    def rebalance(self, rate=0.01):
        self.bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Dropping(nn.Module):
    """Top-1 with a capacity: tokens beyond it are dropped. Router noise while training."""

    def __init__(self, experts=3, narrow=6, capacity=1.25):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, narrow), nn.ReLU(), nn.Linear(narrow, WIDTH)) for _ in range(experts)
        )
        self.capacity = capacity
        self.aux = None

    def forward(self, x):
        noisy = x * torch.empty_like(x).uniform_(0.9, 1.1) if self.training else x
        probabilities = self.router(noisy).softmax(-1)
        gate, chosen = probabilities.max(-1)
        mask = functional.one_hot(chosen, len(self.experts))
        room = max(1, int(self.capacity * x.shape[0] / len(self.experts)))
        place = (mask.cumsum(0) - 1) * mask
        kept = (place < room) & mask.bool()
        self.aux = (mask.float().mean(0) * probabilities.mean(0)).sum() * len(self.experts)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = kept[:, i].nonzero().squeeze(-1)
            out[rows] = (expert(x[rows]) * gate[rows, None]).to(out.dtype)
        return out


class Attention(nn.Module):
    """The batch as one sequence; causal. No bias: a key's has no gradient but noise, which Adagrad makes large."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.aux = 0.0

    def forward(self, x):
        q, k, v = (part.view(1, -1, self.heads, WIDTH // self.heads).transpose(1, 2) for part in
                   self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


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


class Meter:
    """What a training loop keeps of its losses: a smoothed one, the last few, and how many there were."""

    def __init__(self, beta=0.9):
        self.beta, self.count, self.smooth = beta, 0, None
        self.last = deque(maxlen=3)
        self.by_kind = defaultdict(list)

    @property
    def corrected(self):
        return None if self.smooth is None else self.smooth / (1 - self.beta**self.count)

    def update(self, value, **kinds):
        self.count += 1
        self.smooth = (1 - self.beta) * value + (self.beta * self.smooth if self.smooth is not None else 0.0)
        self.last.append(value)
        for kind, one in kinds.items():
            self.by_kind[kind].append(one)


def rebalance(model):
    for module in model.modules():
        if isinstance(module, Balanced):
            module.rebalance()


def by_hand(params, lr=0.05):
    """An optimizer's step without an optimizer."""
    with torch.no_grad():
        for p in params:
            if p.grad is not None:
                p -= lr * p.grad


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
