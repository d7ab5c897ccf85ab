"""Expert layers with modules of their own, after the structure of public models and libraries (named in each
docstring), in words of our own. Each takes x [T, D]; the outcomes are those of spellings.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from module_layers import MLP, SwiGLU
from spellings import LOWERED, D, E, K, N
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import gelu, one_hot, relu, silu, softmax


@dataclass
class Structure:
    layer: type
    outcome: str

    @property
    def says(self) -> str:
        return self.layer.__doc__


STRUCTURES: dict[str, Structure] = {}


def structure(outcome: str):
    def add(layer):
        STRUCTURES[layer.__name__] = Structure(layer, outcome)
        return layer

    return add


class Routed(nn.Module):
    """What most of them have: a gate and SwiGLU experts."""

    kind = SwiGLU

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(self.kind() for _ in range(E))

    def route(self, x):
        weight, index = softmax(self.gate(x), -1).topk(K, -1)
        return weight / weight.sum(-1, keepdim=True), index


@structure(LOWERED)
class DeepSeekV3(Routed):
    """DeepSeek-V3: sigmoid scores, a bias for the choice alone, groups left out with -inf, weights scaled"""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(E))
        self.shared = SwiGLU()

    def forward(self, x):
        scores = torch.sigmoid(F.linear(x, self.gate.weight))
        original = scores
        scores = scores + self.bias
        scores = scores.view(x.size(0), 2, -1)
        group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
        indices = group_scores.topk(1, dim=-1)[1]
        mask = scores.new_ones(x.size(0), 2, dtype=bool).scatter_(1, indices, False)
        scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = torch.topk(scores, K, dim=-1)[1]
        weights = original.gather(1, indices)
        weights = weights / weights.sum(dim=-1, keepdim=True) * 2.5
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=E).tolist()
        for i in range(E):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y + self.shared(x)


@structure(LOWERED)
class Qwen2(Routed):
    """Qwen2-MoE: experts hit, `index_add_`, a shared expert with a sigmoid gate"""

    def __init__(self):
        super().__init__()
        self.shared_expert, self.shared_gate = SwiGLU(), nn.Linear(D, 1, bias=False)

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit:
            layer = self.experts[expert_idx]
            idx, top_x = torch.where(mask[expert_idx].squeeze(0))
            state = x[None, top_x].reshape(-1, D)
            out.index_add_(0, top_x, (layer(state) * weight[top_x, idx, None]).to(x.dtype))
        return out + torch.sigmoid(self.shared_gate(x)) * self.shared_expert(x)


@structure(LOWERED)
class Dbrx(nn.Module):
    """DBRX: weights of all experts in one matrix, `chunk`ed, p-norm of the weights, `x[None, token].reshape`"""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, E, bias=False)
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(E * N, D)) for _ in range(3))

    def forward(self, x):
        weights = self.layer(x).softmax(dim=-1)
        top_weights, top_experts = torch.topk(weights, K, dim=-1)
        top_weights = top_weights / torch.norm(top_weights, p=1.0, dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = one_hot(top_experts, num_classes=E).permute(2, 1, 0)
        w1 = [w.squeeze(0) for w in self.w1.view(E, N, D).chunk(E, dim=0)]
        v1 = [w.squeeze(0) for w in self.v1.view(E, N, D).chunk(E, dim=0)]
        w2 = [w.squeeze(0) for w in self.w2.view(E, N, D).chunk(E, dim=0)]
        for e in range(E):
            topk_idx, token_idx = torch.where(mask[e])
            if token_idx.shape[0] == 0:
                continue
            rows = x[None, token_idx].reshape(-1, D)
            y = (silu(rows.matmul(w1[e].t())) * rows.matmul(v1[e].t())).matmul(w2[e])
            out.index_add_(0, token_idx, y * top_weights[token_idx, topk_idx, None])
        return out


@structure(LOWERED)
class Grok(Routed):
    """Grok-1: gelu-gated experts, weights not normalised, logits softmaxed in float"""

    def forward(self, x):
        probs = F.softmax(self.gate(x), dim=1, dtype=torch.float).to(x.dtype)
        weight, index = torch.topk(probs, K, dim=-1)
        out = torch.zeros((x.shape[0], D), dtype=x.dtype, device=x.device)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        for i in range(E):
            layer = self.experts[i]
            idx, top_x = torch.where(mask[i])
            if top_x.shape[0] == 0:
                continue
            top_x_list, idx_list = top_x.tolist(), idx.tolist()
            rows = x[None, top_x_list].reshape(-1, D)
            y = layer.w2(gelu(layer.w1(rows)) * layer.w3(rows)) * weight[top_x_list, idx_list, None]
            out.index_add_(0, top_x, y)
        return out


@structure(LOWERED)
class PhiMoE(Routed):
    """Phi-3.5-MoE: sparsemixer in evaluation: threshold masks, one choice after another, gathered"""

    def pick(self, scores, exclude):
        masked = scores if exclude is None else torch.scatter(scores, -1, exclude, float("-inf"))
        with torch.no_grad():
            threshold, index = masked.max(dim=-1, keepdim=True)
            factor = scores.abs().clamp(min=threshold)
            mask = ((threshold - scores) / factor) > 0.02
        gates = masked.masked_fill(mask, float("-inf")).softmax(-1)
        return gates.gather(-1, index), index

    def forward(self, x):
        scores = self.gate(x)
        w1, i1 = self.pick(scores, None)
        w2, i2 = self.pick(scores, i1)
        weight, index = torch.concat((w1, w2), -1), torch.concat((i1, i2), -1)
        out = torch.zeros_like(x)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        for i in range(E):
            idx, top_x = torch.where(mask[i])
            if top_x.shape[0] == 0:
                continue
            out.index_add_(0, top_x, self.experts[i](x[top_x]) * weight[top_x, idx, None])
        return out


@structure(LOWERED)
class Olmoe(Routed):
    """OLMoE: `for e in range(E)` over a mask, `continue` never, weights cast"""

    def forward(self, x):
        b = x.view(2, -1, D)
        batch, length, width = b.shape
        h = b.view(-1, width)
        probs = F.softmax(self.gate(h), dim=1, dtype=torch.float64)
        weight, index = torch.topk(probs, K, dim=-1)
        weight = weight.to(h.dtype)
        out = torch.zeros((batch * length, width), dtype=h.dtype, device=h.device)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        for i in range(E):
            layer = self.experts[i]
            idx, top_x = torch.where(mask[i])
            current = layer(h[None, top_x].reshape(-1, width)) * weight[top_x, idx, None]
            out.index_add_(0, top_x, current.to(h.dtype))
        return out.reshape(batch, length, width).view(-1, D)


@structure(LOWERED)
class Jamba(Routed):
    """Jamba: a router layer that is left out with one expert, else Mixtral's loop with `reshape`"""

    def forward(self, x):
        if E == 1:
            return self.experts[0](x)
        weight = F.softmax(self.gate(x), dim=1)
        weight, index = torch.topk(weight, K, dim=-1)
        out = torch.zeros_like(x)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        for i, layer in enumerate(self.experts):
            idx, top_x = torch.where(mask[i])
            if top_x.shape[0] == 0:
                continue
            out.index_add_(0, top_x, layer(x[None, top_x].reshape(-1, D)) * weight[top_x, idx, None])
        return out


@structure(LOWERED)
class Arctic(Routed):
    """Snowflake Arctic: a dense residual MLP besides, the experts' norm of its own"""

    def __init__(self):
        super().__init__()
        self.residual, self.norm = SwiGLU(), nn.LayerNorm(D)

    def forward(self, x):
        residual = x + self.residual(x)
        h = self.norm(x)
        weight, index = self.route(h)
        out = torch.zeros_like(h)
        mask = one_hot(index, num_classes=E).permute(2, 1, 0)
        for i in range(E):
            idx, top_x = torch.where(mask[i])
            if top_x.shape[0] == 0:
                continue
            out.index_add_(0, top_x, self.experts[i](h[top_x]) * weight[top_x, idx, None])
        return residual + out


@structure(LOWERED)
class SwitchLabml(Routed):
    """labml's Switch: index lists, `final.new_zeros`, `out[list, :] = …`, scaled"""

    kind = MLP

    def forward(self, x):
        h = x.contiguous().view(-1, D)
        prob, routes = torch.max(softmax(self.gate(h), -1), dim=-1)
        lists = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(E)]
        out = h.new_zeros(h.shape)
        outputs = [self.experts[i](h[lists[i], :]) for i in range(E)]
        for i in range(E):
            out[lists[i], :] = outputs[i]
        return out * prob.view(-1, 1)


@structure(LOWERED)
class MakeMoE(Routed):
    """makeMoE with capacity: noisy gates, `if len(selected) > capacity: selected[:capacity]`, `updates.index_add_`"""

    kind = MLP

    def forward(self, x):
        logits = self.gate(x)
        top, index = logits.topk(K, dim=-1)
        gates = softmax(torch.full_like(logits, float("-inf")).scatter(-1, index, top), dim=-1)
        capacity = int(len(x) * K / E * 1.0)
        updates = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (index == i).any(dim=-1)
            selected = torch.nonzero(mask).squeeze(-1)
            limited = selected[:capacity] if selected.numel() > capacity else selected
            if limited.numel() > 0:
                updates.index_add_(0, limited, expert(x[limited]) * gates[limited, i].unsqueeze(1))
        return x + updates


@structure(LOWERED)
class NllbMasked(Routed):
    """NLLB-MoE as it was: `masked[idx, token] = …` into zeros [E, T, D], combined by einsum"""

    kind = MLP

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        first = probs.argmax(-1)
        second = probs.masked_fill(one_hot(first, E).bool(), float("-inf")).argmax(-1)
        mask = one_hot(first, E) + one_hot(second, E)
        combining = probs * mask
        combining = combining / combining.sum(-1, keepdim=True)
        router_mask = combining.bool()
        masked = torch.einsum("bm,be->ebm", x, router_mask.to(x.dtype))
        for idx, expert in enumerate(self.experts):
            token_indices = router_mask[:, idx]
            weights = combining[token_indices, idx]
            masked[idx, token_indices] = torch.einsum("b,be->be", weights, expert(masked[idx, token_indices]))
        return masked.sum(dim=0)


@structure(LOWERED)
class FairseqSlots(Routed):
    """fairseq's MoE: capacity places by cumsum, dispatch by einsum [E, C, D], `chunk(E)`, `torch.cat`, combined"""

    kind = MLP

    def forward(self, x):
        gates = softmax(self.gate(x), dim=1)
        index = gates.argmax(dim=1)
        mask = one_hot(index, E)
        capacity = math.ceil(len(x) / E) + 1
        locations = (torch.cumsum(mask, dim=0) - 1) * mask
        mask = mask * torch.lt(locations, capacity)
        place = locations.mul(mask).sum(1)
        gate = (gates * mask).sum(1)
        places = one_hot(place, capacity).to(x.dtype)
        combine = torch.einsum("se,sc->sec", gate.unsqueeze(-1) * mask.to(x.dtype), places)
        dispatched = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        parts = [expert(part.squeeze(0)) for part, expert in zip(dispatched.chunk(E, dim=0), self.experts, strict=True)]
        return torch.einsum("sec,ecm->sm", combine, torch.stack(parts))


@structure(LOWERED)
class DeepSpeedExperts(Routed):
    """DeepSpeed's Experts: `chunk(E, dim=1)` of [1, E, C, D], `expert_outputs += [out]`, `torch.cat`"""

    kind = MLP

    def forward(self, x):
        gates = softmax(self.gate(x), dim=1)
        index = gates.argmax(dim=1)
        mask = one_hot(index, num_classes=E)
        capacity = 4
        locations = torch.cumsum(mask, dim=0) - 1
        mask = mask * torch.lt(locations, capacity)
        place = torch.sum(locations * mask, dim=1)
        gates = gates * mask
        combine = torch.einsum("se,sc->sec", gates, one_hot(place, capacity).to(x.dtype))
        dispatch = combine.bool()
        slots = torch.einsum("sec,sm->ecm", dispatch.type_as(x), x).reshape(1, E, -1, D)
        chunks, outputs = slots.chunk(E, dim=1), []
        for chunk, expert in zip(chunks, self.experts, strict=True):
            out = expert(chunk)
            if type(out) is tuple:
                out = out[0]
            outputs += [out]
        y = torch.cat(outputs, dim=1).reshape(E, -1, D)
        return torch.einsum("sec,ecm->sm", combine.type_as(x), y)


@structure(LOWERED)
class Tutel(nn.Module):
    """tutel: `fast_encode` as a scatter by location, `baddbmm` of [E, C, D], `fast_decode` by gather"""

    def __init__(self):
        super().__init__()
        self.wg = nn.Linear(D, E, bias=False)
        self.w1, self.b1 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, 1, N))
        self.w2, self.b2 = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, 1, D))

    def forward(self, x):
        scores = softmax(self.wg(x), dim=1)
        index = scores.topk(1, dim=1).indices[:, 0]
        mask = one_hot(index, E)
        location = ((torch.cumsum(mask, 0) - 1) * mask).sum(1)
        capacity = 5
        gate = scores.gather(1, index[:, None])[:, 0] * (location < capacity)
        place = index * capacity + location.clamp(max=capacity - 1)
        kept = (location < capacity).to(x.dtype)
        slots = torch.zeros(E * capacity, D, dtype=x.dtype).index_add(0, place, x * kept[:, None]).view(E, capacity, D)
        h = relu(torch.baddbmm(self.b1, slots, self.w1))
        y = torch.baddbmm(self.b2, h, self.w2).view(E * capacity, D)
        return y[place] * gate[:, None]


@structure(LOWERED)
class BaseLayer(Routed):
    """BASE: each expert gets the same number of tokens, by a sort of the tokens' best expert, `view(E, -1, D)`"""

    def forward(self, x):
        scores = self.gate(x)
        order = scores.argmax(-1).argsort(stable=True)
        per = len(x) // E + 1
        padded = torch.cat([x[order], x.new_zeros(per * E - len(x), D)]).view(E, per, D)
        y = torch.stack([expert(rows) for expert, rows in zip(self.experts, padded, strict=True)]).view(-1, D)[: len(x)]
        alpha = torch.sigmoid(scores.max(-1).values)[order, None]
        out = torch.empty_like(x)
        out[order] = x[order] + alpha * (y - x[order])
        return out
