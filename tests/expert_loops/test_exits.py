"""Experts between which data may leave the loop: `break`, `return`, a result that is None. Those behind run on no rows
where it is left, and get no gradient."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from spellings import E, K

from moebius.lowering.experts import hoisted_conditionals

SEEDS = (0, 3, 1, 3, 2, 0)


def cut_rows(x, moe):
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    return weight, order, x[order // K], index.flatten().bincount(minlength=E).tolist()


def when_all_are_done(x, moe):
    weight, order, rows, counts = cut_rows(x, moe)
    parts, start = [], 0
    for expert, count in zip(moe.experts, counts, strict=True):
        if start >= len(rows):
            break
        parts.append(expert(rows[start : start + count]))
        start += count
    y = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // K, y)


def left_with_rows(x, moe):
    """Experts behind the branch have rows, which then count for nothing."""
    weight, order, rows, counts = cut_rows(x, moe)
    out, start = torch.zeros_like(x), 0
    for e, expert in enumerate(moe.experts):
        if counts[e] > 9:
            break
        own = order[start : start + counts[e]]
        out.index_add_(0, own // K, expert(rows[start : start + counts[e]]) * weight.flatten()[own, None])
        start += counts[e]
    return out + x


def returned(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        if len(token) == 0:
            return out * 2.0
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


def by_a_tensor(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = index == e
        if not mask.any():
            break
        token, slot = torch.where(mask)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


def of_an_expert(x, moe, e, token):
    return None if token.numel() == 0 else moe.experts[e](x[token])


def none_or_rows(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        y = of_an_expert(x, moe, e, token)
        if y is not None:
            out.index_add_(0, token, y * weight[token, slot, None])
    return out


def beyond_the_rows(x, moe):
    """Where the loop is left the list says something that may not be looked up."""
    weight, index = moe.route(x)
    rest = torch.where(x[0, 0] < 0, E, E - 1)  # where the last five go: nowhere, or to the last expert
    index = torch.where((torch.arange(len(x)) < 5)[:, None], index, rest)
    few, out = x[:5], torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        if (token >= 5).any():
            break
        out.index_add_(0, token, expert(few[token]) * weight[token, slot, None])
    return out + x


def two_by_masks(x, moe):
    """Rows that a mask picks before the branch."""
    weight, index = moe.gate(x)[:, :2].softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for e in range(2):
        rows = x[index == e]
        if len(rows) == 0:
            break
        out[index == e] = moe.experts[e](rows) * weight[index == e, None]
    return out


def looked_up_before(x, moe):
    """All rows, before the first branch."""
    weight, index = moe.route(x)
    places = [torch.where(index == e) for e in range(E)]
    rows = [x[token] for token, _ in places]
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        if len(rows[e]) == 0:
            break
        token, slot = places[e]
        out = out.index_add(0, token, expert(rows[e]) * weight[token, slot, None])
    return out


def asks_what_an_expert_gave(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        y = expert(x[token]) * weight[token, slot, None]
        out.index_add_(0, token, y)
        if y.abs().sum() < 1e-9:
            break
    return out


def asks_the_sum(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        if out.abs().max() > 3.0:
            break
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    return out


def asks_what_is_written(x, moe):
    weight, index = moe.route(x)
    left, out = torch.bincount(index.flatten(), minlength=E), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        if left.sum() == 0:
            break
        token, slot = torch.where(index == e)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        left[e] = 0
    return out


RIGHT = [when_all_are_done, left_with_rows, returned, by_a_tensor, none_or_rows, beyond_the_rows, two_by_masks,
         looked_up_before]  # fmt: skip
KEPT = [asks_what_an_expert_gave, asks_the_sum, asks_what_is_written]


@pytest.mark.parametrize("function", RIGHT)
def test_one_operator(function):
    _, regions = regions_of(function, SEEDS[:1])
    assert regions and all(region.lowered for region in regions), regions


@pytest.mark.share(4)
@pytest.mark.parametrize("function", RIGHT + KEPT)
@pytest.mark.parametrize("first", [0, 3])
def test_left_or_not(function, first):
    regions_of(function, (first, *SEEDS), errors=(RuntimeError, ValueError, IndexError))


@pytest.mark.parametrize("function", KEPT)
def test_kept(function):
    _, regions = regions_of(function, SEEDS[:1])
    assert not any(region.lowered for region in regions)


def test_rows_that_are_not_cut(monkeypatch):
    """Without the cut what may not be looked up is."""
    monkeypatch.setattr(hoisted_conditionals, "cut", lambda rows, asked, first: rows)
    with pytest.raises((AssertionError, IndexError)):
        regions_of(beyond_the_rows, range(8))
