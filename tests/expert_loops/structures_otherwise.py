"""More of structures.py: other ways to write the same loops and sums."""

from __future__ import annotations

import torch
from spellings import CAPTURED, LOWERED, D, E, K
from structures import Routed, structure
from torch.nn import functional as F
from torch.nn.functional import softmax


@structure(LOWERED)
class SplitSorted(Routed):
    """`torch.split(rows, sizes)`, pieces without rows joined as they are, an inverse permutation, einsum"""

    def forward(self, x):
        weight, index = self.route(x)
        flat = index.reshape(-1)
        perm = torch.argsort(flat)
        inv = torch.argsort(perm)
        sizes = torch.bincount(flat, minlength=E).tolist()
        xs = x.repeat_interleave(K, dim=0)[perm]
        outs = []
        for e, chunk in enumerate(torch.split(xs, sizes)):
            if chunk.shape[0] == 0:
                outs.append(chunk)
            else:
                outs.append(self.experts[e](chunk))
        y = torch.cat(outs)[inv].view(-1, K, D)
        return torch.einsum("tkd,tk->td", y, weight)


@structure(LOWERED)
class GatesTimesMask(Routed):
    """`one_hot(index).sum(1)`, `(gates * mask)[:, e].unsqueeze(-1)` in each iteration"""

    def forward(self, x):
        weight, index = self.route(x)
        mask = F.one_hot(index, E).sum(1).to(x.dtype)
        gates = torch.zeros_like(mask).scatter(1, index, weight)
        return sum(self.experts[e](x) * (gates * mask)[:, e].unsqueeze(-1) for e in range(E))


@structure(LOWERED)
class ClonedSums(Routed):
    """`new = out.clone(); new[token] = new[token] + rows; out = new`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            t, s = torch.where(index == e)
            new = out.clone()
            new[t] = new[t] + m(x[t]) * weight[t, s, None]
            out = new
        return out


@structure(LOWERED)
class SlotsOfEachExpert(Routed):
    """for each expert one slot after another, `rows, = (index[:, k] == e).nonzero(as_tuple=True)`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            for k in range(K):
                (t,) = (index[:, k] == e).nonzero(as_tuple=True)
                out[t] = out[t] + weight[t, k, None] * m(x[t])
        return out


@structure(LOWERED)
class Recursion(Routed):
    """a function that calls itself with the next expert"""

    def forward(self, x):
        weight, index = self.route(x)
        def go(e, out):
            if e == E:
                return out
            t, s = torch.where(index == e)
            return go(e + 1, out.index_add(0, t, self.experts[e](x[t]) * weight[t, s, None]))
        return go(0, torch.zeros_like(x))


@structure(LOWERED)
class MatchOnCounts(Routed):
    """`match counts[e]: case 0: continue`"""

    def forward(self, x):
        weight, index = self.route(x)
        counts = index.flatten().bincount(minlength=E).tolist()
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            match counts[e]:
                case 0:
                    continue
                case _:
                    t, s = torch.where(index == e)
                    out.index_add_(0, t, m(x[t]) * weight[t, s, None])
        return out


@structure(LOWERED)
class NoGradInside(Routed):
    """`with torch.no_grad():` around the masks of each iteration"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            with torch.no_grad():
                sel = (index == e)
                t = sel.any(-1).nonzero().view(-1)
                s = sel[t].to(torch.int).argmax(-1)
            out = out.index_add(0, t, m(x[t]) * weight[t, s, None])
        return out


@structure(LOWERED)
class Searchsorted(Routed):
    """bounds by `searchsorted(flat, arange(E + 1)).tolist()`, pieces written into an empty tensor"""

    def forward(self, x):
        weight, index = self.route(x)
        flat, perm = index.flatten().sort(stable=True)
        b = torch.searchsorted(flat, torch.arange(E + 1)).tolist()
        rows = x[perm // K]
        y = torch.empty_like(rows)
        for e in range(E):
            y[b[e]:b[e + 1]] = self.experts[e](rows[b[e]:b[e + 1]])
        return torch.zeros_like(x).index_add(0, perm // K, y * weight.flatten()[perm].unsqueeze(1))


@structure(LOWERED)
class SideBySide(Routed):
    """`torch.cat([…], -1).view(-1, E, D).gather(…)`"""

    def forward(self, x):
        weight, index = self.route(x)
        y = torch.cat([m(x) for m in self.experts], -1).view(-1, E, D)
        return (y.gather(1, index[..., None].expand(-1, -1, D)) * weight[..., None]).sum(1)


@structure(LOWERED)
class MatmulCombine(Routed):
    """`(gates.unsqueeze(1) @ torch.stack(…, 1)).squeeze(1)`, gates by `scatter_add_`"""

    def forward(self, x):
        weight, index = self.route(x)
        g = torch.zeros(len(x), E, dtype=x.dtype).scatter_add_(1, index, weight)
        y = torch.stack([m(x) for m in self.experts], 1)
        return (g.unsqueeze(1) @ y).squeeze(1)


@structure(LOWERED)
class ViewedGates(Routed):
    """`gates[:, e].view(-1, 1)`, a dictionary of results, `sum(outs.values())`"""

    def forward(self, x):
        weight, index = self.route(x)
        g = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        outs = {e: m(x) * g[:, e].view(-1, 1) for e, m in enumerate(self.experts)}
        return sum(outs.values())


@structure(LOWERED)
class BestUpToCapacity(Routed):
    """the best tokens of those that chose the expert: `token[weight[token].topk(min(len(token), 3)).indices]`"""

    def forward(self, x):
        p = softmax(self.gate(x), -1)
        weight, index = p.max(-1)
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            t = (index == e).nonzero().squeeze(-1)
            k = min(len(t), 3)
            best = weight[t].topk(k).indices
            t = t[best]
            out.index_add_(0, t, m(x[t]) * weight[t, None])
        return out


@structure(LOWERED)
class UniqueAndMasks(Routed):
    """`for e in torch.unique(index)`, masks of rows, `self.experts[int(e)]`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = x.new_zeros(x.shape)
        for e in torch.unique(index):
            m = index == e
            rows = m.any(dim=-1)
            sel = x[rows]
            y = self.experts[int(e)](sel)
            gw = (weight * m).sum(-1)[rows]
            out[rows] += gw[:, None] * y
        return out


@structure(CAPTURED)
class PaddedToLongest(Routed):
    """lists of rows, each padded to the longest"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        lists = [torch.where(index == e) for e in range(E)]
        longest = max(len(t) for t, _ in lists)
        for e, (t, s) in enumerate(lists):
            pad = torch.zeros(longest - len(t), D, dtype=x.dtype)
            y = self.experts[e](torch.cat([x[t], pad]))[: len(t)]
            out.index_add_(0, t, y * weight[t, s, None])
        return out


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(D, 6), torch.nn.ReLU(), torch.nn.Linear(6, D))


class ToAll(torch.nn.Module):
    """Experts that every token has, E of each of two kinds; gates for two tasks."""

    def __init__(self):
        super().__init__()
        self.experts, self.shared = (torch.nn.ModuleList([two_layers() for _ in range(E)]) for _ in range(2))
        self.gates = torch.nn.ModuleList([torch.nn.Linear(D, 2 * E) for _ in range(2)])


@structure(LOWERED)
class WeighedAlike(ToAll):
    """all experts on all tokens, `out = out + gates[:, e : e + 1] * expert(x)`, gates of a softmax"""

    def forward(self, x):
        gates, out = softmax(self.gates[0](x), -1), 0
        for e, expert in enumerate(self.experts):
            out = out + gates[:, e : e + 1] * expert(x)
        return out


@structure(LOWERED)
class StraightThrough(ToAll):
    """all experts on all tokens, `hard + p - p.detach()` as gates, einsum over a stack"""

    def forward(self, x):
        p = softmax(self.gates[0](x), -1)[:, :E]
        gates = F.one_hot(p.argmax(-1), E).to(p.dtype) + p - p.detach()
        return torch.einsum("ted,te->td", torch.stack([expert(x) for expert in self.experts], 1), gates)


@structure(LOWERED)
class ForTwoTasks(ToAll):
    """MMoE: one stack of experts, weighed by two tasks' gates"""

    def forward(self, x):
        rows = torch.stack([expert(x) for expert in self.experts], 1)
        first, second = (torch.bmm(softmax(gate(x)[:, :E], -1).unsqueeze(1), rows).squeeze(1) for gate in self.gates)
        return first * torch.sigmoid(second)


@structure(LOWERED)
class InTwoLevels(ToAll):
    """PLE: a task's own experts and shared ones in one list; the next level's have other tokens each"""

    def forward(self, x):
        own, shared = (F.softmax(gate(x), -1) for gate in self.gates)
        for tokens, gates in (((x, x), own), ((torch.tanh(x), x * 2), shared)):
            rows = [e(tokens[0]) for e in self.experts] + [e(tokens[1]) for e in self.shared]
            x = torch.einsum("ted,te->td", torch.stack(rows, 1), gates)
        return x


@structure(LOWERED)
class AboveTheLast(ToAll):
    """`torch.where(gates < kth, 0, gates)`, a stack of all experts, `torch.matmul`"""

    def forward(self, x):
        gates = softmax(self.gates[0](x)[:, :E], -1)
        kept = torch.where(gates < gates.topk(K, -1).values[:, -1:], torch.zeros_like(gates), gates)
        rows = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.matmul(kept.unsqueeze(1), rows).squeeze(1)
