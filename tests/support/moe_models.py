"""Small mixture-of-experts language models as people write them: how experts are kept, looped over and routed to, and
what else a model has, each with each. Tokens [rows, length] to logits [rows, length, V]."""
from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

V, E, D, N, K = 11, 4, 6, 5, 2
act = nn.functional.silu


# Experts: ``self.expert(e, x)`` is what expert e makes of rows x.


def matrices(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


class Stacked(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count, self.gate_up, self.down = count, matrices(count, 2 * N, D), matrices(count, D, N)

    def expert(self, e, x):
        gate, up = nn.functional.linear(x, self.gate_up[e]).chunk(2, dim=-1)
        return nn.functional.linear(act(gate) * up, self.down[e])


class Biased(Stacked):
    """gpt-oss's: interleaved gate and up, clamped, with biases."""

    def __init__(self, count):
        super().__init__(count)
        self.gate_up_bias, self.down_bias = matrices(count, 2 * N), matrices(count, D)

    def expert(self, e, x):
        h = x @ self.gate_up[e].mT + self.gate_up_bias[e]
        gate, up = h[..., ::2].clamp(max=2.0), h[..., 1::2].clamp(-2.0, 2.0)
        return ((up + 1) * gate * torch.sigmoid(gate * 1.7)) @ self.down[e].mT + self.down_bias[e]


class Viewed(nn.Module):
    """DBRX's: all experts in one matrix, of which each expert views its rows."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.w1, self.v1, self.w2 = (matrices(count * N, D) for _ in range(3))

    def of(self, weight, e):
        return weight.view(self.count, N, D)[e]

    def expert(self, e, x):
        return (act(x @ self.of(self.w1, e).t()) * (x @ self.of(self.v1, e).t())) @ self.of(self.w2, e)


class Chunks(Viewed):
    def of(self, weight, e):
        return weight.view(self.count, N, D).chunk(self.count)[e].squeeze(0)


class Transposed(nn.Module):
    """Two matrices, for rows from the left."""

    def __init__(self, count):
        super().__init__()
        self.count, self.up, self.down = count, matrices(count, D, N), matrices(count, N, D)

    def expert(self, e, x):
        return nn.functional.gelu(x @ self.up[e]) @ self.down[e]


class Modules(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(D, N), nn.SiLU(), nn.Linear(N, D)) for _ in range(count))

    def expert(self, e, x):
        return self.each[e](x)


class Named(Modules):
    """Mixtral's of transformers before 5, in a dictionary."""

    def __init__(self, count):
        super().__init__(count)
        self.each = nn.ModuleDict({
            f"expert_{e}": nn.ModuleDict({name: nn.Linear(D, N, bias=False) for name in ("w1", "w3")}
                                         | {"w2": nn.Linear(N, D, bias=False)}) for e in range(count)
        })

    def expert(self, e, x):
        one = self.each[f"expert_{e}"]
        return one["w2"](act(one["w1"](x)) * one["w3"](x))


class Adapted(Transposed):
    """Frozen experts, and two thin matrices beside each that are trained."""

    def __init__(self, count):
        super().__init__(count)
        self.requires_grad_(False)
        self.a, self.b = matrices(count, D, 2), matrices(count, 2, D)

    def expert(self, e, x):
        return super().expert(e, x) + x @ self.a[e] @ self.b[e] * 0.5


class LoRA(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x)) * 0.5


class AdaptedModules(Modules):
    def __init__(self, count):
        super().__init__(count)
        for one in self.each:
            one[0], one[2] = LoRA(one[0]), LoRA(one[2])


class Frozen(Stacked):
    def __init__(self, count):
        super().__init__(count)
        self.requires_grad_(False)


class HalfFrozen(Stacked):
    def __init__(self, count):
        super().__init__(count)
        self.down.requires_grad_(False)


EXPERTS = {kind.__name__: kind for kind in (
    Stacked, Biased, Viewed, Chunks, Transposed, Modules, Named, Adapted, AdaptedModules, Frozen, HalfFrozen)}


# Loops: rows x [T, D], the experts of each [T, k], their weights [T, k].


def hits(experts, x, index, weights):
    out, mask = torch.zeros_like(x), nn.functional.one_hot(index, experts.count).permute(2, 1, 0)
    for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = row[0] if isinstance(experts, Stacked | Transposed) else int(row[0])
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, experts.expert(e, x[token]) * weights[token, slot, None])
    return out


def all_of_them(experts, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(experts.count):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, experts.expert(e, x[token]) * weights[token, slot, None])
    return out


def empty_left_out(experts, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(experts.count):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        out[token] += experts.expert(e, x[token]) * weights[token, slot, None]
    return out


def masked(experts, x, index, weights):
    out = torch.zeros_like(x)
    for e in range(experts.count):
        chosen = (index == e).any(-1)
        share = (weights * (index == e)).sum(-1)
        out[chosen] = out[chosen] + experts.expert(e, x[chosen]) * share[chosen].unsqueeze(-1)
    return out


def dense(experts, x, index, weights):
    full = torch.zeros(len(x), experts.count, dtype=weights.dtype).scatter(1, index, weights)
    return sum(experts.expert(e, x) * full[:, e, None] for e in range(experts.count))


def repeated(experts, x, index, weights):
    """DeepSeek's and Qwen's while they train."""
    k, flat = index.shape[1], index.reshape(-1)
    rows = x.repeat_interleave(k, dim=0)
    y = torch.empty_like(rows)
    for e in range(experts.count):
        y[flat == e] = experts.expert(e, rows[flat == e]).to(y.dtype)
    return (y.view(*weights.shape, D) * weights.unsqueeze(-1)).sum(dim=1)


def segments(experts, x, index, weights):
    order = index.reshape(-1).argsort(stable=True)
    token, start, found = order // index.shape[1], 0, []
    rows = x[token]
    for e, count in enumerate(torch.bincount(index.reshape(-1), minlength=experts.count).tolist()):
        found.append(experts.expert(e, rows[start : start + count]))
        start += count
    return torch.zeros_like(x).index_add(0, token, torch.cat(found) * weights.reshape(-1)[order, None])


def those_there(experts, x, index, weights):
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, experts.expert(e, x[token]) * weights[token, slot, None])
    return out


def comprehended(experts, x, index, weights):
    """A list of what each expert makes of the tokens, of which each slot takes its own."""
    made = torch.stack([experts.expert(e, x) for e in range(experts.count)], 1)
    return (made.gather(1, index[..., None].expand(-1, -1, D)) * weights[..., None]).sum(1)


LOOPS = {loop.__name__: loop for loop in (
    hits, all_of_them, empty_left_out, masked, dense, repeated, segments, those_there, comprehended)}


# Routers: of scores [T, count] to the experts of each token and their weights; terms of the loss go to self.terms.


def plain(self, scores):
    weights, index = scores.softmax(-1).topk(K)
    return index, weights / weights.sum(-1, keepdim=True)


def softmax_of_top(self, scores):
    weights, index = scores.topk(K)
    return index, weights.softmax(-1)


def top1(self, scores):
    weight, index = scores.softmax(-1).max(-1, keepdim=True)
    return index, weight


def sigmoid_with_bias(self, scores):
    """DeepSeek-V3's: a bias that gradients do not train says where tokens go, not what they weigh."""
    chances = scores.sigmoid()
    index = (chances + self.bias).topk(K)[1]
    weights = chances.gather(1, index)
    if self.training:
        with torch.no_grad():
            self.counts += torch.bincount(index.reshape(-1), minlength=scores.shape[1])
    return index, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5


def in_groups(self, scores):
    """Experts of the better half alone."""
    chances = scores.softmax(-1)
    best = chances.view(len(chances), 2, scores.shape[1] // 2).amax(-1).argmax(-1, keepdim=True)
    mask = torch.zeros(len(chances), 2, dtype=chances.dtype).scatter_(1, best, 1.0)
    mask = mask.unsqueeze(-1).expand(-1, -1, scores.shape[1] // 2).reshape(scores.shape)
    weights, index = chances.masked_fill(mask == 0, 0.0).topk(K)
    return index, weights


def balanced(self, scores):
    """Switch's term for balance, of this call's tokens."""
    chances = scores.softmax(-1)
    weights, index = chances.topk(K)
    hit = nn.functional.one_hot(index, scores.shape[1]).to(chances.dtype).sum((0, 1))
    self.terms.append(0.05 * (hit * chances.sum(0)).sum() / 64)
    return index, weights


def with_z(self, scores):
    self.terms.append(1e-2 * scores.logsumexp(-1).square().sum() / 16)
    return plain(self, scores)


def capacity(self, scores):
    """Tokens that come late to an expert are dropped: their slots weigh nothing."""
    weights, index = scores.softmax(-1).topk(K)
    hit = nn.functional.one_hot(index, scores.shape[1])
    place = (hit.reshape(-1, scores.shape[1]).cumsum(0).view_as(hit) * hit).sum(-1)
    return index, weights * (place <= 3)


def noisy(self, scores):
    if self.training:
        scores = scores + torch.sin(scores * 37.0).detach() * 0.1
    return softmax_of_top(self, scores)


def threshold(self, scores):
    """So many experts as it takes: slots below weigh nothing."""
    weights, index = scores.softmax(-1).topk(K)
    return index, torch.where(weights > 0.3, weights, 0.0)


ROUTERS = {router.__name__: router for router in (
    plain, softmax_of_top, top1, sigmoid_with_bias, in_groups, balanced, with_z, capacity, noisy, threshold)}


class Block(nn.Module):
    def __init__(self, experts, loop, router, more, last):
        super().__init__()
        count = E + (2 if more == "another number" and last else more == "uneven")
        if router == "in_groups":
            count += count % 2
        self.norm, self.gate = nn.LayerNorm(D), nn.Linear(D, count, bias=False)
        self.experts, self.loop, self.route = EXPERTS[experts](count), LOOPS[loop], ROUTERS[router]
        self.more, self.terms = more, []
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("counts", torch.zeros(count))
        self.shared = nn.Linear(D, D) if more.startswith("shared") else None
        self.how_much = nn.Linear(D, 1) if more == "shared expert with a gate" else None

    def forward(self, x):
        h = self.norm(x).reshape(-1, D)
        index, weights = self.route(self, self.gate(h))
        mixed = self.loop(self.experts, h, index, weights)
        if self.shared is not None:
            made = self.shared(h).tanh()
            mixed = mixed + (made if self.how_much is None else self.how_much(h).sigmoid() * made)
        return x + mixed.view(x.shape)


class Model(nn.Module):
    def __init__(self, experts, loop, router, more):
        super().__init__()
        self.embed, self.head, self.more = nn.Embedding(V, D), nn.Linear(D, V, bias=False), more
        self.layers = nn.ModuleList(Block(experts, loop, router, more, last) for last in (False, True))
        if more == "tied":
            self.head.weight = self.embed.weight
        elif more == "experts shared by layers":
            self.layers[1].experts = self.layers[0].experts
        elif more == "frozen":
            self.embed.requires_grad_(False)
            self.layers[0].requires_grad_(False)
        elif more == "one layer without":
            self.layers[0] = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh())

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            if self.training and self.more in ("checkpoint", "reentrant"):
                x = checkpoint(layer, x, use_reentrant=self.more == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


MORE = ("nothing", "shared expert", "shared expert with a gate", "tied", "experts shared by layers", "frozen",
        "checkpoint", "reentrant", "uneven", "another number", "one layer without")


def loss_of(model, tokens):
    logits = model(tokens)[:, :-1]
    loss = nn.functional.cross_entropy(logits.reshape(-1, V), tokens[:, 1:].reshape(-1), reduction="sum") / 16
    for layer in model.layers:
        terms = getattr(layer, "terms", [])
        loss = loss + sum(terms)
        terms.clear()
    return loss
