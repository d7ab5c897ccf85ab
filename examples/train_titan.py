"""Training in the manner of torchtitan: a job config, a model in plain PyTorch, a trainer with the step as a method.

    python examples/train_titan.py --training.steps 20            # captured
    python examples/train_titan.py --training.steps 20 --compare  # and plain PyTorch beside it, from the same seed
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any

import torch
from stdlib_text import batches
from torch import nn
from torch.nn import functional as F

from moebius import capture, stats


@dataclass
class ModelArgs:
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocab_size: int = 256
    rope_theta: float = 10000.0
    moe_hidden: int = 96
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 1


@dataclass
class Training:
    local_batch_size: int = 4
    seq_len: int = 64
    steps: int = 20
    max_norm: float = 1.0
    seed: int = 0


@dataclass
class JobConfig:
    model: ModelArgs = field(default_factory=ModelArgs)
    training: Training = field(default_factory=Training)
    lr: float = 8e-4
    warmup_steps: int = 2


def rotary(dim: int, length: int, theta: float) -> torch.Tensor:
    """cos and sin of the angles, float32 [2, length, dim / 2]."""
    angles = torch.outer(torch.arange(length).float(), 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BLHD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    first, second = x_BLHD.chunk(2, dim=-1)
    cos, sin = (part[None, : x_BLHD.shape[1], None] for part in rope)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x_BLD, rope):
        B, L, _ = x_BLD.shape
        q = rotate(self.wq(x_BLD).view(B, L, self.n_heads, self.head_dim), rope).transpose(1, 2)
        k = rotate(self.wk(x_BLD).view(B, L, self.n_kv_heads, self.head_dim), rope).transpose(1, 2)
        v = self.wv(x_BLD).view(B, L, self.n_kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(B, L, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    """Grouped weights, a loop over the experts that were hit, and a shared expert beside them."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        E, D, M = args.num_experts, args.dim, args.moe_hidden
        self.num_experts, self.top_k = E, args.top_k
        self.gate = nn.Linear(D, E, bias=False)
        self.w13 = nn.Parameter(torch.empty(E, 2 * M, D).normal_(std=0.02))
        self.w2 = nn.Parameter(torch.empty(E, D, M).normal_(std=0.02))
        self.shared_experts = FeedForward(D, M * args.num_shared_experts)
        self.tokens_per_expert: torch.Tensor
        self.register_buffer("tokens_per_expert", torch.zeros(E))

    def forward(self, x_BLD):
        x_TD = x_BLD.view(-1, x_BLD.shape[-1])
        score_TE = F.softmax(self.gate(x_TD), dim=-1)
        weight_TK, index_TK = torch.topk(score_TE, self.top_k, dim=-1)
        mask_EKT = F.one_hot(index_TK, self.num_experts).permute(2, 1, 0)
        with torch.no_grad():
            self.tokens_per_expert += mask_EKT.sum((1, 2))
        routed_TD = torch.zeros_like(x_TD)
        for expert in mask_EKT.sum((1, 2)).nonzero()[:, 0]:
            slot, token = torch.where(mask_EKT[expert])
            h1, h3 = F.linear(x_TD[token], self.w13[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(h1) * h3, self.w2[expert])
            routed_TD.index_add_(0, token, out * weight_TK[token, slot, None])
        return (routed_TD + self.shared_experts(x_TD)).view_as(x_BLD)


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.attention, self.moe = Attention(args), MoE(args)

    def forward(self, x_BLD, rope):
        h_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope)
        return h_BLD + self.moe(self.ffn_norm(h_BLD))


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs, length: int):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(args) for i in range(args.n_layers)})
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.register_buffer("rope", rotary(args.dim // args.n_heads, length, args.rope_theta), persistent=False)

    def forward(self, tokens):
        h_BLD = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, self.rope)
        return self.output(self.norm(h_BLD))


class Trainer:
    """Owns the model, the optimizer, the schedule and the data; ``train_step`` is one step."""

    def __init__(self, config: JobConfig):
        self.config = config
        torch.manual_seed(config.training.seed)
        self.model = Transformer(config.model, config.training.seq_len).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.schedule)
        self.data = batches(config.training.local_batch_size, config.training.seq_len, config.training.seed)

    def schedule(self, step: int) -> float:
        """Linear warm-up, then linear decay."""
        warmup, steps = self.config.warmup_steps, self.config.training.steps
        return (step + 1) / warmup if step < warmup else max(0.1, (steps - step) / max(1, steps - warmup))

    def loss_fn(self, pred, labels):
        return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))

    def forward_backward_step(self, tokens, labels):
        loss = self.loss_fn(self.model(tokens), labels)
        loss.backward()
        return loss

    def train_step(self, tokens, labels):
        self.optimizer.zero_grad()
        loss = self.forward_backward_step(tokens, labels)
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.max_norm)
        self.optimizer.step()
        return loss.detach(), grad_norm

    def train(self, captured: bool) -> tuple[list[float], Any]:
        """(losses, statistics of the capture). The schedule is stepped outside of the step, where its Python runs."""
        step = capture(self.train_step) if captured else self.train_step
        losses = []
        for _ in range(self.config.training.steps):
            loss, _norm = step(*next(self.data))
            self.lr_scheduler.step()
            losses.append(loss.item())
        return losses, stats(step) if captured else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training.steps", dest="steps", type=int, default=20)
    parser.add_argument("--compare", action="store_true", help="train plain PyTorch as well")
    args = parser.parse_args()
    config = JobConfig(training=Training(steps=args.steps))
    losses, seen = Trainer(config).train(captured=True)
    result = {"captured": losses}
    if args.compare:
        result["plain"], _ = Trainer(config).train(captured=False)
    print(json.dumps({**result, "graphs": seen.graphs, "breaks": seen.breaks, "recompiles": len(seen.recompiles)}))


if __name__ == "__main__":
    main()
