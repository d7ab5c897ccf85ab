"""More of layers_as_functions.py: routing of other kinds, loops, helpers, dispatchers."""

from __future__ import annotations

import torch
from layers_as_functions import held, route
from spellings import BROKEN, CAPTURED, LOWERED, D, E, K
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@held(LOWERED)
def low_rank_residual(x, m):
    """low-rank experts added onto a shared one"""
    w, idx = route(x, m)
    out = m.shared(x)
    for e, expert in enumerate(m.low):
        t, k = torch.where(idx == e)
        out = out.index_add(0, t, expert(x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def zero_expert(x, m):
    """an identity and a zero expert beside the others (MoE++)"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        if e == 0:
            continue
        y = x[t] if e == 1 else m.experts[e](x[t])
        out.index_add_(0, t, y * w[t, k, None])
    return out


@held(LOWERED)
def top1_flat(x, m):
    """top-1 by argmax, weights by gather, boolean rows"""
    p = m.gate(x).softmax(-1)
    idx = p.argmax(-1)
    g = p.gather(-1, idx.unsqueeze(-1))
    out = torch.empty_like(x)
    for e, expert in enumerate(m.experts):
        rows = idx == e
        out[rows] = expert(x[rows]) * g[rows]
    return out


@held(LOWERED)
def top2_written_out(x, m):
    """top-2 as two top-1 passes in a helper"""
    w, idx = m.gate(x).topk(2, -1)
    w = w.softmax(-1)

    def one(choice, weight):
        y = torch.zeros_like(x)
        for e in range(E):
            sel = choice.eq(e)
            if sel.sum() > 0:
                y[sel] = m.experts[e](x[sel])
        return y * weight[:, None]

    return one(idx[:, 0], w[:, 0]) + one(idx[:, 1], w[:, 1])


@held(LOWERED)
def sigmoid_bias(x, m):
    """DeepSeek-V3: sigmoid, bias for the choice, groups by topk, scatter mask, bias moved after"""
    scores = m.gate(x).sigmoid()
    choice = (scores + m.bias).view(-1, 2, E // 2)
    group = choice.topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
    mask = torch.zeros(x.shape[0], 2, dtype=x.dtype).scatter_(1, group, 1).unsqueeze(-1).expand(-1, 2, E // 2)
    choice = choice.masked_fill(~mask.bool(), 0.0).reshape(-1, E)
    idx = choice.topk(K, dim=-1, sorted=False)[1]
    w = scores.gather(1, idx)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5
    final = torch.zeros_like(x)
    expert_mask = F.one_hot(idx, num_classes=E).permute(2, 0, 1)
    for e in range(E):
        t, k = torch.where(expert_mask[e])
        if t.numel() > 0:
            final.index_add_(0, t, (m.experts[e](x[t]) * w[t, k].unsqueeze(-1)).type(x.dtype))
    with torch.no_grad():
        load = torch.bincount(idx.flatten(), minlength=E).to(x.dtype)
        m.bias += 0.01 * torch.sign(load.mean() - load)
    return final + m.shared(x)


@held(LOWERED)
def expert_choice(x, m):
    """expert choice: topk over tokens, a loop over rows"""
    s = m.gate(x).softmax(-1).t()
    g, t = s.topk(min(5, x.shape[0]), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        out.index_add_(0, t[e], expert(x[t[e]]) * g[e].unsqueeze(-1))
    return out


@held(LOWERED)
def expert_choice_einsum(x, m):
    """expert choice: one_hot dispatch P [E, C, T], einsum in and out"""
    s = m.gate(x).softmax(-1)
    g, t = s.t().topk(min(5, x.shape[0]), dim=-1)
    p = F.one_hot(t, x.shape[0]).to(x.dtype)
    xe = torch.einsum("ect,td->ecd", p, x)
    ye = torch.bmm(F.silu(torch.bmm(xe, m.w1)) * torch.bmm(xe, m.w3), m.w2)
    return torch.einsum("ect,ec,ecd->td", p, g, ye)


@held(LOWERED)
def noisy_topk(x, m):
    """noisy top-k (Shazeer): noise by softplus, -inf elsewhere, softmax"""
    logits = m.gate(x)
    logits = logits + torch.randn_like(logits) * F.softplus(m.noise(x))
    top, idx = logits.topk(K, dim=-1)
    gates = torch.full_like(logits, float("-inf")).scatter(-1, idx, top).softmax(-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (idx == e).any(dim=-1)
        flat = mask.view(-1)
        if flat.any():
            y = expert(x[flat]) * gates[flat, e].unsqueeze(1)
            out[flat] += y.squeeze(1)
    return out


@held(LOWERED)
def hash_routing(x, m):
    """hash layer: experts from a fixed number of each token"""
    ids = (torch.arange(x.shape[0]) * 7 + 3) % E
    out = torch.zeros_like(x)
    for e in range(E):
        rows = torch.nonzero(ids == e).squeeze(-1)
        out = out.index_copy(0, rows, m.experts[e](x[rows]))
    return out


@held(LOWERED)
def threshold_routing(x, m):
    """every expert whose probability is over a threshold"""
    p = m.gate(x).softmax(-1)
    chosen = p > 0.2
    out = torch.zeros_like(x)
    for e in range(E):
        t = chosen[:, e].nonzero().flatten()
        if t.numel() == 0:
            continue
        out.index_add_(0, t, m.experts[e](x[t]) * p[t, e, None])
    return out


@held(LOWERED)
def token_dropping(x, m):
    """tokens of low confidence are routed nowhere"""
    w, idx = route(x, m, norm=False)
    keep = w > 0.25
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where((idx == e) & keep)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def dropped_as_extra(x, m):
    """dropped slots get the number E, which no expert has"""
    w, idx = route(x, m, norm=False)
    idx = torch.where(w > 0.25, idx, torch.full_like(idx, E))
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def padding_mask(x, m):
    """padding tokens routed nowhere: rows of mask first"""
    valid = torch.arange(x.shape[0]) < x.shape[0] - 2
    flat = x[valid]
    w, idx = route(flat, m)
    y = torch.zeros_like(flat)
    for e in range(E):
        t, k = torch.where(idx == e)
        y.index_add_(0, t, m.experts[e](flat[t]) * w[t, k, None])
    out = torch.zeros_like(x)
    out[valid] = y
    return out


@held(LOWERED)
def padding_in_weights(x, m):
    """padding as zero in weights and -1 in the index"""
    valid = (torch.arange(x.shape[0]) % 4 != 3)[:, None]
    w, idx = route(x, m)
    w = w * valid
    idx = idx.masked_fill(~valid, -1)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def while_loop(x, m):
    """while with a counter at the end"""
    w, idx = route(x, m)
    out, e = torch.zeros_like(x), 0
    while e < len(m.experts):
        t, k = torch.nonzero(idx == e, as_tuple=True)
        out.index_add_(0, t, m.experts[e](x[t]).mul(w[t, k][:, None]))
        e += 1
    return out


@held(LOWERED)
def closure_per_expert(x, m):
    """a list of closures"""
    w, idx = route(x, m)
    fns = [lambda h, e=e: F.silu(h @ m.w1[e]) @ m.w2[e] for e in range(E)]
    out = torch.zeros_like(x)
    for e, fn in enumerate(fns):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, fn(x[t]) * w[t, k, None])
    return out


class Helper:
    def __init__(self, m):
        self.m = m

    @staticmethod
    def rows(idx, e):
        return torch.where(idx == e)

    def run(self, e, x, w, idx):
        t, k = self.rows(idx, e)
        if t.numel() == 0:
            return None
        return t, self.m.experts[e](x[t]) * w[t, k, None]


@held(LOWERED)
def helper_returns_pair(x, m):
    """a helper's method returns None or (tokens, rows)"""
    w, idx = route(x, m)
    h, out = Helper(m), torch.zeros_like(x)
    for e in range(E):
        got = h.run(e, x, w, idx)
        if got is not None:
            out.index_add_(0, *got)
    return out


@held(LOWERED)
def static_helper(x, m):
    """a static method finds the rows, `out[t] +=`"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        t, k = Helper.rows(idx, e)
        out[t] += expert(x[t]) * w[t, k, None]
    return out


class SparseDispatcher:
    """Shazeer's, as the well-known PyTorch port has it."""

    def __init__(self, num_experts, gates):
        self._gates, self._num_experts = gates, num_experts
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, self._expert_index = sorted_experts.split(1, dim=1)
        self._batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        self._part_sizes = (gates > 0).sum(0).tolist()
        gates_exp = gates[self._batch_index.flatten()]
        self._nonzero_gates = torch.gather(gates_exp, 1, self._expert_index)

    def dispatch(self, inp):
        return torch.split(inp[self._batch_index].squeeze(1), self._part_sizes, dim=0)

    def combine(self, expert_out, multiply_by_gates=True):
        stitched = torch.cat(expert_out, 0)
        if multiply_by_gates:
            stitched = stitched.mul(self._nonzero_gates)
        zeros = torch.zeros(self._gates.size(0), expert_out[-1].size(1), requires_grad=True, dtype=stitched.dtype)
        return zeros.index_add(0, self._batch_index, stitched)

    def expert_to_gates(self):
        return torch.split(self._nonzero_gates, self._part_sizes, dim=0)


@held(LOWERED)
def sparse_dispatcher(x, m):
    """SparseDispatcher of gates"""
    w, idx = route(x, m)
    gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, idx, w)
    dispatcher = SparseDispatcher(E, gates)
    inputs = dispatcher.dispatch(x)
    dispatcher.expert_to_gates()
    outs = [m.mlps[i](inputs[i]) for i in range(E)]
    return dispatcher.combine(outs)


@held(LOWERED)
def early_return(x, m):
    """a function that returns early for an empty batch"""
    if x.shape[0] == 0:
        return x
    w, idx = route(x, m)
    if K == 1:
        return m.experts[0](x)
    out = x.new_zeros(x.shape)
    for e in range(E):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def autocast_around(x, m):
    """autocast to bfloat16 is off inside (fp64 stays)"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    with torch.autocast("cpu", enabled=False):
        for e in range(E):
            t, k = torch.where(idx == e)
            out.index_add_(0, t, m.experts[e](x[t].to(x.dtype)) * w[t, k, None].to(x.dtype))
    return out


@held(LOWERED)
def checkpointed_expert(x, m):
    """gradient checkpointing around each expert"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, checkpoint(expert, x[t], use_reentrant=False) * w[t, k, None])
    return out


@held(LOWERED)
def checkpointed_where_it_has_rows(x, m):
    """gradient checkpointing around each expert that has rows"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.mlps):
        t, k = torch.where(idx == e)
        if t.numel() == 0:
            continue
        out = out.index_add(0, t, checkpoint(expert, x[t], use_reentrant=False) * w[t, k, None])
    return out


@held(LOWERED)
def usage_counted_in_the_loop(x, m):
    """a running count of each expert's tokens, under no_grad in the loop"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e in range(E):
        mask = idx == e
        with torch.no_grad():
            m.seen[e] += mask.sum()
        if mask.any():
            t, k = torch.where(mask)
            out[t] += w[t, k, None] * m.experts[e](x[t])
    return out


@held(LOWERED)
def checkpointed_layer(x, m):
    """gradient checkpointing around the loop"""

    def body(h):
        w, idx = route(h, m)
        out = torch.zeros_like(h)
        for e, expert in enumerate(m.experts):
            t, k = torch.where(idx == e)
            out.index_add_(0, t, expert(h[t]) * w[t, k, None])
        return out

    return checkpoint(body, x, use_reentrant=False)


@held(LOWERED)
def range_reversed_step(x, m):
    """even experts first, then odd"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e in [*range(0, E, 2), *range(1, E, 2)]:
        t, k = torch.where(idx == e)
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out


@held(LOWERED)
def mask_unbind_zip(x, m):
    """zip of modules and unbound masks and weights"""
    w, idx = route(x, m)
    onehot = F.one_hot(idx, E)
    gates = (onehot * w[..., None]).sum(1)
    out = torch.zeros_like(x)
    for expert, mask, g in zip(m.ones, onehot.sum(1).bool().unbind(1), gates.unbind(1), strict=True):
        out[mask] += expert(x[mask]) * g[mask, None]
    return out


@held(LOWERED)
def hits_greater_nonzero(x, m):
    """Mixtral of today: hits, a squeeze, two matrices per expert"""
    w, idx = route(x, m)
    with torch.no_grad():
        mask = F.one_hot(idx, num_classes=E + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    out = torch.zeros_like(x)
    for e in hit:
        e = e[0]
        if e == E:
            continue
        k, t = torch.where(mask[e])
        cur = x[t]
        h = F.silu(cur @ m.w1[e]) * (cur @ m.w3[e])
        out.index_add_(0, t, (h @ m.w2[e] * w[t, k, None]).to(out.dtype))
    return out


@held(LOWERED)
def per_slot_loop(x, m):
    """for slot, for expert: boolean rows of that slot"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            rows = idx[:, k] == e
            if not rows.any():
                continue
            out[rows] += w[rows, k, None] * m.experts[e](x[rows])
    return out


@held(CAPTURED)
def per_token_loop(x, m):
    """for each token, for each slot: one row"""
    w, idx = route(x, m)
    out = []
    for t in range(x.shape[0]):
        y = 0
        for k in range(K):
            e = idx[t, k]
            y = y + w[t, k] * (F.relu(x[t] @ m.w1[e]) @ m.w2[e])
        out.append(y)
    return torch.stack(out)


@held(BROKEN)
def per_token_item(x, m):
    """for each token, `experts[idx.item()]`"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for t, (ws, es) in enumerate(zip(w, idx.tolist(), strict=True)):
        for g, e in zip(ws, es, strict=True):
            out[t] += g * m.experts[e](x[t])
    return out


@held(LOWERED)
def weighted_input(x, m):
    """the weight before the expert, as Llama 4 does"""
    w, idx = m.gate(x).topk(1, -1)
    w = w.sigmoid()
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, expert(x[t] * w[t, k, None]))
    return out


@held(LOWERED)
def float_then_back(x, m):
    """sums in float64, rows cast, `.type_as`"""
    w, idx = route(x, m)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e, expert in enumerate(m.experts):
        t, k = torch.where(idx == e)
        out.index_add_(0, t, expert(x[t]).double() * w[t, k, None].double())
    return out.type_as(x)


@held(LOWERED)
def list_of_outs_indexed(x, m):
    """every expert on all tokens, stacked, advanced index [T, K]"""
    w, idx = route(x, m)
    ys = torch.stack([e(x) for e in m.experts], dim=1)
    chosen = ys[torch.arange(x.shape[0])[:, None], idx]
    return (chosen * w.unsqueeze(-1)).sum(1)


@held(LOWERED)
def capacity_bmm(x, m):
    """rows written into [E, C, D] by expert and place, bmm, read back by the same"""
    w, idx = route(x, m)
    flat = idx.flatten()
    onehot = F.one_hot(flat, E)
    place = (onehot.cumsum(0) - 1).gather(1, flat[:, None]).squeeze(1)
    cap = x.shape[0]
    buf = x.new_zeros(E, cap, D)
    buf[flat, place] = x.repeat_interleave(K, 0)
    h = F.silu(torch.bmm(buf, m.w1)) * torch.bmm(buf, m.w3)
    y = torch.bmm(h, m.w2)[flat, place]
    return (y.view(-1, K, D) * w[..., None]).sum(1)


@held(LOWERED)
def index_put_rows(x, m):
    """torch.index_put out of place, tokens from flat positions by divmod"""
    w, idx = route(x, m)
    flat = idx.flatten()
    out = torch.zeros_like(x)
    for e in range(E):
        at = torch.nonzero(flat == e)[:, 0]
        t, k = at // K, at % K
        out = torch.index_put(out, (t,), m.experts[e](x[t]) * w[t, k, None], accumulate=True)
    return out


@held(LOWERED)
def masks_as_floats(x, m):
    """every expert on masked inputs: `expert(x * mask) * gate` of bias-free experts"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (idx == e).to(x.dtype)
        gate = (mask * w).sum(-1, keepdim=True)
        out = out + expert(x * mask.amax(-1, keepdim=True)) * gate
    return out


@held(LOWERED)
def aux_loss_per_expert(x, m):
    """balance loss per expert in the loop, no branch"""
    probs = m.gate(x).softmax(-1)
    w, idx = probs.topk(K, -1)
    out, aux = torch.zeros_like(x), 0
    for e in range(E):
        t, k = torch.where(idx == e)
        aux = aux + probs[:, e].mean() * (t.shape[0] / x.shape[0])
        out.index_add_(0, t, m.experts[e](x[t]) * w[t, k, None])
    return out + E * aux


@held(LOWERED)
def list_of_losses(x, m):
    """losses of used experts in a list, stacked and averaged"""
    w, idx = route(x, m)
    out, losses = torch.zeros_like(x), []
    for e in range(E):
        t, k = torch.where(idx == e)
        if t.numel() == 0:
            continue
        y = m.experts[e](x[t])
        losses.append(y.pow(2).mean())
        out.index_add_(0, t, y * w[t, k, None])
    return out + torch.stack(losses).mean()


@held(LOWERED)
def rows_with_norm_after(x, m):
    """sum normed per token after the loop; residual"""
    w, idx = route(x, m)
    out = torch.zeros_like(x)
    for e in range(E):
        sel = (idx == e).nonzero()
        t, k = sel[:, 0], sel[:, 1]
        out.index_add_(0, t, m.low[e](x[t]) * w[t, k].view(-1, 1))
    return x + F.layer_norm(out, (D,))


@held(LOWERED)
def permute_unpermute(x, m):
    """Megatron: permute by routing map, per-expert chunks, unpermute by scatter_add with probs"""
    w, idx = route(x, m)
    probs = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, idx, w)
    rmap = torch.zeros(x.shape[0], E, dtype=torch.bool).scatter(1, idx, True).T.contiguous()
    toks = torch.arange(x.shape[0]).unsqueeze(0).expand(E, -1).masked_select(rmap)
    pw = probs.T.contiguous().masked_select(rmap)
    xs = x.index_select(0, toks)
    outs = []
    for expert, chunk in zip(m.ones, torch.split(xs, rmap.sum(1).tolist()), strict=True):
        outs.append(expert(chunk))
    y = torch.cat(outs) * pw.unsqueeze(-1)
    out = torch.zeros_like(x)
    out.scatter_add_(0, toks.unsqueeze(1).expand(-1, D), y)
    return out


@held(LOWERED)
def grouped_mm_like(x, m):
    """torchtitan's for-loop experts: histc counts, split, padded zeros appended"""
    w, idx = route(x, m)
    counts = torch.histc(idx.view(-1).to(x.dtype), bins=E, min=0, max=E)
    order = torch.argsort(idx.view(-1), stable=True)
    rows = x[order // K] * w.view(-1)[order, None]
    sizes = counts.long().tolist()
    splits = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
    outs = []
    for e, xe in enumerate(splits):
        h = F.silu(torch.matmul(xe, m.w1[e]))
        h = h * torch.matmul(xe, m.w3[e])
        outs.append(torch.matmul(h, m.w2[e]))
    out = torch.cat(outs, dim=0)
    return torch.zeros_like(x).scatter_add(0, (order // K).reshape(-1, 1).expand(-1, D), out)
