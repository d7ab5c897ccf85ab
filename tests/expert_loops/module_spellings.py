"""Expert layers whose experts are modules or parameters of their own, in a list that the iterations go through.

Each function takes x [T, D] and a :class:`Layer`, and says in its docstring how it is spelled. What becomes of it is
written beside it, as in spellings.py.
"""

from __future__ import annotations

import torch
from module_layers import MODULES, spelled  # noqa: F401 (with all that are spelled here)
from spellings import LOWERED, D, E, K
from torch.nn.functional import linear, one_hot, silu, softmax

# ----------------------------------------------------------------------------------------------------------------------
# A list of modules
# ----------------------------------------------------------------------------------------------------------------------


@spelled(LOWERED)
def mixtral_before_fusing(x, moe):
    """ModuleList, `for e in range(E): layer = self.experts[e]`, `torch.where(mask[e])`, `index_add_`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=moe.num_experts).permute(2, 1, 0)
    for e in range(moe.num_experts):
        layer = moe.experts[e]
        slot, token = torch.where(mask[e])
        state = x[None, token].reshape(-1, D)
        out.index_add_(0, token, layer(state) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def mixtral_over_hits(x, moe):
    """the same over `mask.sum(…).nonzero()`: `self.experts[e]` with the tensor e"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=moe.num_experts).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, moe.experts[e](x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def enumerate_modules(x, moe):
    """`for i, expert in enumerate(self.experts)`, `out[token] += weight * expert(x[token])`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out[token] += weight[token, slot, None] * expert(x[token])
    return out


@spelled(LOWERED)
def enumerate_and_any(x, moe):
    """the same, `if mask.any():` around the body"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = index == i
        if mask.any():
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weight[token, slot].unsqueeze(-1))
    return out


@spelled(LOWERED)
def deepseek_with_a_test(x, moe):
    """ModuleList, `if token_indices.numel() > 0:` around the body (DeepSeek-V3 in transformers)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=len(moe.experts)).permute(2, 0, 1)
    for e in range(len(moe.experts)):
        expert = moe.experts[e]
        token, slot = torch.where(mask[e])
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weight[token, slot].unsqueeze(-1))
    return out


@spelled(LOWERED)
def biased_modules(x, moe):
    """ModuleList of projections with biases"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.biased):
        token, slot = torch.where(index == i)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def plain_mlps(x, moe):
    """ModuleList of `nn.Sequential(Linear, GELU, Linear)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.mlps):
        token, slot = torch.where(index == i)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def modules_by_name(x, moe):
    """ModuleDict, `self.experts[f"expert_{e}"]` for e in range(E)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, moe.named[f"expert_{e}"](x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def modules_by_name_over_hits(x, moe):
    """the same over hits, `f"expert_{e[0]}"` of a tensor (Switch Transformers, NLLB-MoE)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=E).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[e].squeeze(0))
        out.index_add_(0, token, moe.named[f"expert_{e[0]}"](x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def parameter_lists(x, moe):
    """ParameterList: `F.linear(x[token], self.up[e])`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, up = linear(x[token], moe.up[e]).chunk(2, dim=-1)
        out.index_add_(0, token, linear(silu(gate) * up, moe.down[e]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def zipped_parameters(x, moe):
    """`for e, (w_up, w_down) in enumerate(zip(self.up, self.down))`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, (w_up, w_down) in enumerate(zip(moe.up, moe.down)):  # noqa: B905
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_up.T).chunk(2, dim=-1)
        out.index_put_((token,), (silu(gate) * up) @ w_down.T * weight[token, slot, None], accumulate=True)
    return out


@spelled(LOWERED)
def replacing_modules(x, moe):
    """ModuleList, `out = out.index_add(…)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def while_over_modules(x, moe):
    """a while loop over a ModuleList"""
    weight, index = moe.route(x)
    out, e = torch.zeros_like(x), 0
    while e < len(moe.experts):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, moe.experts[e](x[token]) * weight[token, slot, None])
        e += 1
    return out


@spelled(LOWERED)
def one_expert_a_call(x, moe):
    """a method for one expert, called in a loop"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)

    def run(i, expert):
        token, slot = torch.where(index == i)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])

    for i, expert in enumerate(moe.experts):
        run(i, expert)
    return out


@spelled(LOWERED)
def generator_of_parts(x, moe):
    """a generator of (token, rows), added up by its caller"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)

    def parts():
        for i, expert in enumerate(moe.experts):
            token, slot = torch.where(index == i)
            yield token, expert(x[token]) * weight[token, slot, None]

    for token, rows in parts():
        out.index_add_(0, token, rows)
    return out


@spelled(LOWERED)
def sum_of_a_comprehension(x, moe):
    """`sum(expert(x) * gates[:, i, None] for i, expert in enumerate(self.experts))`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter_(1, index, weight)
    return sum(expert(x) * gates[:, i, None] for i, expert in enumerate(moe.experts))


@spelled(LOWERED)
def stacked_outputs(x, moe):
    """`torch.stack([expert(x) for expert in self.experts], 1)`, weighted and summed"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    every = torch.stack([expert(x) for expert in moe.experts], dim=1)
    return (every * gates.unsqueeze(-1)).sum(dim=1)


@spelled(LOWERED)
def stacked_and_gathered(x, moe):
    """the same, the chosen ones taken with `gather`"""
    weight, index = moe.route(x)
    every = torch.stack([expert(x) for expert in moe.experts], dim=1)
    chosen = every.gather(1, index.unsqueeze(-1).expand(-1, -1, D))
    return (chosen * weight.unsqueeze(-1)).sum(1)


@spelled(LOWERED)
def stacked_einsum(x, moe):
    """`torch.einsum("te,ted->td", gates, torch.stack([…], 1))`, gates the softmax of logits, -inf where not chosen"""
    logits = moe.gate(x)
    values, index = logits.topk(K, -1)
    gates = softmax(torch.full_like(logits, float("-inf")).scatter(-1, index, values), -1)
    return torch.einsum("te,ted->td", gates, torch.stack([expert(x) for expert in moe.experts], 1))


@spelled(LOWERED)
def masked_dense_modules(x, moe):
    """all experts on all tokens, `out += expert(x) * (weight * (index == i)).sum(-1, keepdim=True)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        out += expert(x) * (weight * (index == i)).sum(-1, keepdim=True)
    return out


@spelled(LOWERED)
def masked_by_where(x, moe):
    """the same, `out = out + torch.where((index == i).any(-1, keepdim=True), expert(x) * gate, 0)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        gate = (weight * (index == i)).sum(-1, keepdim=True)
        out = out + torch.where((index == i).any(-1, keepdim=True), expert(x) * gate, 0)
    return out


@spelled(LOWERED)
def masked_slot_by_slot(x, moe):
    """the same in a loop over slots: `torch.where((index[:, k] == i)[:, None], expert(x) * weight[:, k, None], 0)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(moe.top_k):
        for i, expert in enumerate(moe.experts):
            out += torch.where((index[:, k] == i)[:, None], expert(x) * weight[:, k, None], 0)
    return out


@spelled(LOWERED)
def stacked_and_summed(x, moe):
    """`torch.stack([expert(x) * gates[:, i, None] for i, expert in …]).sum(0)`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    return torch.stack([expert(x) * gates[:, i, None] for i, expert in enumerate(moe.experts)]).sum(0)


@spelled(LOWERED)
def gates_cut_into_columns(x, moe):
    """the same, gates and experts side by side: `for expert, gate in zip(self.experts, gates.unbind(-1))`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    return sum(expert(x) * gate.unsqueeze(-1) for expert, gate in zip(moe.experts, gates.unbind(-1), strict=True))


@spelled(LOWERED)
def gates_cut_into_chunks(x, moe):
    """the same, `zip(self.experts, gates.split(1, dim=-1))`, `out = out + expert(x) * gate`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for expert, gate in zip(moe.experts, gates.split(1, dim=-1), strict=True):
        out = out + expert(x) * gate
    return out


@spelled(LOWERED)
def rows_are_copied(x, moe):
    """top-1, `token = torch.where(index == i)[0]`, `out.index_copy_(0, token, expert(x[token]))`"""
    weight, index = softmax(moe.gate(x), -1).max(-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token = torch.where(index == i)[0]
        out.index_copy_(0, token, expert(x[token]))
    return out * weight[:, None]


import sliced_spellings  # noqa: E402, F401 (adds to MODULES)
