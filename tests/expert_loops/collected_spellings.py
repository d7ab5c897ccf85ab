"""More expert layers of module_spellings.py, after layers of repositories that no test had named: what each of them
does, in words of our own."""

from __future__ import annotations

import published_spellings  # noqa: F401 (these come first)
import torch
from module_layers import spelled
from spellings import LOWERED, D, E, K
from torch.nn.functional import one_hot


@spelled(LOWERED)
def one_or_those_so_far(x, moe):
    """top-1 on all tokens, `out = torch.where(index == i, expert(x) * weight, out)`"""
    weight, index = moe.gate(x).softmax(-1).max(-1, keepdim=True)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        out = torch.where(index == i, expert(x) * weight, out)
    return out


@spelled(LOWERED)
def one_or_those_so_far_by_slot(x, moe):
    """for each slot: `y = torch.where((index[..., k] == i).unsqueeze(-1), expert(x), y)`, weighted, of [B, T, D]"""
    x = x.view(2, -1, D)
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        y = torch.zeros_like(x)
        for i, expert in enumerate(moe.experts):
            y = torch.where((index[..., k] == i).unsqueeze(-1), expert(x), y)
        out = out + y * weight[..., k : k + 1]
    return out.view(-1, D)


@spelled(LOWERED)
def above_the_kth(x, moe):
    """gates by a threshold, ties and all: `probs * (probs >= probs.topk(K).values[:, -1:])`"""
    probs = moe.gate(x).softmax(-1)
    gates = probs * (probs >= probs.topk(K, -1).values[:, -1:])
    return sum(gates[:, e : e + 1] * expert(x) for e, expert in enumerate(moe.experts))


@spelled(LOWERED)
def below_the_kth(x, moe):
    """`logits.masked_fill(logits < kth, -inf).softmax(-1)` of [B, T, E], all experts on all tokens"""
    x = x.view(2, -1, D)
    logits = moe.gate(x)
    gates = logits.masked_fill(logits < logits.topk(K, -1).values[..., -1:], float("-inf")).softmax(-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        out = out + gates[..., e].unsqueeze(-1) * expert(x)
    return out.view(-1, D)


@spelled(LOWERED)
def relu_gates(x, moe):
    """gates that are relu of the logits (ReMoE), all experts on all tokens"""
    gates = torch.relu(moe.gate(x))
    return torch.einsum("te,ted->td", gates, torch.stack([expert(x) for expert in moe.experts], 1))


@spelled(LOWERED)
def zeros_for_each_expert(x, moe):
    """`y = torch.zeros_like(x); y[mask] = expert(x[mask]); out += y * gates[:, i : i + 1]`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = (index == i).any(-1)
        y = torch.zeros_like(x)
        y[mask] = expert(x[mask])
        out += y * gates[:, i : i + 1]
    return out


@spelled(LOWERED)
def copied_into_zeros(x, moe):
    """`out = out + torch.zeros_like(x).index_copy(0, token, rows)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out = out + torch.zeros_like(x).index_copy(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def masked_select_and_scatter(x, moe):
    """top-1, `rows = x.masked_select(mask).view(-1, D)`, `out = out.masked_scatter(mask, expert(rows))`"""
    weight, index = moe.gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = (index == i)[:, None].expand_as(x)
        out = out.masked_scatter(mask, expert(x.masked_select(mask).view(-1, D)))
    return out * weight[:, None]


@spelled(LOWERED)
def all_of_the_hits(x, moe):
    """`for row in torch.greater(mask.sum((-1, -2)), 0).nonzero()[:]` (gpt-oss as it is trained)"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter_(1, index, weight)
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = one_hot(index, E).permute(2, 1, 0)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    for row in hit[:]:
        e = row[0]
        with torch.no_grad():
            _, token = torch.where(mask[e])
        y = torch.relu(x[token] @ moe.w1[e] + moe.b1[e]) @ moe.w2[e] + moe.b2[e]
        out.index_add_(0, token, y * gates[token, e, None])
    return out


@spelled(LOWERED)
def best_tokens_of_each_sequence(x, moe):
    """expert choice within a sequence: `x.gather(1, best)`, `out.scatter_add(1, best, …)` of [B, T, D]"""
    x = x.view(2, -1, D)
    score, best = moe.gate(x).softmax(-1).transpose(1, 2).topk(2, -1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = best[:, e].unsqueeze(-1).expand(-1, -1, D)
        out = out.scatter_add(1, token, expert(x.gather(1, token)) * score[:, e].unsqueeze(-1))
    return out.view(-1, D)


@spelled(LOWERED)
def counted_masks_of_sequences(x, moe):
    """masks [B, T], `if mask.sum() == 0: continue`, `out[mask] += …`"""
    x = x.view(2, -1, D)
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = (index == e).any(-1)
        if mask.sum() == 0:
            continue
        out[mask] += expert(x[mask]) * (weight * (index == e)).sum(-1)[mask].unsqueeze(-1)
    return out.view(-1, D)


@spelled(LOWERED)
def the_only_one(x, moe):
    """top-1, `torch.stack(…, 1).gather(1, index.view(-1, 1, 1).expand(-1, 1, D)).squeeze(1) * weight[:, None]`"""
    weight, index = moe.gate(x).softmax(-1).max(-1)
    y = torch.stack([expert(x) for expert in moe.experts], 1)
    return y.gather(1, index.view(-1, 1, 1).expand(-1, 1, D)).squeeze(1) * weight[:, None]


@spelled(LOWERED)
def the_only_one_by_numbers(x, moe):
    """for each slot: `torch.stack([expert(x) for …])[index[:, k], torch.arange(T)] * weight[:, k, None]`"""
    weight, index = moe.route(x)
    y = torch.stack([expert(x) for expert in moe.experts])
    return sum(weight[:, k, None] * y[index[:, k], torch.arange(len(x))] for k in range(K))


@spelled(LOWERED)
def masked_inputs(x, moe):
    """all experts on all tokens, `out = out + expert(x * mask) * gate`, the mask of those that chose the expert"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = (index == e).any(-1, keepdim=True).to(x.dtype)
        out = out + expert(x * mask) * (weight * (index == e)).sum(-1, keepdim=True)
    return out


@spelled(LOWERED)
def selected_numbers(x, moe):
    """top-1 with a capacity: `token = torch.arange(T).masked_select(index == e)[:capacity]`, `index_copy`"""
    weight, index = moe.gate(x).softmax(-1).max(-1)
    tokens, out = torch.arange(len(x)), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = tokens.masked_select(index == e)[: moe.capacity]
        out = out.index_copy(0, token, expert(x[token]) * weight[token, None])
    return out
