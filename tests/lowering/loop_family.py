"""A family of expert loops: every way of writing that a Spec names, and one way at a time to get it wrong."""

from __future__ import annotations

import dataclasses

import torch
from expert_loops import loop, no_grad, skip
from torch.nn import functional

E = 4

ACTIVATIONS = {
    "silu": functional.silu,
    "x*sigmoid": lambda h: h * torch.sigmoid(h),
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda h: torch.square(functional.relu(h)),
    "half silu": lambda h: functional.silu(h) * 0.5,
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """How one loop is written. ``defect`` is the one thing that is wrong with it, or None."""

    source: str = "hits"  # hits, exact hits, range, tested range, unique
    select: str = "mask"  # mask, eq, pairs, tuple
    weights: str = "fused"  # fused, matmul, interleaved, separate, up first, sliced, none
    activation: str = "silu"
    bias: bool = False
    scale: str = "after"  # after, before, none, score, both
    add: str = "index_add_"  # index_add_, carried, index_put_, onto, onto carried, twice
    defect: str | None = None


CHOICES = {
    "source": ["hits", "exact hits", "range", "tested range", "unique"],
    "select": ["mask", "eq", "pairs", "tuple"],
    "weights": ["fused", "matmul", "interleaved", "separate", "up first", "sliced", "none"],
    "activation": list(ACTIVATIONS),
    "bias": [False, True],
    "scale": ["after", "before", "none", "score", "both"],
    "add": ["index_add_", "carried", "index_put_", "onto", "onto carried", "twice"],
}

DEFECTS = [
    "added at the slot", "rows read at the slot", "reads the sum", "weight of the next expert", "weight of slot 0",
    "weights shuffled", "up reads other rows", "part of the rows", "second sum", "a counter", "late skip",
    "skips expert 1", "detached activation", "index changed before the loop", "mask changed before the loop",
    "hits of another index", "one expert too few", "sum is x", "another sum's positions", "part of the input axis",
    "softmax over rows", "rows doubled", "reads a view of the sum",
]  # fmt: skip


def valid(spec: Spec) -> bool:
    """Whether the parts of a Spec go together as a loop."""
    return spec.source != "unique" or spec.select != "mask"


def build(spec: Spec):
    """The function (x, logits, gate_up, down, bias_up, bias_down) that a Spec describes."""
    defect, activation = spec.defect, ACTIVATIONS[spec.activation]
    carried = "carried" in spec.add

    def positions(e, mask, index):
        if spec.select == "mask":
            return torch.where(mask[e])
        if spec.select == "eq":
            token, slot = torch.where(index == e)
        elif spec.select == "pairs":
            pairs = (index == e).nonzero()
            token, slot = pairs[:, 0], pairs[:, 1]
        else:
            token, slot = torch.nonzero(index == e, as_tuple=True)
        return slot, token

    def project(x, rows, e, gate_up, bias):
        n = gate_up.shape[1] // 2
        if spec.weights == "none":
            h = functional.linear(rows, gate_up[e], bias[e] if spec.bias else None)
            return activation(h)
        if spec.weights == "separate":
            gate = functional.linear(rows, gate_up[:, :n][e])
            up = rows @ gate_up[:, n:][e].T
        elif spec.weights == "sliced":
            gate, up = functional.linear(rows, gate_up[e][:n]), functional.linear(rows, gate_up[e][n:])
        else:
            h = functional.linear(rows, gate_up[e]) if spec.weights != "matmul" else rows @ gate_up.transpose(1, 2)[e]
            if spec.bias:
                h = h + bias[e]
            if spec.weights == "interleaved":
                gate, up = h[..., ::2], h[..., 1::2]
            elif spec.weights == "up first":
                up, gate = h.chunk(2, dim=-1)
            else:
                gate, up = h.chunk(2, dim=-1)
        if defect == "up reads other rows":
            up = functional.linear(x.flip(0)[:1].expand_as(rows) + rows, gate_up[e][:n])
        if defect == "detached activation":
            with no_grad():
                gate = activation(gate)
            return gate * up
        return activation(gate) * up

    def iteration(row, *values):
        state, values = (values[:1], values[1:]) if carried else ((), values)
        count = ()
        if defect == "a counter":
            count, values = values[:1], values[1:]
        out, other, mask, index, x, weights, scores, gate_up, down, bias_up, bias_down = values
        e = row[0] if spec.source in ("hits", "exact hits") else row
        out = state[0] if carried else out
        if spec.source == "hits":
            skip(e == E)
        if defect == "skips expert 1":
            skip(e == 1)
        slot, token = positions(e, mask, index)
        if spec.source == "tested range":
            skip(token.numel() == 0)
        rows = x[slot] if defect == "rows read at the slot" else x[token]
        if defect == "part of the rows":
            token, slot, rows = token[::2], slot[::2], rows[::2]
        if defect == "reads the sum":
            rows = rows + out[token]
        if defect == "reads a view of the sum":
            rows = rows + other[token]
        if defect == "part of the input axis":
            a = functional.silu(functional.linear(rows[:, :3], gate_up[e][:, :3]))[:, : down.shape[2]]
        else:
            a = project(x, rows, e, gate_up, bias_up)
        if defect == "softmax over rows":
            a = a * torch.softmax(a, 0)
        if defect == "weight of the next expert":
            w = weights[token, slot, None] * down[e - 1].sum()
        elif defect == "weight of slot 0":
            w = weights[token, 0, None]
        elif defect == "weights shuffled":
            w = weights[token.flip(0), slot, None]
        elif spec.scale == "score":
            w = scores[token, e, None]
        else:
            w = weights[token, slot].unsqueeze(-1)
        if spec.scale in ("before", "both"):
            a = a * w
        y = functional.linear(a, down[e], bias_down[e] if spec.bias and spec.scale != "both" else None)
        if spec.scale in ("after", "score", "both") or defect in (
            "weight of slot 0",
            "weights shuffled",
            "weight of the next expert",
        ):
            y = y * w
        if defect == "rows doubled":
            y = torch.cat([y, y])
            token = torch.cat([token, token])
        if defect == "another sum's positions":
            token = torch.where(index == 0)[0][:1].expand_as(token)
        if defect == "added at the slot":
            token = slot
        if carried:
            out = out.index_add(0, token, y)
        elif spec.add == "index_put_":
            out.index_put_((token,), y, accumulate=True)
        else:
            out.index_add_(0, token, y, alpha=2 if spec.add == "twice" else 1)
        if defect == "second sum":
            out = out + 1.0 if carried else out.index_add_(0, token, y)
        if defect == "late skip":
            skip(e == 0)
        return ((out,) if carried else ()) + tuple(c + 1.0 for c in count)

    def function(x, logits, gate_up, down, bias_up, bias_down):
        if spec.weights == "none":
            gate_up, bias_up = gate_up[:, ::2], bias_up[:, ::2]
        scores = torch.softmax(logits, -1)
        weights, index = torch.topk(scores, 2)
        if defect == "index changed before the loop":
            index = index.clone()  # autograd keeps topk's own
        out = torch.zeros_like(x)
        if "onto" in spec.add:
            out = x * 0.5
        other = out.view(-1, x.shape[1]) if defect == "reads a view of the sum" else x
        if defect == "sum is x":
            x = out
        classes = E + 1 if spec.source == "hits" else E
        mask = functional.one_hot(index, num_classes=classes).permute(2, 1, 0)
        counted = index.flip(0)[:3] if defect == "hits of another index" else index
        hit_mask = functional.one_hot(counted, num_classes=classes).permute(2, 1, 0)
        if spec.source in ("hits", "exact hits"):
            source = torch.greater(hit_mask.sum(dim=(-1, -2)), 0).nonzero()
        elif spec.source == "unique":
            source = torch.unique(counted)
        else:
            source = E - 1 if defect == "one expert too few" else E
        if defect == "index changed before the loop":
            index.add_(1).remainder_(E)
        if defect == "mask changed before the loop":
            mask.mul_(0)
        captures = (out, other, mask, index, x, weights, scores, gate_up, down, bias_up, bias_down)
        state = ((out,) if carried else ()) + ((x.new_zeros(()),) if defect == "a counter" else ())
        results = loop(iteration, source, state, captures)
        out = results[0] if carried else out
        return (out * 1.0, *results[-1:]) if defect == "a counter" else out * 1.0

    return function


def inputs_for(spec: Spec, seed: int = 0, tokens: int = 9):
    """Inputs of ``build(spec)``; float64, D = 6, N = 5."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return normal(tokens, 6), normal(tokens, E), normal(E, 10, 6), normal(E, 6, 5), normal(E, 10), normal(E, 6)
