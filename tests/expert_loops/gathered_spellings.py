"""More expert layers of module_spellings.py: routing, dispatch and experts as people write them where no loop over
`torch.where(index == e)` stands."""

from __future__ import annotations

import collected_spellings  # noqa: F401 (these come first)
import torch
from module_layers import over_range, spelled
from spellings import BROKEN, CAPTURED, LOWERED, PROJECTED, D, E, K
from torch.nn.functional import conv1d, gelu, linear, one_hot, silu, softmax


@spelled(LOWERED)
def lists_of_parameters(x, moe):
    """ParameterList of each weight: `for e, (up, down) in enumerate(zip(self.up, self.down))`, `F.linear`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, (up, down) in enumerate(zip(moe.up, moe.down, strict=True)):
        token, slot = torch.where(index == e)
        gate, value = linear(x[token], up).chunk(2, -1)
        out.index_add_(0, token, linear(silu(gate) * value, down) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def einsum_over_all(x, moe):
    """`einsum("td,edn->etn", x, w1)`, `einsum("etn,end->etd", h, w2)`, `einsum("etd,te->td", y, gates)`"""
    weight, index = moe.route(x)
    gates = (one_hot(index, E).to(x.dtype) * weight[..., None]).sum(1)
    h = silu(torch.einsum("td,edn->etn", x, moe.w1)) * torch.einsum("td,edn->etn", x, moe.w3)
    return torch.einsum("etd,te->td", torch.einsum("etn,end->etd", h, moe.w2), gates)


@spelled(LOWERED)
def switch_buffers(x, moe):
    """`buffer[index[kept], place[kept]] = x[kept]` of [E, C, D], `torch.bmm`, picked back (Switch)"""
    p, index = softmax(moe.gate(x), -1).max(-1)
    place = (one_hot(index, E).cumsum(0) - 1).gather(1, index[:, None]).squeeze(1)
    kept = place < moe.capacity
    buffer = x.new_zeros(E, moe.capacity, D)
    buffer[index[kept], place[kept]] = x[kept]
    y = torch.bmm(gelu(torch.bmm(buffer, moe.w1)), moe.w2)
    out = torch.zeros_like(x)
    out[kept] = y[index[kept], place[kept]]
    return out * p[:, None]


@spelled(LOWERED)
def gshard_positions(x, moe):
    """places by `cumsum(one_hot)`, dispatch [T, E, C] by `one_hot(place)`, `einsum("tec,td->ecd", …)` (GShard)"""
    weight, index = moe.route(x)
    chosen = one_hot(index, E).permute(1, 0, 2).reshape(-1, E)
    place = (chosen.cumsum(0) - 1) * chosen
    place, chosen = place.view(K, -1, E), chosen.view(K, -1, E)
    kept = chosen * (place < moe.capacity)
    slots = one_hot(place.clamp(max=moe.capacity - 1), moe.capacity).to(x.dtype) * kept[..., None]
    combine = torch.einsum("tk,ktec->tec", weight, slots)
    rows = torch.einsum("tec,td->ecd", slots.sum(0), x)
    y = torch.einsum("ecn,end->ecd", torch.relu(torch.einsum("ecd,edn->ecn", rows, moe.w1)), moe.w2)
    return torch.einsum("tec,ecd->td", combine, y)


@spelled(LOWERED)
def expert_choice_by_einsum(x, moe):
    """expert choice: `scores.t().topk(C)`, `x[token]` [E, C, D], `einsum`, `index_add_` of all at once"""
    gates, token = softmax(moe.gate(x), -1).t().topk(moe.capacity, -1)
    h = torch.relu(torch.einsum("ecd,edn->ecn", x[token], moe.w1))
    y = torch.einsum("ecn,end->ecd", h, moe.w2) * gates[..., None]
    return torch.zeros_like(x).index_add_(0, token.reshape(-1), y.reshape(-1, D))


@spelled(LOWERED)
def soft_moe(x, moe):
    """soft MoE: slots by `logits.softmax(0).t() @ x`, experts one after another, `logits.softmax(1) @ y`"""
    logits = moe.gate(x).repeat_interleave(2, 1)
    slots = (logits.softmax(0).t() @ x).view(E, 2, D)
    y = torch.stack([expert(part) for expert, part in zip(moe.experts, slots, strict=True)])
    return logits.softmax(1) @ y.view(-1, D)


@spelled(LOWERED)
def hashed(x, moe):
    """hash routing: the expert of a token is its position modulo E, nothing is weighted"""
    index = torch.arange(len(x)) % E
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = torch.where(index == e)[0]
        out[token] = expert(x[token])
    return out


@spelled(LOWERED)
def gated_shared_expert(x, moe):
    """experts and a shared one with a gate of its own: `out + sigmoid(gate(x)) * self.shared(x)` (Qwen2-MoE)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out + torch.sigmoid(moe.gate(x)[:, :1]) * moe.shared(x)


@spelled(LOWERED)
def nested(x, moe):
    """two levels: a group of experts by `argmax`, one of it by `p, best = gate(x[own]).softmax(-1).max(-1)`"""
    group, out = moe.gate(x)[:, :2].argmax(-1), torch.zeros_like(x)
    for g, experts in enumerate([list(moe.experts), list(moe.named.values())]):
        own = torch.where(group == g)[0]
        p, best = softmax(moe.gate(x[own]), -1).max(-1)
        for i, expert in enumerate(experts):
            chosen = torch.where(best == i)[0]
            token = own[chosen]
            out.index_add_(0, token, expert(x[token]) * p[chosen, None])
    return out


@spelled(LOWERED)
def attention_heads(x, moe):
    """experts are query projections of an attention (MoA): `q[token] += linear(x[token], w_q[e]) * weight`"""
    weight, index = moe.route(x)
    q = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        q.index_add_(0, token, linear(x[token], moe.w1[e].t()) @ moe.w2[e] * weight[token, slot, None])
    return softmax(q @ x.t() / D**0.5, -1) @ x


@spelled(PROJECTED)
def low_rank(x, moe):
    """LoRA experts on a shared projection: `self.shared(x[token]) + x[token] @ a[e] @ b[e]`"""
    return over_range(x, moe, lambda rows, e: moe.shared(rows) + rows @ moe.w1[e] @ moe.w2[e])


@spelled(LOWERED)
def low_rank_mixture(x, moe):
    """LoRA mixture inline: `out = self.shared(x)`, `out[token] += (x[token] @ a[e] @ b[e]) * weight`, relu between"""
    weight, index = moe.route(x)
    out = moe.shared(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out[token] += (torch.relu(x[token] @ moe.w1[e]) @ moe.w2[e]) * weight[token, slot, None]
    return out


@spelled(LOWERED)
def low_rank_added(x, moe):
    """the same, `out = out.index_add(0, token, rows)` onto what the base layer gave"""
    weight, index = moe.route(x)
    out = moe.shared(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        rows = torch.relu(x[token] @ moe.w1[e]) @ moe.w2[e]
        out = out.index_add(0, token, rows * weight[token, slot, None])
    return out


@spelled(LOWERED)
def sorted_and_cut(x, moe):
    """slots by `argsort(stable=True)`, `torch.split(x[order // K], bincount.tolist())`, `torch.cat`, `index_add`"""
    weight, index = moe.route(x)
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    token = order // K
    pieces = torch.split(x[token], flat.bincount(minlength=E).tolist())
    y = torch.cat([expert(piece) for expert, piece in zip(moe.experts, pieces, strict=True)])
    return torch.zeros_like(x).index_add(0, token, y * weight.reshape(-1)[order, None])


@spelled(LOWERED)
def cut_by_tensor(x, moe):
    """the same, `torch.tensor_split(rows, ends)` with a tensor of ends"""
    weight, index = moe.route(x)
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    token = order // K
    ends = flat.bincount(minlength=E).cumsum(0)
    pieces = torch.tensor_split(x[token], ends[:-1])
    y = torch.cat([expert(piece) for expert, piece in zip(moe.experts, pieces, strict=True)])
    return torch.zeros_like(x).index_add(0, token, y * weight.reshape(-1)[order, None])


@spelled(BROKEN)
def counted_by_unique(x, moe):
    """`numbers, counts = flat.unique(return_counts=True)`, `zip(numbers.tolist(), rows.split(counts.tolist()))`"""
    weight, index = moe.route(x)
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    numbers, counts = flat.unique(return_counts=True)
    rows, parts = x[order // K], []
    for e, piece in zip(numbers.tolist(), rows.split(counts.tolist()), strict=True):
        parts.append(moe.experts[e](piece))
    y = torch.cat(parts) * weight.reshape(-1)[order, None]
    return torch.zeros_like(x).index_add(0, order // K, y)


@spelled(LOWERED)
def selected_and_reduced(x, moe):
    """`x.index_select(0, token)`, `out.scatter_reduce(0, token[:, None].expand(-1, D), rows, "sum")`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        rows = expert(x.index_select(0, token)) * weight[token, slot].unsqueeze(1)
        out = out.scatter_reduce(0, token[:, None].expand(-1, D), rows, "sum")
    return out


@spelled(LOWERED)
def repeated_slots(x, moe):
    """`rows = x.repeat_interleave(K, 0)`, `y[flat == e] = expert(rows[flat == e])`, `y.view(T, K, D)` weighted"""
    weight, index = moe.route(x)
    flat, rows = index.view(-1), x.repeat_interleave(K, dim=0)
    y = torch.empty_like(rows)
    for e, expert in enumerate(moe.experts):
        y[flat == e] = expert(rows[flat == e])
    return (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


@spelled(LOWERED)
def stacked_by_slot(x, moe):
    """boolean masks for each slot: `mask = index[:, k] == e`, `out[mask] += weight[mask, k, None] * expert(x[mask])`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for k in range(K):
        for e, expert in enumerate(moe.experts):
            mask = index[:, k] == e
            out[mask] += weight[mask, k].unsqueeze(1) * expert(x[mask])
    return out


@spelled(LOWERED)
def zipped_experts_and_tokens(x, moe):
    """`for expert, (token, slot) in zip(self.experts, [torch.where(index == e) for e in range(E)])`"""
    weight, index = moe.route(x)
    chosen = [torch.where(index == e) for e in range(E)]
    out = torch.zeros_like(x)
    for expert, (token, slot) in zip(moe.experts, chosen, strict=True):
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def masked_after_an_activation(x, moe):
    """all experts on all tokens, `out += expert(torch.tanh(x) * mask[:, e, None]) * gates[:, e, None]`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = (index == e).any(-1, keepdim=True)
        out = out + expert(torch.tanh(x) * mask) * gates[:, e : e + 1]
    return out


@spelled(LOWERED)
def written_by_token(x, moe):
    """`y = einsum("td,te->etd", x, mask)`, `y[e, mask_e] = weight * expert(y[e, mask_e])`, `y.sum(0)` (NLLB-MoE)"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    mask = gates.bool()
    masked = torch.einsum("td,te->etd", x, mask.to(x.dtype))
    for e, expert in enumerate(moe.experts):
        token = mask[:, e]
        masked[e, token] = torch.einsum("t,td->td", gates[token, e], expert(masked[e, token]))
    return masked.sum(0)


@spelled(LOWERED)
def vmapped(x, moe):
    """`torch.vmap(f)(x[best], w1, w2)` over stacked weights, expert choice"""
    gates, best = softmax(moe.gate(x), -1).t().topk(moe.capacity, -1)
    y = torch.vmap(lambda rows, w1, w2: torch.relu(rows @ w1) @ w2)(x[best], moe.w1, moe.w2)
    return torch.zeros_like(x).index_add(0, best.flatten(), (y * gates[..., None]).flatten(0, 1))


@spelled(CAPTURED)
def channels_of_a_convolution(x, moe):
    """experts are 1 x 1 convolutions: `F.conv1d(x[token][..., None], w[e][..., None])`"""
    return over_range(
        x, moe,
        lambda rows, e: conv1d(
            torch.relu(conv1d(rows[..., None], moe.w1[e].t()[..., None])), moe.w2[e].t()[..., None]
        )[..., 0],
    )  # fmt: skip


@spelled(LOWERED)
def weights_on_the_gates(x, moe):
    """`sparse = logits.scatter(…)`, `token = sparse[:, e].nonzero().flatten()`, weighted by `sparse[token, e, None]`"""
    weight, index = moe.route(x)
    sparse = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token = sparse[:, e].nonzero().flatten()
        out.index_add_(0, token, expert(x[token]) * sparse[token, e, None])
    return out


@spelled(LOWERED)
def list_comprehension_of_pairs(x, moe):
    """`pairs = [(t, k) for …]` by `torch.nonzero(index == e, as_tuple=True)`, rows joined and added at once"""
    weight, index = moe.route(x)
    tokens, rows = [], []
    for e, expert in enumerate(moe.experts):
        token, slot = torch.nonzero(index == e, as_tuple=True)
        tokens.append(token)
        rows.append(weight[token, slot, None] * expert(x[token]))
    return torch.zeros_like(x).index_add_(0, torch.cat(tokens), torch.cat(rows))


@spelled(LOWERED)
def take_along_the_experts(x, moe):
    """`torch.take_along_dim(torch.stack(…, 1), index[..., None], 1)`, weighted by einsum"""
    weight, index = moe.route(x)
    y = torch.stack([expert(x) for expert in moe.experts], 1)
    return torch.einsum("tk,tkd->td", weight, torch.take_along_dim(y, index[..., None], 1))


@spelled(LOWERED)
def product_keys(x, moe):
    """product keys: two halves' `topk`, `index = i * 2 + j` of the best sums, weights gathered for each slot (PEER)"""
    scores = moe.gate(x)
    a, i = scores[:, :2].topk(2, -1)
    b, j = scores[:, 2:].topk(2, -1)
    best, place = (a[:, :, None] + b[:, None, :]).flatten(1).topk(K, -1)
    index = (i[:, :, None] * 2 + j[:, None, :]).flatten(1).gather(1, place)
    h = torch.relu(torch.einsum("td,tkdn->tkn", x, moe.w1[index])) * best.softmax(-1)[..., None]
    return torch.einsum("tkn,tknd->td", h, moe.w2[index])


@spelled(LOWERED)
def a_loop_while(x, moe):
    """`e = 0`, `while e < len(self.experts): … e += 1`, `torch.isin(index, e)`"""
    weight, index = moe.route(x)
    out, e = torch.zeros_like(x), 0
    while e < len(moe.experts):
        token, slot = torch.isin(index, e).nonzero().unbind(1)
        out = out.index_add(0, token, moe.experts[e](x[token]) * weight[token, slot, None])
        e += 1
    return out


@spelled(LOWERED)
def by_map(x, moe):
    """`sum(map(one, range(E)))` of zeros with an expert's rows, `torch.zeros_like(x).index_add(…)`"""
    weight, index = moe.route(x)

    def one(e):
        token, slot = torch.where(index == e)
        return torch.zeros_like(x).index_add(0, token, moe.experts[e](x[token]) * weight[token, slot, None])

    return sum(map(one, range(E)))


@spelled(LOWERED)
def dropped_tokens_pass(x, moe):
    """`kept = torch.cumsum(one_hot, 0)[…] <= capacity`, experts on those, `torch.where(done[:, None], out, x)`"""
    p, index = softmax(moe.gate(x), -1).max(-1)
    place = one_hot(index, E).cumsum(0).gather(1, index[:, None]).squeeze(1)
    out, done = torch.zeros_like(x), place <= moe.capacity
    for e, expert in enumerate(moe.experts):
        token = torch.where((index == e) & done)[0]
        out = out.index_copy(0, token, expert(x[token]) * p[token, None])
    return torch.where(done[:, None], out, x)


@spelled(LOWERED)
def functional_weights(x, moe):
    """one module with the weights of each: `torch.func.functional_call(self.experts[0], weights[e], rows)`"""
    states = [dict(expert.named_parameters()) for expert in moe.experts]
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, state in enumerate(states):
        token, slot = torch.where(index == e)
        rows = torch.func.functional_call(moe.experts[0], state, (x[token],))
        out.index_add_(0, token, rows * weight[token, slot, None])
    return out

