"""Expert layers as people write them. Each says in its docstring how it is spelled, and what becomes of it.

LOWERED: one grouped operator. PROJECTED: its projections on sorted rows. CAPTURED: in one graph, as it was written.
BROKEN: graph breaks (the answer is right).
All take x [T, D], router [E, D], gate_up [E, 2N, D], down [E, D, N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, one_hot, silu

E, T, K, D, N = 4, 10, 2, 8, 6
LOWERED, PROJECTED, CAPTURED, BROKEN = "one operator", "projections of sorted rows", "one graph", "graph breaks"


@dataclass
class Spelling:
    function: Callable
    outcome: str

    @property
    def says(self) -> str:
        return self.function.__doc__


SPELLINGS: dict[str, Spelling] = {}


def spelled(outcome: str):
    def add(function):
        SPELLINGS[function.__name__] = Spelling(function, outcome)
        return function

    return add


def route(x, router):
    return (x @ router.T).softmax(-1).topk(K, -1)


def expert(rows, gate_up, down, e):
    gate, up = linear(rows, gate_up[e]).chunk(2, -1)
    return linear(silu(gate) * up, down[e])


@spelled(LOWERED)
def rows_of_nonzero(x, router, gate_up, down):
    """`for row in mask.sum(…).nonzero()`, `torch.where(mask[e])`, `index_add_`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    mask = one_hot(index, E).permute(2, 1, 0)
    for row in mask.sum((1, 2)).nonzero():
        slot, token = torch.where(mask[row[0]])
        out.index_add_(0, token, expert(x[token], gate_up, down, row[0]) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def rows_as_numbers(x, router, gate_up, down):
    """the same, `e = row.item()`, `if len(token) == 0: continue`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    mask = one_hot(index, E).permute(2, 1, 0)
    for row in mask.sum((1, 2)).nonzero()[:, 0]:
        e = row.item()
        slot, token = torch.where(mask[e])
        if len(token) == 0:
            continue
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def rows_of_unique(x, router, gate_up, down):
    """`for e in index.unique()`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in index.unique():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def range_and_where(x, router, gate_up, down):
    """`for e in range(E)`, `torch.where(index == e)`, `index_add_`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def range_skipping_the_unused(x, router, gate_up, down):
    """the same, `if token.numel() == 0: continue`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def range_and_any(x, router, gate_up, down):
    """the same, `if chosen.any():` around the body"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = index == e
        if chosen.any():
            token, slot = torch.where(chosen)
            out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def range_replacing_the_sum(x, router, gate_up, down):
    """`for e in range(E)`, `out = out.index_add(…)`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    mask = one_hot(index, E).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(mask[e])
        if token.shape[0] == 0:
            continue
        out = out.index_add(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def range_and_index_put(x, router, gate_up, down):
    """`out.index_put_((token,), rows, accumulate=True)`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        rows = expert(x[token], gate_up, down, e) * weight[token, slot, None]
        out.index_put_((token,), rows, accumulate=True)
    return out


@spelled(LOWERED)
def range_and_scatter_add(x, router, gate_up, down):
    """`out.scatter_add_(0, token[:, None].expand(-1, D), rows)`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        rows = expert(x[token], gate_up, down, e) * weight[token, slot, None]
        out.scatter_add_(0, token[:, None].expand(-1, D), rows)
    return out


@spelled(LOWERED)
def range_with_a_number_of_its_own(x, router, gate_up, down):
    """an iteration with a branch of its own (`if e % 3 == 2:`)"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = index == e
        if e % 3 == 2:
            chosen = chosen & (weight > 0.3)
        token, slot = torch.where(chosen)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def slots_outside(x, router, gate_up, down):
    """a loop over slots around the loop over experts"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for k in range(K):
        for e in range(E):
            token = (index[:, k] == e).nonzero()[:, 0]
            out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, k, None])
    return out


@spelled(LOWERED)
def slots_inside(x, router, gate_up, down):
    """a loop over slots inside the loop over experts"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        for k in range(K):
            token = (index[:, k] == e).nonzero()[:, 0]
            out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, k, None])
    return out


@spelled(LOWERED)
def adding_at_an_index(x, router, gate_up, down):
    """`out[token] += rows`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out[token] += expert(x[token], gate_up, down, e) * weight[token, slot, None]
    return out


@spelled(LOWERED)
def adding_at_a_mask(x, router, gate_up, down):
    """`out[mask] += rows`, weights summed over a mask"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        chosen = (index == e).any(-1)
        scale = (weight * (index == e)).sum(-1)
        out[chosen] += expert(x[chosen], gate_up, down, e) * scale[chosen, None]
    return out


@spelled(LOWERED)
def dense(x, router, gate_up, down):
    """all experts on all tokens, `out = out + y * gates[:, e, None]`"""
    weight, index = route(x, router)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    out = 0
    for e in range(E):
        out = out + expert(x, gate_up, down, e) * gates[:, e, None]
    return out


@spelled(LOWERED)
def while_loop(x, router, gate_up, down):
    """`while e < E`: unrolled"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    e = 0
    while e < E:
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
        e += 1
    return out


@spelled(LOWERED)
def generator(x, router, gate_up, down):
    """a generator of each expert's rows, a closure for the expert"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)

    def chosen():
        for e in range(E):
            yield e, *torch.where(index == e)

    for e, token, slot in chosen():
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def dictionary_of_rows(x, router, gate_up, down):
    """a dictionary of index lists, made first"""
    weight, index = route(x, router)
    rows = {e: torch.where(index == e) for e in range(E)}
    out = torch.zeros_like(x)
    for e, (token, slot) in rows.items():
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def einsum_dispatch(x, router, gate_up, down):
    """einsum with dispatch masks"""
    weight, index = route(x, router)
    combine = torch.einsum("tke,tk->te", one_hot(index, E).to(x.dtype), weight)
    gate, up = torch.einsum("td,end->ten", x, gate_up).chunk(2, -1)
    y = torch.einsum("ten,edn->ted", silu(gate) * up, down)
    return torch.einsum("ted,te->td", y, combine)


@spelled(LOWERED)
def gathered_weights(x, router, gate_up, down):
    """weights gathered for each token: `gate_up[index]`"""
    weight, index = route(x, router)
    gate, up = torch.einsum("td,tknd->tkn", x, gate_up[index]).chunk(2, -1)
    return torch.einsum("tkn,tkdn,tk->td", silu(gate) * up, down[index], weight)


@spelled(LOWERED)
def unique_as_a_list(x, router, gate_up, down):
    """`for e in index.unique().tolist()`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in index.unique().tolist():
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def set_of_numbers(x, router, gate_up, down):
    """`for e in set(index.flatten().tolist())`"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in set(index.flatten().tolist()):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


def sorted_rows(x, index):
    flat = index.flatten()
    order = flat.argsort(stable=True)
    return order, order // K, flat.bincount(minlength=E)


@spelled(LOWERED)
def counts_drive_slices(x, router, gate_up, down):
    """`bincount(…).tolist()` drives slices of the sorted rows, `torch.cat`"""
    weight, index = route(x, router)
    order, token, counts = sorted_rows(x, index)
    rows, parts, start = x[token], [], 0
    for e, count in enumerate(counts.tolist()):
        parts.append(expert(rows[start : start + count], gate_up, down, e))
        start += count
    y = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


@spelled(LOWERED)
def numpy_counts(x, router, gate_up, down):
    """the same with `counts.numpy()`"""
    weight, index = route(x, router)
    order, token, counts = sorted_rows(x, index)
    rows, parts, start = x[token], [], 0
    for e, count in enumerate(counts.numpy()):
        parts.append(expert(rows[start : start + count], gate_up, down, e))
        start += count
    y = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


@spelled(LOWERED)
def split_and_cat(x, router, gate_up, down):
    """`split(counts.tolist())`, a comprehension, `torch.cat`"""
    weight, index = route(x, router)
    order, token, counts = sorted_rows(x, index)
    parts = [expert(rows, gate_up, down, e) for e, rows in enumerate(x[token].split(counts.tolist()))]
    y = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, y)


@spelled(LOWERED)
def separate_weights(x, router, gate_up, down):
    """`for e, (w1, w2) in enumerate(zip(…))`, each expert with weights of its own: unrolled"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e, (w1, w2) in enumerate(zip(gate_up.unbind(0), down.unbind(0), strict=True)):
        token, slot = torch.where(index == e)
        gate, up = linear(x[token], w1).chunk(2, -1)
        out.index_add_(0, token, linear(silu(gate) * up, w2) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def sentinel_expert(x, router, gate_up, down):
    """an index beyond the experts for slots that go to none"""
    weight, index = route(x, router)
    index = torch.where(weight < 0.3, E, index)
    out = torch.zeros_like(x)
    mask = one_hot(index, E + 1).permute(2, 1, 0)
    for e in range(E):
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out


@spelled(LOWERED)
def shared_expert(x, router, gate_up, down):
    """a shared expert besides"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, slot, None])
    return out + expert(x, gate_up.mean(0, keepdim=True), down.mean(0, keepdim=True), 0)


@spelled(LOWERED)
def before_the_product(x, router, gate_up, down):
    """the routing weight before the down projection"""
    weight, index = route(x, router)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, up = linear(x[token], gate_up[e]).chunk(2, -1)
        out.index_add_(0, token, linear(silu(gate) * up * weight[token, slot, None], down[e]))
    return out


@spelled(LOWERED)
def transposed_and_interleaved(x, router, gate_up, down):
    """`x @ w[e]` with transposed weights, gate and up interleaved, clamped"""
    weight, index = route(x, router)
    first, second = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        h = x[token] @ first[e]
        gate, up = h[..., ::2].clamp(max=1.0), h[..., 1::2].clamp(-1.0, 1.0)
        out.index_add_(0, token, (gate * torch.sigmoid(1.7 * gate) * (up + 1)) @ second[e] * weight[token, slot, None])
    return out


@spelled(LOWERED)
def top_1_with_capacity(x, router, gate_up, down):
    """top-1 with a capacity, tokens beyond it dropped"""
    weight, index = (x @ router.T).softmax(-1).max(-1)
    place = one_hot(index, E).cumsum(0).gather(1, index[:, None])[:, 0]
    out = torch.zeros_like(x)
    for e in range(E):
        token = torch.where((index == e) & (place <= 2))[0]
        out.index_add_(0, token, expert(x[token], gate_up, down, e) * weight[token, None])
    return out


@spelled(LOWERED)
def expert_choice(x, router, gate_up, down):
    """expert choice: each expert takes its best tokens"""
    weight, token = (x @ router.T).softmax(-1).T.topk(3, -1)
    out = torch.zeros_like(x)
    for e in range(E):
        out.index_add_(0, token[e], expert(x[token[e]], gate_up, down, e) * weight[e, :, None])
    return out
