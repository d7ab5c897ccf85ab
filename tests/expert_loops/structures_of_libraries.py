"""More of structures.py: layers as libraries and models train them."""

from __future__ import annotations

import torch
from module_layers import MLP, SwiGLU
from spellings import CAPTURED, LOWERED, PROJECTED, D, E, K, N
from structures import Routed, structure
from torch import nn
from torch.nn.functional import gelu, one_hot, relu, silu, softmax


@structure(LOWERED)
class Minimind(Routed):
    """minimind: `y[flat == i] = expert(x[flat == i])` with rows and zeros of parameters without"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.view(-1)
        rows = x.repeat_interleave(K, dim=0)
        y = torch.empty_like(rows, dtype=rows.dtype)
        for i, expert in enumerate(self.experts):
            out = expert(rows[flat == i])
            if out.shape[0] > 0:
                y[flat == i] = out.to(y.dtype)
            else:
                y[flat == i] = out.to(y.dtype) + 0 * sum(p.sum() for p in expert.parameters())
        return (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


@structure(LOWERED)
class MinimindInfer(Routed):
    """minimind's evaluation: `cumsum` as numpy, `if start == end: continue`, `expert_out.mul_`, `scatter_add_`"""

    def forward(self, x):
        weight, index = self.route(x)
        flat, flat_w = index.view(-1), weight.view(-1, 1)
        cache = torch.zeros_like(x)
        idxs = flat.argsort()
        ends = flat.bincount().cpu().numpy().cumsum(0)
        token_idxs = idxs // K
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            own = token_idxs[start:end]
            out = self.experts[i](x[own]).to(cache.dtype)
            out.mul_(flat_w[idxs[start:end]])
            cache.scatter_add_(0, own.view(-1, 1).repeat(1, x.shape[-1]), out)
        return cache


@structure(LOWERED)
class DeepSeekMoeInfer(Routed):
    """DeepSeek-V2's moe_infer in training: `cnts.scatter_`, slices, `torch.cat`, `new_x[idxs] = outs`"""

    def forward(self, x):
        weight, index = self.route(x)
        cnts = index.new_zeros((index.shape[0], E))
        cnts.scatter_(1, index, 1)
        counts = cnts.sum(dim=0)
        idxs = index.view(-1).argsort()
        sorted_tokens = x[idxs // index.shape[1]]
        outputs, start = [], 0
        for i, n in enumerate(counts.cpu().numpy()):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (new_x.view(*index.shape, -1).type(weight.dtype).mul_(weight.unsqueeze(dim=-1)).sum(dim=1)).type(x.dtype)


@structure(LOWERED)
class StMoE(Routed):
    """ST-MoE: top-2 with a random second by probability over a threshold, capacity by exclusive cumsum"""

    def forward(self, x):
        gates = softmax(self.gate(x), -1)
        values, index = gates.topk(2, -1)
        values = values / values.sum(-1, keepdim=True)
        keep = torch.stack([torch.ones_like(values[:, 0], dtype=torch.bool), values[:, 1] > 0.3], 1)
        mask = one_hot(index, E) * keep[..., None]
        place = (mask.flatten(0, 1).cumsum(0) - 1).view(-1, 2, E)
        mask = mask * (place < 6)
        combine = (values[..., None] * mask).sum(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = (combine[:, e] > 0).nonzero()[:, 0]
            out[token] += expert(x[token]) * combine[token, e][:, None]
        return out


@structure(PROJECTED)
class FastMoe(nn.Module):
    """FastMoE: `MOEScatter` by index_select of sorted slots, `FMoELinear` over counts, bmm with the scores"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w1, self.b1 = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, N))
        self.w2, self.b2 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, D))

    def linear(self, x, counts, w, b):
        parts, start = [], 0
        for i in range(E):
            parts.append(x[start : start + counts[i]] @ w[i].t() + b[i])
            start += counts[i]
        return torch.cat(parts, 0)

    def forward(self, x):
        top, index = self.gate(x).topk(K, -1)
        score = softmax(top, -1)
        _, pos = torch.sort(index.view(-1))
        counts = torch.bincount(index.view(-1), minlength=E).tolist()
        rows = x.index_select(0, torch.div(pos, K, rounding_mode="floor"))
        y = self.linear(gelu(self.linear(rows, counts, self.w1, self.b1)), counts, self.w2, self.b2)
        back = torch.zeros(len(x) * K, D, dtype=x.dtype).index_copy(0, pos, y).view(-1, K, D)
        return torch.bmm(score.view(-1, 1, K), back).reshape(-1, D)


@structure(LOWERED)
class Megablocks(nn.Module):
    """MegaBlocks' dropless MLP as torch runs it: binned by sort, `grouped` by a loop over `cumsum`, scattered back"""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(E * N, D)), nn.Parameter(torch.randn(E * N, D))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weight, index = scores.topk(K, -1)
        top = index.flatten().int()
        bins, indices = torch.sort(top)
        per = torch.histc(top.double(), E, 0, E - 1).int()
        ends = torch.cumsum(per, 0)
        rows = x[indices // K]
        w1, w2 = self.w1.view(E, N, D), self.w2.view(E, N, D)
        out = torch.zeros_like(rows)
        start = 0
        for e, end in enumerate(ends.tolist()):
            out[start:end] = gelu(rows[start:end] @ w1[e].t(), approximate="tanh") @ w2[e]
            start = end
        back = torch.zeros_like(x)
        return back.index_add(0, indices // K, out * weight.flatten()[indices, None])


@structure(LOWERED)
class LlamaFour(nn.Module):
    """Llama 4: scores of the rest -inf, sigmoid, inputs repeated and scaled, one `bmm`, summed"""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.randn(E, D, 2 * N)), nn.Parameter(torch.randn(E, N, D))
        self.shared = SwiGLU()

    def forward(self, x):
        logits = self.router(x)
        top, index = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, index, top).transpose(0, 1)
        scores = torch.sigmoid(scores.float()).to(x.dtype)
        routed = x.repeat(E, 1) * scores.reshape(-1, 1)
        gate, up = torch.bmm(routed.view(E, -1, D), self.gate_up).chunk(2, dim=-1)
        out = torch.bmm(up * silu(gate), self.down).view(-1, D)
        return self.shared(x).add_(out.reshape(E, -1, D).sum(dim=0))


@structure(LOWERED)
class Mergekit(Routed):
    """a sparse upcycled Mixtral with the experts' outputs kept in a list and added by `torch.stack(...).sum(0)`"""

    def forward(self, x):
        weight, index = self.route(x)
        parts = []
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            part = torch.zeros_like(x)
            part[token] = expert(x[token]) * weight[token, slot].unsqueeze(-1)
            parts.append(part)
        return torch.stack(parts).sum(0)


@structure(LOWERED)
class Sinkhorn(Routed):
    """Megatron's sinkhorn top-1: routing by a balanced matrix without gradients, sigmoid weights"""

    def forward(self, x):
        logits = self.gate(x)
        with torch.no_grad():
            cost = torch.exp(logits.detach())
            d0 = torch.ones(cost.size(0), dtype=cost.dtype)
            for _ in range(3):
                d1 = (1 / cost.size(1)) / (cost.t() @ d0 + 1e-8)
                d0 = (1 / cost.size(0)) / (cost @ d1 + 1e-8)
            _, index = torch.topk(d1 * cost * d0.unsqueeze(1), k=1, dim=1)
        scores = torch.sigmoid(logits).gather(1, index)
        out = torch.empty_like(x)
        for e in range(E):
            local = (index[:, 0] == e).nonzero()
            rows = x[local, :]
            out[local, :] = self.experts[e](rows)
        return out * scores


@structure(LOWERED)
class TokensChoose(Routed):
    """a matrix of masks [E, T], `for i, m in enumerate(mask.unbind(0))`, `x[m]`, `out[m] += …`"""

    def forward(self, x):
        weight, index = self.route(x)
        dense = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        out = torch.zeros_like(x)
        for i, m in enumerate((dense > 0).t().unbind(0)):
            out[m] += self.experts[i](x[m]) * dense[m, i : i + 1]
        return out


@structure(LOWERED)
class FlatLoop(Routed):
    """one loop over slots and experts, `divmod`, `mask = index[:, k].eq(e)`, `torch.index_put`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for n in range(K * E):
            k, e = divmod(n, E)
            mask = index[:, k].eq(e)
            out = out.index_put((mask,), self.experts[e](x[mask]) * weight[mask, k].view(-1, 1), accumulate=True)
        return out


@structure(LOWERED)
class SwitchHf(Routed):
    """Switch in transformers: probs' max, a capacity mask by cumsum, `next_states[token] = expert(x[token])` onto x"""

    def forward(self, x):
        h = x.view(2, -1, D)
        probs = softmax(self.gate(h), -1)
        index = one_hot(probs.argmax(-1), E)
        index = index * (index.cumsum(-2) <= 3)
        value = probs.max(-1).values.unsqueeze(-1)
        next_states = h.clone()
        mask = index.bool()
        hit = mask.reshape(-1, E).sum(0).nonzero().squeeze(-1).tolist()
        for e in hit:
            next_states[mask[:, :, e]] = self.experts[e](h[mask[:, :, e]])
        return (next_states * value).view(-1, D)


@structure(PROJECTED)
class OneGelu(nn.Module):
    """experts of a single weight matrix each with a shared down: up per expert, `down` for all"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.ups, self.down = nn.ModuleList(nn.Linear(D, N) for _ in range(E)), nn.Linear(N, D)

    def forward(self, x):
        weight, index = softmax(self.gate(x), -1).topk(K, -1)
        out = torch.zeros_like(x)
        for e, up in enumerate(self.ups):
            token, slot = torch.where(index == e)
            out[token] += self.down(relu(up(x[token]))) * weight[token, slot, None]
        return out


@structure(LOWERED)
class TopP(Routed):
    """top-p routing: sorted probabilities kept up to a mass, scattered to a mask, dense gates"""

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        values, order = probs.sort(-1, descending=True)
        kept = values.cumsum(-1) - values < 0.6
        mask = torch.zeros_like(kept).scatter(1, order, kept)
        gates = probs * mask
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = mask[:, e].nonzero().squeeze(1)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * gates[token, e].unsqueeze(1))
        return out


@structure(LOWERED)
class ThreeWay(Routed):
    """experts chosen by comparing scores pairwise: `rank = (s[:, :, None] < s[:, None]).sum(-1)`, rank < K"""

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        rank = (probs[:, :, None] < probs[:, None, :]).sum(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            own = rank[:, e] < K
            out[own] = out[own] + expert(x[own]) * probs[own, e, None]
        return out


@structure(LOWERED)
class NestedLists(Routed):
    """index lists in a list of lists made with zip(*…), tensors stacked by `torch.cat` at the end, `index_add`"""

    def forward(self, x):
        weight, index = self.route(x)
        tokens, rows = zip(
            *(
                (token, expert(x[token]) * weight[token, slot, None])
                for expert, (token, slot) in zip(self.experts, (torch.where(index == e) for e in range(E)), strict=True)
            ),
            strict=True,
        )
        return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(rows))


@structure(LOWERED)
class Residual(Routed):
    """DeepSpeed's residual MoE: a coefficient softmaxed over the MLP and the experts"""

    def __init__(self):
        super().__init__()
        self.mlp, self.coefficient = MLP(), nn.Linear(D, 2)

    def forward(self, x):
        weight, index = softmax(self.gate(x), -1).max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = index.eq(e)
            if not mask.any():
                continue
            out[mask] = expert(x[mask]) * weight[mask].unsqueeze(-1)
        coefficient = softmax(self.coefficient(x), -1)
        return out * coefficient[:, 0:1] + self.mlp(x) * coefficient[:, 1:]


@structure(LOWERED)
class ReglU(nn.Module):
    """ReGLU experts with biases in ParameterLists, `addmm`"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        for name, shape in {"w": (D, N), "v": (D, N), "o": (N, D)}.items():
            setattr(self, name, nn.ParameterList(torch.randn(shape) for _ in range(E)))
        self.b = nn.ParameterList(torch.randn(N) for _ in range(E))

    def forward(self, x):
        weight, index = self.gate(x).sigmoid().topk(K, -1)
        out = x.new_zeros(x.shape)
        for e in range(E):
            token, slot = (index == e).nonzero().t()
            h = relu(torch.addmm(self.b[e], x[token], self.w[e])) * torch.mm(x[token], self.v[e])
            out.index_add_(0, token, torch.mm(h, self.o[e]).mul(weight[token, slot].unsqueeze(1)))
        return out


@structure(PROJECTED)
class LoraExperts(nn.Module):
    """LoRA experts on a frozen linear with dropout before: `base(x) + scale * b(a(drop(x)))`, routed by tokens"""

    def __init__(self):
        super().__init__()
        self.base, self.gate = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.ModuleList(nn.Linear(D, 2, bias=False) for _ in range(E))
        self.b = nn.ModuleList(nn.Linear(2, D, bias=False) for _ in range(E))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        out = self.base(x)
        weight, index = self.gate(x).softmax(-1).topk(K, -1)
        for e in range(E):
            token, slot = torch.where(index == e)
            out[token] += 2.0 * self.b[e](self.a[e](self.drop(x[token]))) * weight[token, slot, None]
        return out


@structure(LOWERED)
class SharedIsolated(Routed):
    """two shared experts as one wide, and the routed ones in a chained comprehension of `index_add`"""

    def __init__(self):
        super().__init__()
        self.shared = nn.ModuleList(SwiGLU() for _ in range(2))

    def forward(self, x):
        weight, index = self.route(x)
        out = sum(s(x) for s in self.shared)
        for e in range(E):
            hit = (index == e).nonzero(as_tuple=False)
            out = torch.index_add(out, 0, hit[:, 0], self.experts[e](x[hit[:, 0]]) * weight[hit[:, 0], hit[:, 1], None])
        return out


@structure(LOWERED)
class PermuteUnpermute(Routed):
    """Megatron's permute: `torch.argsort` of a transposed routing map's nonzero, `masked_select` of probabilities"""

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        top, index = probs.topk(K, -1)
        routing_map = torch.zeros_like(probs).int().scatter(1, index, 1).bool()
        probs = torch.zeros_like(probs).scatter(1, index, top)
        counts = routing_map.sum(0).tolist()
        tmap = routing_map.t().contiguous()
        token = torch.arange(len(x)).unsqueeze(0).expand(E, -1).masked_select(tmap)
        weight = probs.t().contiguous().masked_select(tmap)
        rows = x.index_select(0, token)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, rows.split(counts), strict=True)])
        out = torch.zeros_like(x)
        out.scatter_add_(0, token.unsqueeze(1).expand(-1, D), y * weight.unsqueeze(-1))
        return out


@structure(LOWERED)
class WhileCounter(Routed):
    """`while e < E:` with `if count == 0: e += 1; continue`"""

    def forward(self, x):
        weight, index = self.route(x)
        counts = index.flatten().bincount(minlength=E).tolist()
        out, e = torch.zeros_like(x), 0
        while e < E:
            if counts[e] == 0:
                e += 1
                continue
            token, slot = torch.where(index == e)
            out[token] += self.experts[e](x[token]) * weight[token, slot, None]
            e += 1
        return out


@structure(LOWERED)
class TernaryRows(Routed):
    """`y = expert(x[token]) if token.numel() else x[token]`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            y = expert(x[token]) if token.numel() else x[token]
            out = out.index_add(0, token, y * weight[token, slot, None])
        return out


@structure(LOWERED)
class TryRows(Routed):
    """an expert's forward with a guard: `if x.shape[0] == 0: return x`"""

    class Guarded(SwiGLU):
        def forward(self, x):
            if x.shape[0] == 0:
                return x
            return super().forward(x)

    kind = Guarded

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out


@structure(LOWERED)
class MultipliedInPlace(Routed):
    """`y = expert(x[token]); y.mul_(weight)`, `y *= …` in place, no branch"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            y = expert(x[token])
            y.mul_(weight[token, slot, None])
            out.index_add_(0, token, y)
        return out


@structure(LOWERED)
class BiasInPlace(nn.Module):
    """`h = x[token] @ w1[e]; h += b1[e]; h = silu(h)`, the same behind, `if token.numel() == 0: continue`"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.w1, self.b1 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, N))
        self.w2, self.b2 = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.numel() == 0:
                continue
            h = x[token] @ self.w1[e]
            h += self.b1[e]
            y = silu(h) @ self.w2[e]
            y += self.b2[e]
            out.index_add_(0, token, y * weight[token, slot, None])
        return out


@structure(LOWERED)
class MakeMoE(Routed):
    """makeMoE: a mask of [B, T], flat for what is read, as it is for what is written"""

    kind = MLP

    def forward(self, x):
        x = x[None]
        scores, index = self.gate(x), self.gate(x).topk(K, -1).indices
        gates = softmax(torch.full_like(scores, float("-inf")).scatter(-1, index, scores.gather(-1, index)), -1)
        out, rows, flat = torch.zeros_like(x), x.view(-1, D), gates.view(-1, E)
        for i, expert in enumerate(self.experts):
            mask = (index == i).any(dim=-1)
            chosen = mask.view(-1)
            if chosen.any():
                out[mask] += (expert(rows[chosen]) * flat[chosen, i].unsqueeze(1)).squeeze(1)
        return out[0]


@structure(CAPTURED)
class OneRowOrMore(Routed):
    """an expert's only row goes another way than many do: `elif len(token) == 1`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            if len(token) == 0:
                continue
            if len(token) == 1:
                out[token[0]] += expert(x[token[0]]) * weight[token[0], slot[0]]
            else:
                out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out
