"""More of structures.py: the same layers in statements that have a plainer form (lowering/experts/plain_forms.py), and
near misses of them, where experts do not do what those of a mixture do."""

from __future__ import annotations

import functools
import operator

import torch
from module_layers import SwiGLU
from spellings import CAPTURED, LOWERED, PROJECTED, D, E, K, N
from structures import Routed, structure
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import one_hot, relu, silu


class Stacked(nn.Module):
    """The weights of all experts in one tensor each."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, N)), nn.Parameter(torch.randn(E, N, D))
        self.w3 = nn.Parameter(torch.randn(E, D, N))

    route = Routed.route

    def gates(self, x):
        weight, index = self.route(x)
        return torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)


@structure(LOWERED)
class VmapOfAll(Stacked):
    """`torch.vmap` over stacked weights, x of the enclosing function, einsum with the gates"""

    def forward(self, x):
        y = torch.vmap(lambda w1, w3, w2: (silu(x @ w1) * (x @ w3)) @ w2)(self.w1, self.w3, self.w2)
        return torch.einsum("etd,te->td", y, self.gates(x))


@structure(LOWERED)
class VmapOfTokens(Stacked):
    """`torch.vmap` over tokens, weights gathered for each in it"""

    def forward(self, x):
        weight, index = self.route(x)

        def one(row, e, w):
            h = silu(torch.einsum("d,kdn->kn", row, self.w1[e])) * torch.einsum("d,kdn->kn", row, self.w3[e])
            return torch.einsum("kn,knd,k->d", h, self.w2[e], w)

        return torch.vmap(one)(x, index, weight)


@structure(LOWERED)
class VmapOfModules(Routed):
    """parameters of the modules stacked, `torch.func.vmap` of `torch.func.functional_call`, `in_dims=(0, None)`"""

    def forward(self, x):
        weight, index = self.route(x)
        names = [name for name, _ in self.experts[0].named_parameters()]
        stacked = {name: torch.stack([e.get_parameter(name) for e in self.experts]) for name in names}
        call = functools.partial(torch.func.functional_call, self.experts[0])
        y = torch.func.vmap(lambda weights, rows: call(weights, (rows,)), in_dims=(0, None))(stacked, x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        return (y * gates.t()[..., None]).sum(0)


@structure(LOWERED)
class VmapWithBiases(Stacked):
    """`torch.vmap` of `F.linear` with biases, a part of what it gives, and a norm of each row"""

    def __init__(self):
        super().__init__()
        self.b1 = nn.Parameter(torch.randn(E, 2 * N))
        self.up = nn.Parameter(torch.randn(E, 2 * N, D))

    def forward(self, x):
        weight, token = self.gate(x).softmax(-1).t().topk(3, -1)

        def one(rows, up, bias, down):
            a, b = F.linear(rows, up, bias).chunk(2, dim=-1)
            return (silu(a) * b[:, None, :].squeeze(1)) @ down

        y = torch.vmap(one)(x[token], self.up, self.b1, self.w2)
        return torch.zeros_like(x).index_add(0, token.flatten(), (y * weight[..., None]).flatten(0, 1))


@structure(LOWERED)
class SelectedWeights(Stacked):
    """`w.index_select(0, index.view(-1)).view(T, K, D, N)`, `torch.matmul`"""

    def forward(self, x):
        weight, index = self.route(x)
        w1 = self.w1.index_select(0, index.view(-1)).view(*index.shape, D, N)
        w2 = self.w2.index_select(0, index.view(-1)).view(*index.shape, N, D)
        return (weight[..., None] * (relu(x[:, None, None, :] @ w1) @ w2).squeeze(2)).sum(1)


@structure(LOWERED)
class GatheredWeights(Stacked):
    """top-1: `torch.gather(w, 0, index[:, None, None].expand(-1, D, N))`, bmm"""

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).max(-1)
        w1 = torch.gather(self.w1, 0, index[:, None, None].expand(-1, D, N))
        w2 = torch.gather(self.w2, 0, index[:, None, None].expand(-1, N, D))
        return torch.bmm(relu(torch.bmm(x.unsqueeze(1), w1)), w2).squeeze(1) * weight[:, None]


@structure(LOWERED)
class OneHotWeights(Stacked):
    """weights of each slot by `einsum("tke,edn->tkdn", one_hot(index), w)`"""

    def forward(self, x):
        weight, index = self.route(x)
        chosen = one_hot(index, E).to(x.dtype)
        w1 = torch.einsum("tke,edn->tkdn", chosen, self.w1)
        w2 = torch.einsum("tke,end->tknd", chosen, self.w2)
        return torch.einsum("tkn,tknd,tk->td", relu(torch.einsum("td,tkdn->tkn", x, w1)), w2, weight)


@structure(LOWERED)
class Tensordots(Stacked):
    """`torch.tensordot(x, w1, dims=([1], [1]))`, `gates.unsqueeze(1) @ y`"""

    def forward(self, x):
        h = relu(torch.tensordot(x, self.w1, dims=([1], [1])))
        return (self.gates(x).unsqueeze(1) @ torch.einsum("ten,end->ted", h, self.w2)).squeeze(1)


@structure(LOWERED)
class Addcmul(Routed):
    """`out = torch.addcmul(out, expert(x), gates[:, e : e + 1])`"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = torch.addcmul(out, expert(x), gates[:, e : e + 1])
        return out


@structure(LOWERED)
class SumsGoOnWhere(Routed):
    """`out = torch.where(chosen, out + gate * expert(x), out)`, the gate of `torch.where(index == e, weight, 0)`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = index == e
            gate = torch.where(chosen, weight, torch.zeros_like(weight)).sum(-1, keepdim=True)
            out = torch.where(chosen.any(-1, keepdim=True), out + gate * expert(x), out)
        return out


@structure(LOWERED)
class MaskedFillGates(Routed):
    """`out = 0`, `out += weight.masked_fill(index != e, 0).sum(-1, keepdim=True) * expert(x)`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = 0
        for e, expert in enumerate(self.experts):
            out += weight.masked_fill(index != e, 0.0).sum(-1, keepdim=True) * expert(x)
        return out


@structure(LOWERED)
class MasksOfSlots(Routed):
    """for each slot and expert: `out = out + (index[:, k] == e)[:, None] * weight[:, k : k + 1] * expert(x)`"""

    def forward(self, x):
        weight, index = self.route(x)
        out = 0
        for k in range(K):
            for e, expert in enumerate(self.experts):
                out = out + (index[:, k] == e).unsqueeze(-1) * weight[:, k : k + 1] * expert(x)
        return out


@structure(LOWERED)
class Reduced(Routed):
    """`functools.reduce(operator.add, (expert(x) * gate for …))`: a sum without zeros to begin with"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        return functools.reduce(operator.add, (e(x) * g for e, g in zip(self.experts, gates.split(1, -1), strict=True)))


@structure(LOWERED)
class ScaledMixture(nn.Module):
    """low-rank additions of all experts: `out = out + up(down(x)) * gates[:, e].unsqueeze(-1) * scale`"""

    def __init__(self):
        super().__init__()
        self.base, self.gate = nn.Linear(D, D), nn.Linear(D, E, bias=False)
        self.down = nn.ModuleList(nn.Linear(D, 3, bias=False) for _ in range(E))
        self.up = nn.ModuleList(nn.Linear(3, D, bias=False) for _ in range(E))

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, index = probs.topk(K, -1)
        gates = torch.zeros_like(probs).scatter(1, index, weight)
        out = self.base(x)
        for e in range(E):
            out = out + self.up[e](self.down[e](x)) * gates[:, e].unsqueeze(-1) * 2.0
        return out


@structure(LOWERED)
class GatesByEinsum(Routed):
    """gates by `einsum("tke,tk->te", one_hot(index), weight)`"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.einsum("tke,tk->te", one_hot(index, E).to(x.dtype), weight)
        return torch.einsum("te,etd->td", gates, torch.stack([expert(x) for expert in self.experts]))


@structure(LOWERED)
class RepeatedIndex(Routed):
    """`torch.cat([expert(x).unsqueeze(1) …], 1).gather(1, index.unsqueeze(-1).repeat(1, 1, D))`"""

    def forward(self, x):
        weight, index = self.route(x)
        every = torch.cat([expert(x).unsqueeze(1) for expert in self.experts], dim=1)
        return torch.sum(every.gather(1, index.unsqueeze(-1).repeat(1, 1, D)) * weight.unsqueeze(2), dim=1)


# ----------------------------------------------------------------------------------------------------------------------
# Near misses
# ----------------------------------------------------------------------------------------------------------------------


class EachExpert(Routed):
    def forward(self, x):
        weight, index = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, self.one(e, x[token], weight[token, slot, None]))
        return out


@structure(LOWERED)
class TwoOfEach(EachExpert):
    """two numbers have one expert: `self.experts[e // 2]`"""

    def one(self, e, rows, weight):
        return self.experts[e // 2](rows) * weight


@structure(LOWERED)
class NextExpert(EachExpert):
    """`self.experts[(e + 1) % E]`"""

    def one(self, e, rows, weight):
        return self.experts[(e + 1) % E](rows) * weight


@structure(LOWERED)
class DetachedWeight(EachExpert):
    """`expert(rows) * weight.detach()`"""

    def one(self, e, rows, weight):
        return self.experts[e](rows) * weight.detach()


@structure(CAPTURED)
class DetachedRows(EachExpert):
    """`expert(rows.detach()) * weight`"""

    def one(self, e, rows, weight):
        return self.experts[e](rows.detach()) * weight


@structure(PROJECTED)
class Doubled(EachExpert):
    """`expert(expert(rows)) * weight`"""

    def one(self, e, rows, weight):
        return self.experts[e](self.experts[e](rows)) * weight


@structure(LOWERED)
class OfTheWeight(EachExpert):
    """the sum of the expert's rows and the weight: `expert(rows) + weight`"""

    def one(self, e, rows, weight):
        return self.experts[e](rows) + weight


@structure(CAPTURED)
class LessTheMean(EachExpert):
    """`expert(rows - rows.mean(0)) * weight`"""

    def one(self, e, rows, weight):
        return self.experts[e](rows - rows.mean(0)) * weight


@structure(LOWERED)
class MostOfAll(Routed):
    """the largest of the experts' rows: `torch.stack([expert(x) * gate …]).amax(0)`"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        return torch.stack([expert(x) * gates[:, e, None] for e, expert in enumerate(self.experts)]).amax(0)


@structure(LOWERED)
class AllAndGates(Routed):
    """`(1 + gate) * expert(x)`: no token leaves an expert out"""

    def forward(self, x):
        weight, index = self.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        return sum((1 + gates[:, e, None]) * expert(x) for e, expert in enumerate(self.experts))


@structure(CAPTURED)
class VmapOfMeans(Stacked):
    """`torch.vmap` of something that looks at all rows: `rows - rows.mean(0)`"""

    def forward(self, x):
        weight, token = self.gate(x).softmax(-1).t().topk(3, -1)
        y = torch.vmap(lambda rows, w1, w2: relu((rows - rows.mean(0)) @ w1) @ w2)(x[token], self.w1, self.w2)
        return torch.zeros_like(x).index_add(0, token.flatten(), (y * weight[..., None]).flatten(0, 1))


@structure(CAPTURED)
class NoExpertOfItsOwn(nn.Module):
    """an ensemble in words of a mixture: a sum of gated layers that read one another"""

    def __init__(self):
        super().__init__()
        self.gate, self.layers = nn.Linear(D, E), nn.ModuleList(SwiGLU() for _ in range(E))

    def forward(self, x):
        gates = relu(self.gate(x))
        for e, layer in enumerate(self.layers):
            x = torch.addcmul(x, layer(x), gates[:, e : e + 1])
        return x
