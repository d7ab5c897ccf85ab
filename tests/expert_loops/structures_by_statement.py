"""More of structures.py: statements of Python and operators of torch that route."""

from __future__ import annotations

import torch
from module_layers import MLP, SwiGLU
from spellings import BROKEN, CAPTURED, LOWERED, D, E, K, N
from structures import Routed, structure
from torch import nn
from torch.nn.functional import one_hot, relu, softmax


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


@structure(CAPTURED)
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


@structure(CAPTURED)
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


@structure(BROKEN)
class UniqueAndZip(Routed):
    """`numbers, counts = flat[order].unique_consecutive(return_counts=True)`, zipped with the split rows"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
        out = torch.zeros_like(x)
        sizes = counts.tolist()
        parts = zip(numbers.tolist(), (order // K).split(sizes), weight.flatten()[order].split(sizes), strict=True)
        for e, token, w in parts:
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


@structure(CAPTURED)
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
    """the weight before the expert, top-1 sigmoid: `expert(x[token] * w)`, onto a shared expert's result"""

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
