"""Near misses of the forms in published_spellings.py: equal to eager whatever becomes of them. What lowers each."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from module_spellings import MODULES
from published_spellings import placed
from spellings import D, E
from torch.nn.functional import dropout, gelu, linear, relu

from moebius.lowering.experts import reader, rewrite, views


def by_argmax(x, moe, *, index=None, mask_of=None, slot_of=None, rows_of=None):
    """slots_by_argmax with one thing done otherwise."""
    weight, chosen = moe.route(x)
    index = chosen if index is None else index(chosen, x)
    out = torch.zeros_like(x)
    for e in range(E):
        mask = index == e
        token = mask.any(dim=-1).nonzero().squeeze(-1)
        y = moe.experts[e](x.index_select(0, token))
        own = mask if mask_of is None else mask_of(mask, index, e)
        slot = own[token].int().argmax(dim=-1, keepdim=True)
        slot = slot if slot_of is None else slot_of(slot)
        rows = token if rows_of is None else rows_of(token)
        share = weight.index_select(0, rows).gather(-1, slot)
        out.index_add_(0, token, y * share)
    return out


def twice(index, x):
    return index[:, :1].expand(-1, 2).contiguous()


def shuffled(index, x):
    """Each row holds experts twice, in a reshaped form."""
    return index.t().reshape(len(x), 2)


NEAR = {
    "the same": {},
    "an expert twice": {"index": twice},
    "another order": {"index": shuffled},
    "the mask of another expert": {"mask_of": lambda mask, index, e: index == (e + 1) % E},
    "the mask of another index": {"mask_of": lambda mask, index, e: index.flip(1) == e},
    "the opposite mask": {"mask_of": lambda mask, index, e: ~mask},
    "the other slot": {"slot_of": lambda slot: 1 - slot},
    "rows of other tokens": {"rows_of": lambda token: token.flip(0)},
}


@pytest.mark.parametrize("name", NEAR)
def test_slots_by_argmax(name):
    _, regions = regions_of(lambda x, moe: by_argmax(x, moe, **NEAR[name]))
    assert name != "the same" or (regions and all(region.lowered for region in regions))


def written(x, moe, after):
    weight, index = moe.route(x)
    places = placed(index, E, moe.capacity).to(x.dtype)
    h = torch.bmm(torch.einsum("tkec,td->ecd", places, x), moe.w1)
    h = after(h, moe)
    return torch.einsum("tkec,tk,ecd->td", places, weight, torch.bmm(relu(h), moe.w2))


def seen_before(h, moe):
    kept = h * 2
    h += moe.b1[:, None]
    return h + kept


def seen_by_a_view(h, moe):
    first = h[:, :, :2]
    h += moe.b1[:, None]
    return h * first.sum(-1, keepdim=True)


def written_twice(h, moe):
    h += moe.b1[:, None]
    h *= 2
    return h


def of_itself(h, moe):
    h += h
    return h


def through_a_view(h, moe):
    h[:, 0] += 1
    h += moe.b1[:, None]
    return h


def scaled(h, moe):
    h.add_(moe.b1[:, None], alpha=3)
    return h


@pytest.mark.parametrize("after", [seen_before, seen_by_a_view, written_twice, of_itself, through_a_view, scaled])
def test_written_into_a_product(after):
    _, regions = regions_of(lambda x, moe: written(x, moe, after))
    assert after is not written_twice or all(region.lowered for region in regions)


def test_a_write_that_backward_refuses():
    """What was saved of the product before it is written is an error in backward, as in eager."""

    def saved(h, moe):
        kept = h * moe.b1[:, None]
        h += 1
        return h + kept

    regions_of(lambda x, moe: written(x, moe, saved), errors=(RuntimeError,))


def dotted(x, moe, first="...nd,...dh->...nh", second="...nh,...hd->...nd", part=None):
    weight, index = moe.route(x)
    places = placed(index, E, moe.capacity).to(x.dtype)
    slots = torch.einsum("tkec,td->ecd", places, x)
    y = torch.einsum(second, gelu(torch.einsum(first, slots, moe.w1 if part is None else moe.w1[part])), moe.w2)
    return torch.einsum("tkec,tk,ecd->td", places, weight, y)


@pytest.mark.parametrize(
    ("given", "lowered"),
    [
        ({}, True),
        ({"first": "end,...dh->...nh", "second": "e...h,e...d->...e"}, None),
        ({"first": "...nd,edh->...nh"}, False),  # one more axis than experts: a sum over them
        ({"part": slice(0, 1)}, False),  # the weights of one expert for all
    ],
)
def test_dots(given, lowered):
    _, regions = regions_of(lambda x, moe: dotted(x, moe, **given), errors=(RuntimeError,))
    if lowered is not None:
        assert bool(regions) and all(region.lowered for region in regions) is lowered


def on_parts(x, moe, between, same=False):
    """Two projections of each expert on parts [B, S, D] of the tokens, and something between these."""
    parts = x.view(2, -1, D).repeat(1, E, 1).chunk(E, dim=1)
    found = []
    for e, part in enumerate(parts):
        h = linear(parts[0] if same else part, moe.w1[e].T)
        found.append(linear(between(h, part, found), moe.w2[e].T))
    weight, _ = moe.route(x)
    return (torch.cat(found, 1).view(2, E, -1, D).transpose(0, 1).reshape(E, -1, D) * weight[:, :1]).sum(0)


BETWEEN = {
    "an activation": lambda h, part, found: gelu(h),
    "halves": lambda h, part, found: torch.cat([torch.tanh(a) for a in h.chunk(2, -1)], -1),
    "along the rows": lambda h, part, found: h.softmax(1),
    "halves of the rows": lambda h, part, found: torch.cat([a * 2 for a in h.chunk(2, 0)], 0),
    "a number of each row": lambda h, part, found: relu(h) * part.sum(-1, keepdim=True),
    "what the expert before gave": lambda h, part, found: relu(h) + (found[-1].mean() if found else 0),
    "numbers drawn": lambda h, part, found: dropout(relu(h), 0.5, training=True),
    "in place": lambda h, part, found: (h * 1).mul_(2),
    "of the batch": lambda h, part, found: h - h.mean(0),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_rows_with_several_axes(name):
    _, regions = regions_of(lambda x, moe: on_parts(x, moe, BETWEEN[name]))
    lowered = [region for region in regions if region.lowered]
    assert bool(lowered) == (name == "an activation")


def test_all_on_the_same_rows():
    _, regions = regions_of(lambda x, moe: on_parts(x, moe, BETWEEN["an activation"], same=True))
    assert not any(region.lowered for region in regions)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("added_in_place", lambda patch: patch.setattr(rewrite, "write_out_of_place", lambda work: None)),
        ("einsum_with_dots", lambda patch: patch.setattr(views, "named_axes", lambda *args: None)),
        ("soft_slots", lambda patch: patch.setattr(rewrite, "flatten_rows", lambda work: [])),
        ("chunks_of_places", lambda patch: patch.setattr(rewrite, "flatten_rows", lambda work: [])),
        ("slots_by_argmax", lambda patch: patch.setitem(reader.RULES, "argmax", [])),
        ("slots_by_argmax", lambda patch: patch.setitem(reader.RULES, "gather", [])),
    ],
)
def test_what_lowers_it(monkeypatch, name, off):
    """Without it the layer is captured as it was written, or the experts are an operator on their rows alone."""
    off(monkeypatch)
    _, regions = regions_of(MODULES[name].function)
    assert not any(region.lowered and (region.top_k or name != "slots_by_argmax") for region in regions)
