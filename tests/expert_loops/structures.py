"""Expert layers with modules of their own, after the structure of public models and libraries (named in each docstring),
in words of our own. Each takes x [T, D]; the outcomes are those of spellings.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from module_layers import MLP, SwiGLU
from spellings import BROKEN, CAPTURED, LOWERED, PROJECTED, D, E, K, N
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
    """DeepSeek-V3: sigmoid scores, a bias for the choice alone, groups left out with -inf, weights normalised and scaled"""

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
    """labml's Switch: index lists, `final.new_zeros`, capacity by slicing each list, dropped tokens pass, scaled or not"""

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
        combine = torch.einsum("se,sc->sec", gate.unsqueeze(-1) * mask.to(x.dtype), one_hot(place, capacity).to(x.dtype))
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
    """tutel: `fast_encode` as a scatter by location, batched matmul of [E, C, D] with `baddbmm`, `fast_decode` by gather"""

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


@structure(LOWERED)
class HashLayer(Routed):
    """hash layers: a fixed table of experts by token number, `for e in range(E)`, boolean masks, `out[mask] = …`"""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([2, 0, 3, 1, 1, 2, 0, 3, 0, 1, 2, 3]))

    def forward(self, x):
        ids = torch.arange(len(x))
        bucket = self.table[ids]
        out = torch.zeros_like(x)
        for e in range(E):
            mask = bucket == e
            out[mask] = self.experts[e](x[mask])
        return out


@structure(LOWERED)
class ExpertChoice(Routed):
    """expert choice: `topk` over tokens, a gather, experts over `unbind`, one `index_add` of the flattened"""

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        weight, token = torch.topk(probs.t(), 4, dim=-1)
        rows = x[token.view(-1)].view(E, 4, D)
        y = torch.stack([expert(part) for expert, part in zip(self.experts, rows.unbind(0), strict=True)])
        y = y * weight.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token.reshape(-1), y.reshape(-1, D))


@structure(LOWERED)
class SoftMoE(Routed):
    """soft MoE (lucidrains): slots [E, S, D] by a softmax over tokens, each expert one slot matrix, combined back"""

    kind = MLP

    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(E, 2, D))

    def forward(self, x):
        logits = torch.einsum("nd,esd->nes", x, self.phi)
        dispatch, combine = logits.softmax(dim=0), logits.flatten(1).softmax(dim=-1)
        slots = torch.einsum("nd,nes->esd", x, dispatch)
        out = torch.stack([expert(slots[i]) for i, expert in enumerate(self.experts)])
        return combine @ out.reshape(-1, D)


@structure(LOWERED)
class SoftMoE2D(Routed):
    """soft MoE with slots as one matrix [E·S, D]: `for i in range(E)`: `slots[i * S : (i + 1) * S]`"""

    kind = MLP

    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(D, E * 2))

    def forward(self, x):
        logits = x @ self.phi
        slots = logits.softmax(0).t() @ x
        y = torch.cat([self.experts[i](slots[i * 2 : (i + 1) * 2]) for i in range(E)])
        return logits.softmax(1) @ y


@structure(CAPTURED)
class MixtureOfDepths(nn.Module):
    """mixture of depths: the tokens of the highest weight go through one block (one expert: no routing between experts)"""

    def __init__(self):
        super().__init__()
        self.router, self.block = nn.Linear(D, 1, bias=False), SwiGLU()

    def forward(self, x):
        weight, index = self.router(x)[:, 0].topk(4)
        index, order = index.sort()
        rows = self.block(x[index]) * weight[order, None]
        return x.index_add(0, index, rows)


@structure(LOWERED)
class MoA(nn.Module):
    """mixture of attention heads (JetMoE): query projections gathered by bincount slices, output ones after attention"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.inp, self.out = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, D, N))

    def projected(self, rows, sizes, weights):
        parts = rows.split(sizes, dim=0)
        return torch.cat([F.linear(parts[i], weights[i]) for i in range(E)], dim=0)

    def forward(self, x):
        logits, index = self.gate(x).topk(K, dim=1)
        gates = softmax(logits, dim=1)
        zeros = torch.zeros([len(x), E], dtype=x.dtype)
        sizes = zeros.scatter(1, index, 1).long().sum(0).tolist()
        _, order = index.flatten().sort(0)
        batch = order.div(K, rounding_mode="trunc")
        weight = gates.flatten()[order]
        h = relu(self.projected(x[batch], sizes, self.inp))
        y = self.projected(h, sizes, self.out) * weight[:, None]
        return torch.zeros_like(x).index_add(0, batch, y)


@structure(CAPTURED)
class Peer(nn.Module):
    """PEER: experts of one neuron each from embeddings, product keys (single vectors: no projection of an expert)"""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(D, 2 * D, bias=False)
        self.keys = nn.Parameter(torch.randn(2, 4, D))
        self.down, self.up = nn.Embedding(16, D), nn.Embedding(16, D)

    def forward(self, x):
        q = self.query(x).view(-1, 2, D)
        sim = torch.einsum("tpd,pkd->ptk", q, self.keys)
        (sx, sy), (ix, iy) = [s.topk(2, dim=-1) for s in sim][0], [s.topk(2, dim=-1) for s in sim][1]
        scores = (sx.values if hasattr(sx, "values") and not torch.is_tensor(sx) else sx).unsqueeze(-1) + ix.unsqueeze(-2)
        index = sy.unsqueeze(-1) * 4 + iy.unsqueeze(-2)
        scores, best = scores.flatten(1).topk(2, dim=-1)
        index = index.flatten(1).gather(1, best)
        h = gelu(torch.einsum("td,tkd->tk", x, self.down(index)))
        return torch.einsum("tk,tkd->td", h * scores.softmax(-1), self.up(index))


@structure(LOWERED)
class LlavaMoE(Routed):
    """LLaVA-MoE (sparse upcycled): top-1 of [B, T], boolean masks per expert, `results[batch, nth] += w * expert(...)`"""

    def forward(self, x):
        b = x.view(2, -1, D)
        logits = self.gate(b)
        weights, selected = torch.topk(logits, K)
        weights = softmax(weights, dim=-1, dtype=torch.float).to(b.dtype)
        results = torch.zeros_like(b)
        for i, expert in enumerate(self.experts):
            batch, token, nth = torch.where(selected == i)
            results[batch, token] += weights[batch, token, nth, None] * expert(b[batch, token])
        return results.view(-1, D)


@structure(LOWERED)
class VMoE(Routed):
    """V-MoE: dispatch by `gather` with a padded batch [E, C], `bmm`-like experts as vmap over stacked weights"""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, N, D))

    def forward(self, x):
        weight, token = softmax(self.gate(x), -1).t().topk(3, -1)
        y = torch.vmap(lambda rows, w1, w2: gelu(rows @ w1) @ w2)(x[token], self.w1, self.w2)
        return torch.zeros_like(x).index_add(0, token.flatten(), (y * weight[..., None]).flatten(0, 1))


@structure(LOWERED)
class Mmoe(nn.Module):
    """MMoE: every task mixes all experts densely (no token leaves one out: as written)"""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(MLP() for _ in range(E))
        self.gates = nn.ParameterList([torch.randn(D, E) for _ in range(2)])

    def forward(self, x):
        outputs = torch.stack([e(x) for e in self.experts])
        mixed = [
            (softmax(x @ g, dim=1).t().unsqueeze(2).expand(-1, -1, D) * outputs).sum(dim=0) for g in self.gates
        ]
        return mixed[0] + mixed[1]


@structure(LOWERED)
class Skywork(Routed):
    """Skywork: jitter on the input in training, top-k, an `index_add_` over every expert"""

    def forward(self, x):
        h = x * torch.empty_like(x).uniform_(0.9, 1.1)
        weight, index = self.route(h)
        out = torch.zeros_like(x)
        for i in range(E):
            idx, top_x = torch.where(one_hot(index, E).permute(2, 1, 0)[i])
            if top_x.shape[0] == 0:
                continue
            out.index_add_(0, top_x, self.experts[i](h[top_x]) * weight[top_x, idx, None])
        return out


@structure(LOWERED)
class MiniCPM(Routed):
    """MiniCPM-MoE: rows `repeat_interleave`d, `y[flat == i] = expert(x[flat == i])`, `(y.view(*w.shape, -1) * w).sum(1)`"""

    def forward(self, x):
        weight, index = self.route(x)
        rows = x.repeat_interleave(K, dim=0)
        y = torch.empty_like(rows)
        flat = index.view(-1)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(rows[flat == i])
        return (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


@structure(LOWERED)
class Yuan(Routed):
    """Yuan 2: an attention router between experts, top-2, index lists by sort of each expert's tokens"""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * E, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, E, 3).unbind(-1)
        logits = (torch.softmax(q.unsqueeze(2) * k.unsqueeze(1), -1) @ v.unsqueeze(-1)).squeeze(-1)
        weight, index = torch.topk(softmax(logits, -1), K, dim=1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index.eq(e))
            out = out + torch.zeros_like(out).index_add_(0, token, self.experts[e](x[token]) * weight[token, slot].unsqueeze(1))
        return out


@structure(LOWERED)
class MixtureOfLoras(nn.Module):
    """mixture of LoRAs: a shared layer, `out = out + (x @ a[e] @ b[e]) * gates[:, e : e + 1]`, gates top-k softmax"""

    def __init__(self):
        super().__init__()
        self.base, self.gate = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        self.a = nn.ParameterList([torch.randn(D, 2) for _ in range(E)])
        self.b = nn.ParameterList([torch.randn(2, D) for _ in range(E)])

    def forward(self, x):
        logits = self.gate(x)
        top, index = logits.topk(K, -1)
        gates = torch.zeros_like(logits).scatter(1, index, top.softmax(-1))
        out = self.base(x)
        for e in range(E):
            out = out + gates[:, e : e + 1] * (x @ self.a[e] @ self.b[e])
        return out


@structure(LOWERED)
class BranchTrainMix(Routed):
    """Branch-Train-MiX: experts of a list, `expert_mask = (index == e).nonzero()`, columns `[:, 0]` and `[:, 1]`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            places = (index == e).nonzero()
            token, slot = places[:, 0], places[:, 1]
            out = torch.index_add(out, 0, token, weight[token, slot].unsqueeze(-1) * expert(x.index_select(0, token)))
        return out


@structure(LOWERED)
class NormsInside(nn.Module):
    """an expert that is a pre-norm block of its own with dropout off: norm, linear, glu, linear, residual"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * N), nn.GLU(), nn.Dropout(0.0), nn.Linear(N, D)) for _ in range(E)
        )

    def forward(self, x):
        weight, index = self.gate(x).topk(1, -1)
        out = x.clone()
        for e, expert in enumerate(self.experts):
            token = (index[:, 0] == e).nonzero().flatten()
            if token.numel():
                out[token] += torch.sigmoid(weight[token]) * expert(x[token])
        return out


@structure(PROJECTED)
class DropoutInside(nn.Module):
    """dropout between and after the projections, a ModuleList"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, N), nn.ReLU(), nn.Dropout(0.3), nn.Linear(N, D), nn.Dropout(0.2)) for _ in range(E)
        )

    def forward(self, x):
        weight, index = softmax(self.gate(x), -1).topk(K, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out[token] += expert(x[token]) * weight[token, slot, None]
        return out


@structure(LOWERED)
class SortedBincount(Routed):
    """sorted tokens, `cumsum` of `bincount`, offsets as tensors: `rows[offsets[e] : offsets[e + 1]]`"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.flatten()
        order = torch.argsort(flat, stable=True)
        ends = torch.cumsum(torch.bincount(flat, minlength=E), 0)
        rows, parts = x[order // K], []
        for e in range(E):
            start = 0 if e == 0 else ends[e - 1]
            parts.append(self.experts[e](rows[start : ends[e]]))
        y = torch.cat(parts)
        out = torch.empty_like(y).index_copy(0, order, y).view(-1, K, D)
        return (out * weight[..., None]).sum(1)


@structure(LOWERED)
class OneHotMatmul(Routed):
    """one-hot matrices: `S = one_hot(token, T).to(dtype)`, rows by `S @ x`, back by `S.t() @ y`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            pick = one_hot(token, len(x)).to(x.dtype)
            out = out + pick.t() @ (expert(pick @ x) * weight[token, slot, None])
        return out


@structure(LOWERED)
class MaskedScatter(Routed):
    """`mask = (index == e).any(-1, keepdim=True)`, `out = out + zeros.masked_scatter(mask, expert(x[mask[:, 0]]))`"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (index == e).any(-1, keepdim=True)
            rows = expert(x[mask[:, 0]])
            out = out + torch.zeros_like(x).masked_scatter(mask.expand_as(x), rows) * gates[:, e : e + 1]
        return out


@structure(LOWERED)
class WhereOfThree(Routed):
    """`out = out + torch.where(gates[:, e : e + 1] > 0, expert(x) * gates[:, e : e + 1], torch.zeros_like(x))`"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            gate = gates[:, e : e + 1]
            out = out + torch.where(gate > 0, expert(x) * gate, torch.zeros_like(x))
        return out


@structure(LOWERED)
class PaddedBatch(nn.Module):
    """rows padded by `pad_sequence`, one `bmm` for all experts, taken back with a mask"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, N, D))

    def forward(self, x):
        weight, index = softmax(self.gate(x), -1).max(-1)
        order = index.argsort(stable=True)
        counts = torch.bincount(index, minlength=E)
        rows = nn.utils.rnn.pad_sequence(x[order].split(counts.tolist()), batch_first=True)
        y = torch.bmm(relu(torch.bmm(rows, self.w1)), self.w2)
        mask = torch.arange(rows.shape[1])[None] < counts[:, None]
        out = torch.zeros_like(x)
        out[order] = y[mask]
        return out * weight[:, None]


@structure(LOWERED)
class StackAndGather(Routed):
    """a comprehension, `torch.stack(…, dim=1)`, `torch.gather` of the chosen, weighted by `einsum`"""

    def forward(self, x):
        weight, index = self.route(x)
        y = torch.stack([expert(x) for expert in self.experts], dim=1)
        chosen = torch.gather(y, 1, index[..., None].expand(*index.shape, D))
        return torch.einsum("tk,tkd->td", weight, chosen)


@structure(LOWERED)
class Convolutions(nn.Module):
    """experts as 1×1 convolutions of [B, D, L]: `nn.Conv1d`, masked by gates of each position"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Conv1d(D, E, 1)
        self.experts = nn.ModuleList(nn.Sequential(nn.Conv1d(D, N, 1), nn.GELU(), nn.Conv1d(N, D, 1)) for _ in range(E))

    def forward(self, x):
        x = x.view(2, -1, D).transpose(1, 2)
        probs = self.gate(x).softmax(1)
        top, index = probs.topk(K, dim=1)
        gates = torch.zeros_like(probs).scatter(1, index, top)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * gates[:, e : e + 1]
        return out.transpose(1, 2).reshape(-1, D)


@structure(LOWERED)
class Convolutions2d(nn.Module):
    """experts as 1×1 `nn.Conv2d`, a gate for each image (`scatter` of the top-k), masked"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Conv2d(D, N, 1), nn.ReLU(), nn.Conv2d(N, D, 1)) for _ in range(E))

    def forward(self, x):
        image = x.view(5, -1, D).transpose(1, 2).unsqueeze(-1)
        logits = self.gate(image.mean((2, 3)))
        top, index = logits.topk(K, -1)
        gates = torch.zeros_like(logits).scatter(1, index, top.softmax(-1))
        out = 0
        for e, expert in enumerate(self.experts):
            out = out + gates[:, e].view(-1, 1, 1, 1) * expert(image)
        return out.squeeze(-1).transpose(1, 2).reshape(-1, D)


@structure(LOWERED)
class UniqueAndZip(Routed):
    """`numbers, counts = flat[order].unique_consecutive(return_counts=True)`, zipped with the split rows"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
        out = torch.zeros_like(x)
        for e, token, w in zip(
            numbers.tolist(), (order // K).split(counts.tolist()), weight.flatten()[order].split(counts.tolist()), strict=True
        ):
            out.index_add_(0, token, self.experts[e](x[token]) * w[:, None])
        return out


@structure(LOWERED)
class DictOfExperts(nn.Module):
    """a dict name → expert, `for name, expert in self.experts.items()`, `if not mask.any(): continue`"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleDict({f"e{i}": SwiGLU() for i in range(E)})
        self.number = {f"e{i}": i for i in range(E)}

    def forward(self, x):
        weight, index = softmax(self.gate(x), -1).topk(K, -1)
        out = torch.zeros_like(x)
        for name, expert in self.experts.items():
            mask = index == self.number[name]
            if not mask.any():
                continue
            token, slot = mask.nonzero(as_tuple=True)
            out[token] += weight[token, slot].unsqueeze(-1) * expert(x[token])
        return out


@structure(LOWERED)
class DictOfLists(Routed):
    """lists of an expert's rows in a dict, `if e not in rows: continue` by counts"""

    def forward(self, x):
        weight, index = self.route(x)
        rows = {}
        for e in range(E):
            token, slot = torch.where(index == e)
            if len(token) == 0:
                continue
            rows[e] = (token, weight[token, slot, None])
        out = torch.zeros_like(x)
        for e, (token, w) in rows.items():
            out.index_add_(0, token, self.experts[e](x[token]) * w)
        return out


@structure(LOWERED)
class TensorSplit(Routed):
    """`torch.tensor_split(rows, ends[:-1].cpu())` with a tensor of ends, a comprehension over `zip`"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        ends = flat.bincount(minlength=E).cumsum(0)[:-1].cpu()
        parts = torch.tensor_split(x[order // K], ends)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])


@structure(LOWERED)
class IfElse(Routed):
    """`if token.numel() > 0: … else: out = out + 0 * first parameter's sum`, so that all experts have gradients"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            if token.numel() > 0:
                out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
            else:
                out = out + 0.0 * sum(p.sum() for p in expert.parameters())
        return out


@structure(LOWERED)
class IfElseKinds(Routed):
    """`if the count is over a capacity: the first ones, else: all`, by if and else statements"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            if len(token) > 4:
                token, slot = token[:4], slot[:4]
            else:
                pass
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out


@structure(LOWERED)
class EarlyReturn(Routed):
    """an expert's method that returns early: `if token.numel() == 0: return out`"""

    def run(self, e, x, index, weight, out):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            return out
        return out.index_add(0, token, self.experts[e](x[token]) * weight[token, slot, None])

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            out = self.run(e, x, index, weight, out)
        return out


@structure(LOWERED)
class EarlyNone(Routed):
    """an expert's method that returns None without rows, `if y is not None: out.index_add_(…)`"""

    def run(self, e, x, token):
        if token.numel() == 0:
            return None
        return self.experts[e](x[token])

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            y = self.run(e, x, token)
            if y is not None:
                out.index_add_(0, token, y * weight[token, slot, None])
        return out


@structure(LOWERED)
class WhileOnData(Routed):
    """`while remaining.any(): e = remaining.nonzero()[0]`: the hit experts, one after another"""

    def forward(self, x):
        weight, index = self.route(x)
        remaining = torch.bincount(index.flatten(), minlength=E)
        out, e = torch.zeros_like(x), 0
        while e < E and remaining.sum() > 0:
            token, slot = torch.where(index == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weight[token, slot, None])
            remaining[e] = 0
            e += 1
        return out


@structure(LOWERED)
class BreakOnData(Routed):
    """slices of sorted rows, `if start >= len(rows): break`"""

    def forward(self, x):
        weight, index = self.route(x)
        order = index.flatten().argsort(stable=True)
        counts = index.flatten().bincount(minlength=E).tolist()
        rows, parts, start = x[order // K], [], 0
        for e in range(E):
            if start >= len(rows):
                break
            parts.append(self.experts[e](rows[start : start + counts[e]]))
            start += counts[e]
        return torch.zeros_like(x).index_add(0, order // K, torch.cat(parts) * weight.flatten()[order, None])


@structure(LOWERED)
class ExpertBias(Routed):
    """aux-free balance: the choice by `scores + bias`, weights gathered, the bias moved by the counts afterwards"""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        index = (scores + self.bias).topk(K, -1).indices
        weight = scores.gather(-1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = index == e
            if mask.any():
                token, slot = torch.where(mask)
                out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        with torch.no_grad():
            counts = torch.bincount(index.flatten(), minlength=E).to(x.dtype)
            self.bias.add_(0.01 * torch.sign(counts.mean() - counts))
        return out


@structure(LOWERED)
class BalanceLoss(Routed):
    """the usual balance loss added to what comes out: `E · Σ_e f_e · P_e`"""

    def forward(self, x):
        probs = softmax(self.gate(x), -1)
        weight, index = probs.topk(K, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        share = one_hot(index, E).to(x.dtype).mean((0, 1))
        return out + E * (share * probs.mean(0)).sum()


@structure(LOWERED)
class GroupedHeads(Routed):
    """fine-grained experts: tokens split into halves, each half routed by itself (multi-head MoE)"""

    def __init__(self):
        super().__init__()
        self.merge = nn.Linear(D, D)

    def forward(self, x):
        h = torch.stack([x, x.flip(-1)], 1).reshape(-1, D)
        weight, index = self.route(h)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, weight[token, slot, None] * expert(h[token]))
        return self.merge(out.view(-1, 2, D).sum(1))


@structure(LOWERED)
class Ple(nn.Module):
    """PLE/CGC with sparse gates: experts of two tasks and shared ones, each task's gate takes the top-k of its own"""

    def __init__(self):
        super().__init__()
        self.shared, self.own = nn.ModuleList(MLP() for _ in range(2)), nn.ModuleList(MLP() for _ in range(2))
        self.gate = nn.Linear(D, 4)

    def forward(self, x):
        y = torch.stack([e(x) for e in [*self.own, *self.shared]], 1)
        logits = self.gate(x)
        top, index = logits.topk(2, -1)
        gates = torch.full_like(logits, float("-inf")).scatter(1, index, top).softmax(-1)
        return torch.bmm(gates.unsqueeze(1), y).squeeze(1)


@structure(LOWERED)
class ScatterReduce(Routed):
    """`torch.scatter_add(out, 0, token.unsqueeze(1).expand(-1, D), rows)`, tokens by `masked_select`"""

    def forward(self, x):
        weight, index = self.route(x)
        out, every = torch.zeros_like(x), torch.arange(len(x))
        for e, expert in enumerate(self.experts):
            mask = (index == e).any(dim=1)
            token = every.masked_select(mask)
            w = (weight * (index == e)).sum(1).masked_select(mask)
            out = torch.scatter_add(out, 0, token.unsqueeze(1).expand(-1, D), expert(x[token]) * w.unsqueeze(1))
        return out


@structure(LOWERED)
class WeightBefore(Routed):
    """the weight before the expert, top-1 sigmoid: `expert(x[token] * w)`, added to a shared expert's result in place"""

    def __init__(self):
        super().__init__()
        self.shared = SwiGLU()

    def forward(self, x):
        top, index = self.gate(x).topk(1, -1)
        w = torch.sigmoid(top)
        out = self.shared(x)
        for e, expert in enumerate(self.experts):
            token = torch.where(index[:, 0] == e)[0]
            out[token] += expert(x[token] * w[token])
        return out


@structure(LOWERED)
class BiasedGlu(nn.Module):
    """gpt-oss: interleaved gate and up with biases, clamped, `(up + 1) * glu`, stacked parameters, hits"""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.gate_up, self.gate_up_b = nn.Parameter(torch.randn(E, D, 2 * N)), nn.Parameter(torch.randn(E, 2 * N))
        self.down, self.down_b = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        top, index = torch.topk(self.router(x), K, dim=-1)
        scores = torch.zeros(len(x), E, dtype=x.dtype).scatter_(1, index, softmax(top, 1))
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = one_hot(index, num_classes=E).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit[:]:
            e = e[0]
            with torch.no_grad():
                _, token = torch.where(mask[e])
            both = x[token] @ self.gate_up[e] + self.gate_up_b[e]
            gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(min=-7.0, max=7.0)
            y = ((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ self.down[e] + self.down_b[e]
            out.index_add_(0, token, y * scores[token, e, None])
        return out


@structure(LOWERED)
class AllTokensBmm(nn.Module):
    """gpt-oss in evaluation: `x.repeat(E, 1).view(E, -1, D)`, `bmm`, `scores.transpose(0, 1).view(E, -1, 1)`, summed"""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.gate_up, self.gate_up_b = nn.Parameter(torch.randn(E, D, 2 * N)), nn.Parameter(torch.randn(E, 2 * N))
        self.down, self.down_b = nn.Parameter(torch.randn(E, N, D)), nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        top, index = torch.topk(self.router(x), K, dim=-1)
        scores = torch.zeros(len(x), E, dtype=x.dtype).scatter_(1, index, softmax(top, 1))
        h = x.repeat(E, 1).view(E, -1, D)
        both = torch.bmm(h, self.gate_up) + self.gate_up_b[..., None, :]
        gate, up = both[..., ::2], both[..., 1::2]
        y = torch.bmm((up + 1) * gate * torch.sigmoid(gate * 1.702), self.down) + self.down_b[..., None, :]
        y = y.view(E, 1, -1, D) * scores.transpose(0, 1).view(E, 1, -1)[..., None]
        return y.sum(dim=0)[0]
