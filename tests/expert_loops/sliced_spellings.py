"""More expert layers of module_spellings.py: experts on slices, lists and products of the tokens, and other forms met
in published code."""

from __future__ import annotations

import torch
from module_layers import over_range, spelled
from spellings import BROKEN, LOWERED, PROJECTED, D, E, K
from torch.nn.functional import gelu, linear, one_hot, relu, silu, softmax

# ----------------------------------------------------------------------------------------------------------------------
# Rows of repeated tokens, counts and slices
# ----------------------------------------------------------------------------------------------------------------------


@spelled(LOWERED)
def in_phases(x, moe):
    """`split`, all first projections joined with `torch.cat`, the activation, `split` again (JetMoE)"""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    sizes = torch.bincount(index.flatten(), minlength=E).tolist()
    h = torch.cat([linear(part, w) for part, w in zip(x[order // K].split(sizes), moe.up, strict=True)])
    h = silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
    y = torch.cat([linear(part, w) for part, w in zip(h.split(sizes), moe.down, strict=True)])
    return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])


@spelled(LOWERED)
def repeat_interleave(x, moe):
    """`x.repeat_interleave(K)`, `y[flat == i] = expert(rows[flat == i])`, weighted sum (DeepSeek-MoE training)"""
    weight, index = moe.route(x)
    flat = index.view(-1)
    rows = x.repeat_interleave(K, dim=0)
    y = torch.empty_like(rows)
    for i, expert in enumerate(moe.experts):
        y[flat == i] = expert(rows[flat == i])
    return (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


@spelled(LOWERED)
def moe_infer(x, moe):
    """`counts.cpu().numpy()`, slices of the sorted tokens, `if count == 0: continue` (DeepSeek-V2's moe_infer)"""
    weight, index = moe.route(x)
    counts = index.new_zeros((index.shape[0], len(moe.experts)))
    counts.scatter_(1, index, 1)
    tokens_per_expert = counts.sum(dim=0)
    idxs = index.view(-1).argsort()
    sorted_tokens = x[idxs // index.shape[1]]
    tokens_per_expert = tokens_per_expert.cpu().numpy()
    outputs = []
    start_idx = 0
    for i, num_tokens in enumerate(tokens_per_expert):
        end_idx = start_idx + num_tokens
        if num_tokens == 0:
            continue
        expert = moe.experts[i]
        tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
        expert_out = expert(tokens_for_this_expert)
        outputs.append(expert_out)
        start_idx = end_idx
    outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
    new_x = torch.empty_like(outs)
    new_x[idxs] = outs
    return (
        new_x.view(*index.shape, -1)
        .type(weight.dtype)
        .mul_(weight.unsqueeze(dim=-1))
        .sum(dim=1)
        .type(new_x.dtype)
    )


@spelled(LOWERED)
def moe_infer_as_list(x, moe):
    """the same with `counts.tolist()`"""
    weight, index = moe.route(x)
    counts = index.new_zeros((len(x), E)).scatter_(1, index, 1).sum(dim=0)
    idxs = index.view(-1).argsort()
    sorted_tokens = x[idxs // index.shape[1]]
    outputs, start = [], 0
    for i, count in enumerate(counts.tolist()):
        end = start + count
        if count == 0:
            continue
        outputs.append(moe.experts[i](sorted_tokens[start:end]))
        start = end
    outs = torch.cat(outputs, dim=0) if outputs else sorted_tokens.new_empty(0)
    back = torch.empty_like(outs)
    back[idxs] = outs
    return (back.view(*index.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


@spelled(LOWERED)
def counts_and_where(x, moe):
    """`counts = bincount(…).tolist()`, `if counts[i] == 0: continue`, `torch.where(indices == i)` (DeepSeek-V3)"""
    weight, index = moe.route(x)
    y = torch.zeros_like(x)
    counts = torch.bincount(index.flatten(), minlength=E).tolist()
    for i in range(E):
        if counts[i] == 0:
            continue
        token, top = torch.where(index == i)
        y[token] += moe.experts[i](x[token]) * weight[token, top, None]
    return y


@spelled(LOWERED)
def split_modules(x, moe):
    """`torch.split(sorted, counts.tolist())`, `[expert(part) for …]`, `torch.cat`, un-sorted by `index_add_`"""
    weight, index = moe.route(x)
    order = torch.argsort(index.view(-1), stable=True)
    counts = torch.bincount(index.view(-1), minlength=E)
    parts = torch.split(x[order // K], counts.tolist(), dim=0)
    y = torch.cat([expert(part) for expert, part in zip(moe.experts, parts)])  # noqa: B905
    out = torch.zeros_like(x)
    return out.index_add_(0, order // K, y * weight.view(-1)[order].unsqueeze(-1))


@spelled(LOWERED)
def running_offsets(x, moe):
    """slices by `cumsum(counts).tolist()`, written into an empty tensor, un-sorted by an inverse permutation"""
    weight, index = moe.route(x)
    order = index.view(-1).argsort(stable=True)
    ends = torch.bincount(index.view(-1), minlength=E).cumsum(0).tolist()
    rows = x[order // K]
    y, start = torch.empty_like(rows), 0
    for expert, end in zip(moe.experts, ends):  # noqa: B905
        y[start:end] = expert(rows[start:end])
        start = end
    y = y[order.argsort()].view(len(x), K, D)
    return (y * weight.unsqueeze(-1)).sum(1)


@spelled(LOWERED)
def lists_of_rows(x, moe):
    """a dictionary of index lists, `torch.cat` of the rows, one `index_add`"""
    weight, index = moe.route(x)
    chosen = {e: (index == e).nonzero(as_tuple=True) for e in range(E)}
    rows, tokens = [], []
    for e, (token, slot) in chosen.items():
        rows.append(moe.experts[e](x[token]) * weight[token, slot, None])
        tokens.append(token)
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), torch.cat(rows))


@spelled(BROKEN)
def python_lists(x, moe):
    """lists of token numbers made in Python from `index.tolist()`"""
    weight, index = moe.route(x)
    tokens = {e: [] for e in range(E)}
    for t, row in enumerate(index.tolist()):
        for e in row:
            tokens[e].append(t)
    out = torch.zeros_like(x)
    for e, chosen in tokens.items():
        if chosen:
            token = torch.tensor(chosen)
            scale = weight[token][index[token] == e]
            out.index_add_(0, token, moe.experts[e](x[token]) * scale[:, None])
    return out


@spelled(LOWERED)
def reduced_by_scatter(x, moe):
    """`out = out.scatter_reduce(0, token[:, None].expand(-1, D), rows, "sum")`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        rows = moe.experts[e](x[token]) * weight[token, slot, None]
        out = out.scatter_reduce(0, token[:, None].expand(-1, D), rows, "sum")
    return out


@spelled(LOWERED)
def mask_of_tokens(x, moe):
    """`mask = zeros(T, E, bool).scatter_(1, index, True)`, `token = mask[:, e].nonzero().squeeze(-1)`, `if token.numel() == 0: continue`"""  # noqa: E501
    weight, index = moe.route(x)
    mask = torch.zeros(len(x), E, dtype=torch.bool).scatter_(1, index, True)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = mask[:, e].nonzero().squeeze(-1)
        if token.numel() == 0:
            continue
        out[token] += gates[token, e].unsqueeze(-1) * expert(x[token])
    return out


# ----------------------------------------------------------------------------------------------------------------------
# Slots, gathers and batched products
# ----------------------------------------------------------------------------------------------------------------------


@spelled(LOWERED)
def slots_around_modules(x, moe):
    """`for k in range(K): for i, expert in enumerate(self.experts)`, `mask = index[:, k] == i`, `if mask.any()`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        for i, expert in enumerate(moe.experts):
            mask = index[:, k] == i
            if mask.any():
                out[mask] += weight[:, k][mask].unsqueeze(1) * expert(x[mask])
    return out


@spelled(LOWERED)
def boolean_masks(x, moe):
    """`mask = (index == i).any(-1)`, `out[mask] += expert(x[mask]) * gates[mask, i, None]`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = (index == i).any(dim=-1)
        out[mask] += expert(x[mask]) * gates[mask, i].unsqueeze(-1)
    return out


@spelled(LOWERED)
def boolean_masks_tested(x, moe):
    """the same, `if mask.any():` around the body (makeMoE)"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(-1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = (index == i).any(dim=-1)
        if mask.any():
            rows = expert(x[mask]) * gates[mask, i].unsqueeze(1)
            out[mask] += rows
    return out


@spelled(LOWERED)
def bmm_over_experts(x, moe):
    """`torch.bmm(x.expand(E, …), w1)`, masked by gates: Llama-4's dense form"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    rows = (x[None] * gates.T[..., None]).reshape(E, -1, D)
    h = silu(torch.bmm(rows, moe.w1)) * torch.bmm(rows, moe.w3)
    return torch.bmm(h, moe.w2).sum(0)


@spelled(LOWERED)
def einsum_over_capacity(x, moe):
    """einsum with dispatch and combine masks [T, E, C], a capacity (GShard)"""
    weight, index = moe.route(x)
    hot = one_hot(index, E)
    place = (hot.flatten(0, 1).cumsum(0).view_as(hot) - 1).masked_fill(hot == 0, -1)
    kept = (place >= 0) & (place < moe.capacity)
    slots = one_hot(place.clamp(0, moe.capacity - 1), moe.capacity).to(x.dtype) * kept.unsqueeze(-1)
    dispatch = slots.sum(1)
    combine = (slots * weight[:, :, None, None]).sum(1)
    rows = torch.einsum("tec,td->ecd", dispatch, x)
    h = silu(torch.einsum("ecd,edn->ecn", rows, moe.w1)) * torch.einsum("ecd,edn->ecn", rows, moe.w3)
    return torch.einsum("tec,ecd->td", combine, torch.einsum("ecn,end->ecd", h, moe.w2))


@spelled(LOWERED)
def gathered_per_slot(x, moe):
    """`for k in range(K)`: weights gathered with `w1[index[:, k]]`, `torch.bmm`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        e = index[:, k]
        h = silu(torch.bmm(x[:, None], moe.w1[e])) * torch.bmm(x[:, None], moe.w3[e])
        out = out + torch.bmm(h, moe.w2[e])[:, 0] * weight[:, k, None]
    return out


@spelled(LOWERED)
def biases_of_one_tensor(x, moe):
    """`x @ w1[e] + b1[e]`, relu, `@ w2[e] + b2[e]`: no gating"""
    return over_range(x, moe, lambda rows, e: relu(rows @ moe.w1[e] + moe.b1[e]) @ moe.w2[e] + moe.b2[e])


@spelled(LOWERED)
def three_tensors(x, moe):
    """`w1[e]`, `w3[e]`, `w2[e]` of three tensors, `(x @ w1) * gelu(x @ w3)`"""
    return over_range(x, moe, lambda rows, e: ((rows @ moe.w1[e]) * gelu(rows @ moe.w3[e])) @ moe.w2[e])


# ----------------------------------------------------------------------------------------------------------------------
# Norms, shared experts, capacities, choices
# ----------------------------------------------------------------------------------------------------------------------


@spelled(LOWERED)
def norm_after_the_expert(x, moe):
    """a norm of each expert's rows, one for all experts, before the weight"""

    def expert(rows, e):
        return moe.norm(silu(rows @ moe.w1[e]) * (rows @ moe.w3[e]) @ moe.w2[e])

    return over_range(x, moe, expert)


@spelled(LOWERED)
def norm_of_each_expert(x, moe):
    """the same, a norm of its own for each expert"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, (expert, norm) in enumerate(zip(moe.experts, moe.norms)):  # noqa: B905
        token, slot = torch.where(index == i)
        out.index_add_(0, token, norm(expert(x[token])) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def shared_module(x, moe):
    """ModuleList and a shared expert besides, with the tokens flattened from [B, T, D]"""
    batched = x.view(2, -1, D)
    flat = batched.view(-1, D)
    weight, index = moe.route(flat)
    out = torch.zeros_like(flat)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out[token] += expert(flat[token]) * weight[token, slot, None]
    return out.view(batched.shape) + moe.shared(batched)


@spelled(LOWERED)
def weight_on_the_input(x, moe):
    """the routing weight on the expert's input (Llama 4)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out.index_add_(0, token, expert(x[token] * weight[token, slot, None]))
    return out


@spelled(LOWERED)
def switch_with_capacity(x, moe):
    """top-1 with a capacity: `token = torch.where(index == i)[0][:capacity]`, the rest passes through"""
    weight, index = softmax(moe.gate(x), -1).max(-1)
    out = x.clone()
    for i, expert in enumerate(moe.experts):
        token = torch.where(index == i)[0][: moe.capacity]
        out[token] = expert(x[token])
    return out * weight[:, None]


@spelled(LOWERED)
def expert_choice_of_modules(x, moe):
    """expert choice: `token = scores[:, i].topk(C)`, ModuleList"""
    scores = softmax(moe.gate(x), -1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        best, token = scores[:, i].topk(moe.capacity)
        out.index_add_(0, token, expert(x[token]) * best[:, None])
    return out


@spelled(LOWERED)
def dropped_by_threshold(x, moe):
    """experts whose weight is under a threshold are left out: `torch.where((index == i) & (weight > 0.3))`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where((index == i) & (weight > 0.3))
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def switch_capacity(x, moe):
    """`one_hot(argmax) * (one_hot.cumsum(0) <= capacity)`, over hits, a ModuleDict (Switch Transformers)"""
    p = softmax(moe.gate(x), -1).view(2, -1, E)
    chosen = one_hot(p.argmax(-1), E)
    chosen = chosen * (chosen.cumsum(-2) <= 1)
    mask = chosen.view(-1, 1, E).permute(2, 1, 0)
    weight = p.max(-1).values.view(-1, 1)
    out = torch.zeros_like(x)
    for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[e].squeeze(0))
        rows = x[None, token].reshape(-1, x.shape[-1])
        out.index_add_(0, token, moe.named[f"expert_{e[0]}"](rows) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def identity_experts(x, moe):
    """zero-computation experts: the last numbers pass x on (LongCat)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, E).permute(2, 1, 0)
    for hit in mask.sum((1, 2)).nonzero():
        e = int(hit.item())
        slot, token = torch.where(mask[e])
        rows = x[token]
        if e < E - 1:
            rows = silu(rows @ moe.w1[e]) * (rows @ moe.w3[e]) @ moe.w2[e]
        out.index_add_(0, token, rows * weight[token, slot, None])
    return out


@spelled(LOWERED)
def identity_experts_by_else(x, moe):
    """the same with `if e < n: … else: rows = x[token]`, more weights than experts with weights"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(mask[e])
        if e < E - 2:
            rows = moe.experts[e](x[token])
        else:
            rows = x[token]
        out.index_add_(0, token, rows * weight[token, slot, None])
    return out


@spelled(LOWERED)
def top_1_by_argmax(x, moe):
    """top-1 by `argmax`, `out[chosen] = expert(x[chosen]) * p[chosen, i, None]`"""
    p = softmax(moe.gate(x), -1)
    index = p.argmax(-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        chosen = index == i
        out[chosen] = expert(x[chosen]) * p[chosen, i, None]
    return out


@spelled(LOWERED)
def numpy_unique(x, moe):
    """`for e in np.unique(index.numpy())`"""
    import numpy

    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in numpy.unique(index.numpy()):
        token, slot = torch.where(index == int(e))
        out.index_add_(0, token, moe.experts[int(e)](x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def only_hit_modules(x, moe):
    """`for e in index.unique().tolist(): self.experts[e]`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, moe.experts[e](x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def set_of_hit_modules(x, moe):
    """`for e in sorted(set(index.view(-1).tolist()))`, ModuleList"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in sorted(set(index.view(-1).tolist())):
        token, slot = torch.where(index == e)
        out[token] += moe.experts[e](x[token]) * weight[token, slot, None]
    return out


@spelled(BROKEN)
def token_by_token(x, moe):
    """a loop over tokens and slots: `self.experts[index[t, k]](x[t])`"""
    weight, index = moe.route(x)
    rows = []
    for t in range(4):
        rows.append(sum(weight[t, k] * moe.experts[int(index[t, k])](x[t]) for k in range(K)))
    return torch.stack(rows)


@spelled(LOWERED)
def masks_of_slots(x, moe):
    """a token's slots as masks that `|` joins, and a weight for each token that both add to"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        first, second = index[:, 0] == e, index[:, 1] == e
        chosen = first | second
        if not chosen.any():
            continue
        scale = x.new_zeros(len(x))
        scale[first] += weight[first, 0]
        scale[second] += weight[second, 1]
        out[chosen] += moe.experts[e](x[chosen]) * scale[chosen].unsqueeze(-1)
    return out


@spelled(PROJECTED)
def weights_between_pieces(x, moe):
    """sorted rows and their weights in pieces, and the weight between the projections (Megatron's experts)"""
    weight, index = moe.route(x)
    order = index.reshape(-1).argsort(stable=True)
    token, counts = order // K, index.reshape(-1).bincount(minlength=E).tolist()
    pieces = zip(moe.experts, x[token].split(counts), weight.reshape(-1)[order].split(counts), strict=True)
    rows = [expert.w2(silu(expert.w1(piece)) * expert.w3(piece) * scale[:, None]) for expert, piece, scale in pieces]
    return torch.zeros_like(x).index_add(0, token, torch.cat(rows))
