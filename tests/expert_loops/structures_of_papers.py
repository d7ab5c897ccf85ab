"""More of structures.py: layers as papers have them."""

from __future__ import annotations

import torch
from module_layers import MLP, SwiGLU
from spellings import CAPTURED, LOWERED, PROJECTED, D, E, K, N
from structures import Routed, structure
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import gelu, one_hot, relu, softmax


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
    """mixture of depths: the tokens of the highest weight go through one block (one expert)"""

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
    """mixture of attention heads (JetMoE): query projections of slices, output ones after attention"""

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
        (sx, sy), (ix, iy) = (s.topk(2, dim=-1) for s in sim)
        scores = sx.unsqueeze(-1) + ix.unsqueeze(-2)
        index = sy.unsqueeze(-1) * 4 + iy.unsqueeze(-2)
        scores, best = scores.flatten(1).topk(2, dim=-1)
        index = index.flatten(1).gather(1, best)
        h = gelu(torch.einsum("td,tkd->tk", x, self.down(index)))
        return torch.einsum("tk,tkd->td", h * scores.softmax(-1), self.up(index))


@structure(LOWERED)
class LlavaMoE(Routed):
    """LLaVA-MoE (sparse upcycled): top-1 of [B, T], `results[batch, nth] += w * expert(...)`"""

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


@structure(CAPTURED)
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
    """MiniCPM-MoE: rows `repeat_interleave`d, `y[flat == i] = expert(x[flat == i])`, a weighted sum"""

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
            rows = self.experts[e](x[token]) * weight[token, slot].unsqueeze(1)
            out = out + torch.zeros_like(out).index_add_(0, token, rows)
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


@structure(PROJECTED)
class NormsInside(nn.Module):
    """an expert that is a pre-norm block of its own with dropout off: norm, linear, glu, linear, residual"""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * N), nn.GLU(), nn.Dropout(0.0), nn.Linear(N, D))
            for _ in range(E)
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
            nn.Sequential(nn.Linear(D, N), nn.ReLU(), nn.Dropout(0.3), nn.Linear(N, D), nn.Dropout(0.2))
            for _ in range(E)
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


@structure(CAPTURED)
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
