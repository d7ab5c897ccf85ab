"""More expert layers of module_spellings.py: ideas of layers that people train with, in words of our own."""

from __future__ import annotations

import module_spellings  # noqa: F401 (these come first)
import torch
from module_layers import over_range, spelled
from spellings import LOWERED, PROJECTED, D, E, K, N
from torch.nn.functional import gelu, one_hot, relu, softmax, softplus


@spelled(LOWERED)
def listed_positions(x, moe):
    """`tokens = token.tolist()`, `x[None, tokens]`, `weight[tokens, slots, None]` (Mixtral before fusing)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=moe.num_experts).permute(2, 1, 0)
    for e in range(moe.num_experts):
        slot, token = torch.where(mask[e])
        if token.shape[0] == 0:
            continue
        tokens, slots = token.tolist(), slot.tolist()
        state = x[None, tokens].reshape(-1, D)
        out.index_add_(0, token, moe.experts[e](state) * weight[tokens, slots, None])
    return out


class Dispatcher:
    """Cuts a batch into one for each expert that a gate lets it through to, and puts the results together again."""

    def __init__(self, gates):
        self.gates = gates
        experts, order = torch.nonzero(gates).sort(0)
        self.expert = experts[:, 1:]
        self.token = torch.nonzero(gates)[order[:, 1], 0]
        self.sizes = (gates > 0).sum(0).tolist()
        self.weight = gates[self.token.flatten()].gather(1, self.expert)

    def cut(self, x):
        return torch.split(x[self.token].squeeze(1), self.sizes, dim=0)

    def joined(self, parts):
        rows = torch.cat(parts, 0) * self.weight
        zeros = torch.zeros(len(self.gates), parts[-1].shape[1], dtype=rows.dtype, requires_grad=True)
        return zeros.index_add(0, self.token, rows)


@spelled(LOWERED)
def dispatched(x, moe):
    """noisy top-k, an object cuts rows by `nonzero(gates).sort(0)`, `split`, and joins by `cat`, `index_add`"""
    clean = moe.gate(x)
    scale = softplus(clean.detach()) + 0.01
    noise = torch.sin(clean.detach() * 1000)  # not random: the spelling runs twice
    logits = softmax(clean + noise * scale, 1)
    best, index = logits.topk(moe.top_k + 1, dim=1)
    weight = best[:, :-1] / (best[:, :-1].sum(1, keepdim=True) + 1e-6)
    gates = torch.zeros_like(logits, requires_grad=True).scatter(1, index[:, :-1], weight)
    normal = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype))
    load = normal.cdf((clean - best[:, -1:]) / scale).sum(0)
    dispatcher = Dispatcher(gates)
    parts = dispatcher.cut(x)
    return dispatcher.joined([moe.mlps[e](parts[e]) for e in range(E)]) + load.var() / load.mean() ** 2


@spelled(LOWERED)
def slots_by_argmax(x, moe):
    """`token = (index == e).any(-1).nonzero().squeeze(-1)`, its slot by `mask[token].int().argmax(-1)`, `gather`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for hit in torch.unique(index):
        e = int(hit.item())
        mask = index == e
        if not mask.any():
            continue
        token = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
        if token.numel() == 0:
            continue
        y = moe.experts[e](x.index_select(0, token))
        slot = mask[token].int().argmax(dim=-1, keepdim=True)
        share = torch.gather(weight.index_select(0, token), dim=-1, index=slot).squeeze(-1)
        out.index_add_(0, token, y * share.unsqueeze(-1))
    return out


def placed(index, e, capacity):
    """[T, K, E, C]: which place of which expert each slot takes, none beyond the capacity."""
    chosen = one_hot(index.flatten(), e)
    place = (chosen.cumsum(0) - 1) * chosen
    kept = chosen * (place < capacity)
    return (one_hot(place * kept, capacity) * kept[..., None]).view(*index.shape, e, capacity)


@spelled(LOWERED)
def added_in_place(x, moe):
    """tokens up to a capacity, `h = torch.bmm(x, w1)`, `h += b1[:, None]`, relu, the same with w2 and b2"""
    weight, index = moe.route(x)
    places = placed(index, E, moe.capacity).to(x.dtype)
    h = torch.bmm(torch.einsum("tkec,td->ecd", places, x), moe.w1)
    h += moe.b1[:, None]
    y = torch.bmm(relu(h), moe.w2)
    y += moe.b2[:, None]
    return torch.einsum("tkec,tk,ecd->td", places, weight, y)


@spelled(LOWERED)
def einsum_with_dots(x, moe):
    """the same, `torch.einsum("...nd,...dh->...nh", slots, w1)`, gelu, an einsum with dots again"""
    weight, index = moe.route(x)
    places = placed(index, E, moe.capacity).to(x.dtype)
    slots = torch.einsum("tkec,td->ecd", places, x)
    y = torch.einsum("...nh,...hd->...nd", gelu(torch.einsum("...nd,...dh->...nh", slots, moe.w1)), moe.w2)
    return torch.einsum("tkec,tk,ecd->td", places, weight, y)


@spelled(LOWERED)
def soft_slots(x, moe):
    """soft slots, `for expert, part in zip(experts, slots)` on parts [B, slots, D], `torch.stack`"""
    x = x.view(2, -1, D)
    logits = torch.einsum("bnd,eds->bnes", x, moe.w1[:, :, :3])
    slots = torch.einsum("bnd,bnes->ebsd", x, logits.softmax(1))
    y = torch.stack([expert(part) for expert, part in zip(moe.mlps, slots, strict=True)])
    combine = logits.flatten(2).softmax(-1).view_as(logits)
    return torch.einsum("ebsd,bnes->bnd", y, combine).reshape(-1, D)


@spelled(LOWERED)
def chunks_of_places(x, moe):
    """places [1, E, C, D], `for part, expert in zip(places.chunk(E, dim=1), experts)`, `torch.cat(parts, dim=1)`"""
    weight, index = moe.route(x)
    places = placed(index, E, moe.capacity).to(x.dtype)
    sent = torch.einsum("tkec,td->ecd", places, x)[None]
    parts = [expert(part) for part, expert in zip(sent.chunk(E, dim=1), moe.experts, strict=True)]
    return torch.einsum("tkec,tk,ecd->td", places, weight, torch.cat(parts, dim=1)[0])


def in_slices(x, moe):
    """(the sorted rows cut by expert, the routing weight of each row, its token)"""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=E).tolist()
    return x[order // K].split(counts), weight.flatten()[order, None], order // K


@spelled(PROJECTED)
def single_projections(x, moe):
    """single projections: `torch.cat([part @ self.w1[e] for e, part in enumerate(x.split(counts))])`"""
    parts, weight, token = in_slices(x, moe)
    y = torch.cat([part @ moe.w1[e] for e, part in enumerate(parts)])
    return torch.zeros(len(x), N, dtype=x.dtype).index_add(0, token, y * weight)


@spelled(PROJECTED)
def norm_and_residual_inside(x, moe):
    """a norm before each expert and its input added to what it gives: `rows + expert(norm(rows))`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, (norm, expert) in enumerate(zip(moe.norms, moe.mlps, strict=True)):
        token, slot = torch.where(index == e)
        rows = x[token]
        out[token] += (rows + expert(norm(rows))) * weight[token, slot, None]
    return out


@spelled(PROJECTED)
def low_rank_additions(x, moe):
    """low-rank additions to each expert's projections (LoRA)"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.mlps):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        first, second = expert.net[0], expert.net[2]
        low, high = moe.up[e][:2], moe.down[e][:, :2]
        h = gelu(first(x[token]) + (x[token] @ low.T) @ moe.w1[e][:2])
        y = second(h) + (h @ moe.w1[e].T @ low.T) @ high.T
        out.index_add_(0, token, y * weight[token, slot, None])
    return out


@spelled(PROJECTED)
def three_projections(x, moe):
    """three projections, one after another"""

    def expert(rows, e):
        h = relu(rows @ moe.w1[e] + moe.b1[e])
        return relu(h @ moe.w2[e]) @ moe.w3[e] @ moe.w2[e] + moe.b2[e]

    return over_range(x, moe, expert)


@spelled(PROJECTED)
def weight_between_biased_projections(x, moe):
    """the routing weight between two projections with biases: `w2(act(w1(x)) * weight) + b2`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        h = relu(x[token] @ moe.w1[e] + moe.b1[e]) * weight[token, slot, None]
        out.index_add_(0, token, h @ moe.w2[e] + moe.b2[e])
    return out


@spelled(LOWERED)
def counts_that_are_not_positive(x, moe):
    """`for e, n in enumerate(counts.numpy())`, `if n <= 0: continue`, slices `rows[start : start + n]` (FastMoE)"""
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    rows, parts, start = x[order // K], [], 0
    for e, n in enumerate(torch.bincount(index.flatten(), minlength=E).numpy()):
        if n <= 0:
            continue
        parts.append(moe.mlps[e](rows[start : start + n]))
        start += n
    y = torch.zeros_like(rows).index_copy(0, order, torch.cat(parts))
    return (y.view(*weight.shape, -1) * weight[..., None]).sum(1)


@spelled(LOWERED)
def between_cumulated_counts(x, moe):
    """`ends = bincount.numpy().cumsum(0)`, `if start == end: continue`, `scatter_add_(0, token.view(-1, 1).repeat(1, D), rows)`"""  # noqa: E501
    weight, index = moe.route(x)
    order = index.view(-1).argsort(stable=True)
    ends = index.view(-1).bincount(minlength=E).cpu().numpy().cumsum(0)
    tokens, out = order // K, torch.zeros_like(x)
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        token = tokens[start:end]
        rows = moe.experts[e](x[token]).mul(weight.view(-1)[order[start:end]].unsqueeze(-1))
        out.scatter_add_(0, token.view(-1, 1).repeat(1, D), rows)
    return out


@spelled(LOWERED)
def slices_between_tensors(x, moe):
    """`ends = cat((zero, histc(…).cumsum(0)))`, `out[ends[e]:ends[e + 1]] = f(x[ends[e]:ends[e + 1]])`, `index_copy_` (Megatron)"""  # noqa: E501
    weight, index = moe.route(x)
    order = index.view(-1).argsort(stable=True)
    counts = torch.histc(index.float(), bins=E, min=0, max=E).cpu().to(torch.int64)
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cumsum(counts, dim=0)))
    rows = x.index_select(0, order // K)
    out = torch.zeros_like(rows)
    for e in range(E):
        start, end = ends[e], ends[e + 1]
        out[start:end] = moe.experts[e](rows[start:end])
    y = torch.zeros_like(out)
    y.index_copy_(0, order, out)
    return (y.reshape(-1, K, D) * weight.unsqueeze(-1)).sum(1)


@spelled(PROJECTED)
def routing_in_batches(x, moe):
    """routing kept [B, T, K]: `batch, token, slot = torch.where(index == e)`, `out[batch, token] += …`, single projections"""  # noqa: E501
    x = x.view(2, -1, D)
    weight, index = torch.topk(moe.gate(x), K)
    weight = softmax(weight, dim=2)
    out = torch.zeros(*x.shape[:2], N, dtype=x.dtype)
    for e, expert in enumerate(moe.experts):
        batch, token, slot = torch.where(index == e)
        out[batch, token] += weight[batch, token, slot, None] * expert.w1(x[batch, token])
    return out.view(-1, N)


@spelled(LOWERED)
def balanced_assignment(x, moe):
    """top-1 by `topk(1).indices.squeeze(1)`, tokens sorted by expert, `split`, a gate of each row and its residual (BASE)"""  # noqa: E501
    best = (x @ moe.gate.weight.t()).detach().topk(1, dim=1).indices.squeeze(1)
    order = best.argsort(stable=True)
    rows = x[order]
    alpha = torch.sigmoid((rows * moe.gate.weight[best[order]]).sum(-1, keepdim=True))
    sizes = torch.bincount(best, minlength=E).tolist()
    y = torch.cat([moe.mlps[e](part) for e, part in enumerate(rows.split(sizes))])
    return torch.zeros_like(x).index_copy(0, order, alpha * y + (1 - alpha) * rows)


@spelled(LOWERED)
def counted_masks(x, moe):
    """`mask = (index == e).any(-1)`, `if mask.sum() > 0:`, `out[mask] += y * (weight * (index == e)).sum(-1)[mask, None]`"""  # noqa: E501
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = (index == e).any(dim=-1)
        if mask.sum() > 0:
            out[mask] += expert(x[mask]) * (weight * (index == e)).sum(-1)[mask].unsqueeze(-1)
    return out


@spelled(LOWERED)
def weights_cut_from_behind(x, moe):
    """`w.chunk(E, dim=-3)` of [E, D, N], `int(count)` of each expert's mask"""
    first, second = moe.w1.chunk(E, dim=-3), moe.w2.chunk(E, dim=-3)
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        if int((index == e).sum()) == 0:
            continue
        token, slot = torch.where(index == e)
        y = gelu(x[token] @ first[e].squeeze(0)) @ second[e].squeeze(0)
        out.index_add_(0, token, y * weight[token, slot, None])
    return out


@spelled(LOWERED)
def widened_gates(x, moe):
    """all experts on all tokens, `out = out + y * gates[:, i, None].expand_as(y)`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        y = expert(x)
        out = out + y * gates[:, i, None].expand_as(y)
    return out


@spelled(LOWERED)
def repeated_gates(x, moe):
    """the same, `gates[:, i : i + 1].repeat(1, D) * expert(x)`"""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        out = out + gates[:, i : i + 1].repeat(1, D) * expert(x)
    return out


@spelled(LOWERED)
def widened_positions(x, moe):
    """`out.scatter_add_(0, token.unsqueeze(-1).expand_as(rows), rows)`"""
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        rows = expert(x[token]) * weight[token, slot].unsqueeze(-1)
        out.scatter_add_(0, token.unsqueeze(-1).expand_as(rows), rows)
    return out
