"""A GPT with experts in the manner of nanoGPT: one file, gradient accumulation, a cosine schedule written by hand.

The step takes several micro-batches, adds up their gradients and updates once; moebius captures all of it as one graph.

    python examples/train_nanogpt.py --steps 20            # captured
    python examples/train_nanogpt.py --steps 20 --compare  # and plain PyTorch beside it, from the same seed
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass

import torch
from stdlib_text import batches
from torch import nn
from torch.nn import functional as F

from moebius import capture, stats
from moebius.report.records import Stats


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    n_expert: int = 8
    top_k: int = 2


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head = config.n_head

    def forward(self, x_BTC):
        B, T, C = x_BTC.shape
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x_BTC).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Expert(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.c_gate = nn.Linear(config.n_embd, 2 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x_SC):
        return self.c_proj(F.silu(self.c_gate(x_SC)) * self.c_fc(x_SC))


class MoE(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.router = nn.Linear(config.n_embd, config.n_expert, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.n_expert))
        self.top_k = config.top_k

    def forward(self, x_BTC):
        x_NC = x_BTC.view(-1, x_BTC.size(-1))
        weight_NK, chosen_NK = self.router(x_NC).softmax(-1).topk(self.top_k)
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        out_NC = torch.zeros_like(x_NC)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_NK == e)
            out_NC.index_add_(0, token, expert(x_NC[token]) * weight_NK[token, slot, None])
        return out_NC.view_as(x_BTC)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = CausalSelfAttention(config), MoE(config)

    def forward(self, x_BTC):
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        return x_BTC + self.mlp(self.ln_2(x_BTC))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, idx, targets):
        x_BTC = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x_BTC = block(x_BTC)
        logits = self.lm_head(self.ln_f(x_BTC))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it: int, steps: int, top: float = 3e-4, bottom: float = 3e-5, warmup: int = 4) -> float:
    """Linear warm-up, then cosine decay, as in nanoGPT."""
    if it < warmup:
        return top * (it + 1) / (warmup + 1)
    ratio = min(1.0, (it - warmup) / max(1, steps - warmup))
    return bottom + 0.5 * (1 + math.cos(math.pi * ratio)) * (top - bottom)


def train_step(model, optimizer, micro_batches):
    """Forward and backward for each micro-batch, then one update."""
    total = 0.0
    for idx, targets in micro_batches:
        loss = model(idx, targets) / len(micro_batches)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def train(steps: int, accumulate: int, captured: bool, seed: int = 0) -> tuple[list[float], Stats | None]:
    """(losses, statistics of the capture) of a run from scratch. What was captured lives as long as its model."""
    step = capture(train_step) if captured else train_step
    torch.manual_seed(seed)
    config = GPTConfig()
    model = GPT(config).train()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    data = batches(4, config.block_size, seed)
    losses = []
    for it in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it, steps)
        losses.append(step(model, optimizer, [next(data) for _ in range(accumulate)]).item())
    return losses, stats(step) if captured else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--compare", action="store_true", help="train plain PyTorch as well")
    args = parser.parse_args()
    losses, seen = train(args.steps, args.accumulate, captured=True)
    result = {"captured": losses}
    if args.compare:
        result["plain"], _ = train(args.steps, args.accumulate, captured=False)
    assert seen is not None
    print(json.dumps({**result, "graphs": seen.graphs, "breaks": seen.breaks, "recompiles": len(seen.recompiles)}))


if __name__ == "__main__":
    main()
