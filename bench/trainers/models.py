# mypy: ignore-errors
"""Models of the gallery, small: layers with experts as public repositories write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Swiglu(nn.Module):
    """One expert, as Mixtral, minimind and DeepSeek have it."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtralExperts(nn.Module):
    """One-hot mask, one turn for each expert, ``index_add_``."""

    def __init__(self, width=32, inner=48, experts=4, top_k=2):
        super().__init__()
        self.top_k, self.n = top_k, experts
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Swiglu(width, inner) for _ in range(experts))

    def forward(self, hidden):
        b, s, d = hidden.shape
        x = hidden.reshape(-1, d)
        weight, chosen = F.softmax(self.gate(x), dim=1, dtype=torch.float).topk(self.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, self.n).permute(2, 1, 0)
        for e in range(self.n):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[None, token].reshape(-1, d)) * weight[token, slot, None])
        return out.view(b, s, d)


class MinimindExperts(nn.Module):
    """``if mask.any()``, else a sum of nothing that keeps the gradients."""

    def __init__(self, width=32, inner=48, experts=4, top_k=2):
        super().__init__()
        self.top_k, self.n, self.aux_loss = top_k, experts, torch.zeros(())
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Swiglu(width, inner) for _ in range(experts))

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        scores = F.softmax(self.gate(x), dim=-1)
        weight, chosen = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                token = mask.any(dim=-1).nonzero().flatten()
                y.index_add_(0, token, (expert(x[token]) * weight[mask].view(-1, 1)).to(y.dtype))
            elif self.training:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        load = F.one_hot(chosen, self.n).float().mean(0).sum(0)
        self.aux_loss = (load * scores.mean(0)).sum() * self.n * 0.01
        return y.view(shape)


class SwitchExperts(nn.Module):
    """The best expert alone, with a capacity: what does not fit passes by."""

    def __init__(self, width=32, inner=48, experts=4, factor=1.5):
        super().__init__()
        self.n, self.factor = experts, factor
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width)) for _ in range(experts)
        )

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        prob, route = self.router(x).softmax(-1).max(-1)
        capacity = int(self.factor * len(x) / self.n)
        out = x.clone()
        for i in range(self.n):
            index = torch.eq(route, i).nonzero(as_tuple=True)[0][:capacity]
            out[index] = self.experts[i](x[index]) * prob[index, None]
        return out.view_as(hidden)


class DeepseekExperts(nn.Module):
    """Shared experts beside the chosen ones, a bias on the scores that balances the load."""

    def __init__(self, width=32, inner=32, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Parameter(torch.randn(experts, width) * 0.1)
        self.register_buffer("bias", torch.zeros(experts))
        self.experts = nn.ModuleList(Swiglu(width, inner) for _ in range(experts))
        self.shared = Swiglu(width, inner)

    def forward(self, hidden):
        x = hidden.view(-1, hidden.shape[-1])
        scores = F.linear(x, self.gate).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1)[1]
        weight = scores.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            y[token] += expert(x[token]) * weight[token, slot, None]
        if self.training:
            with torch.no_grad():
                self.bias += 1e-3 * torch.sign(counts.float().mean() - counts.float())
        return (y + self.shared(x)).view_as(hidden)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ffn: nn.Module, causal: bool = True):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.ffn = Attention(width, heads, causal), ffn

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.ffn(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT with experts in each block: logits, and the loss where there are targets."""

    def __init__(self, ffn=MixtralExperts, words=40, width=32, heads=4, layers=2, context=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads, ffn(width)) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        b, t = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class SoftExperts(nn.Module):
    """MMoE's: all experts for all rows, a gate for each task."""

    def __init__(self, width: int, inner: int, experts: int, tasks: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, inner), nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return [(gate(x).softmax(-1).unsqueeze(-1) * outputs).sum(1) for gate in self.gates]
