"""Near misses of the forms in gathered_spellings.py: equal to eager whatever becomes of them. What lowers each."""

from __future__ import annotations

import pytest
import torch
from beside_eager import by_gates_alone, regions_of
from module_spellings import MODULES
from spellings import BROKEN, E
from table import Runner
from torch.nn.functional import softmax

from moebius import capture, stats
from moebius.lowering.experts import blocks, buffers, combined, dense
from moebius.python import methods


def written(x, moe, *, reads=lambda e: e, writes=lambda e: e):
    """written_by_token with other places read, or written."""
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
    mask = gates.bool()
    y = torch.einsum("td,te->etd", x, mask.to(x.dtype))
    for e, expert in enumerate(moe.experts):
        token = mask[:, e]
        y[writes(e), token] = gates[token, e, None] * expert(y[reads(e), token])
    return y.sum(0)


PLACES = {
    "its own": ({}, True),
    "its own, from the end": ({"writes": lambda e: e - E}, True),
    "what the one before wrote": ({"reads": lambda e: max(e - 1, 0)}, False),
    "the same, from the end": ({"reads": lambda e: max(e - 1, 0) - E}, False),
    "what earlier pairs wrote": ({"reads": lambda e: E - 1 - e}, True),  # pair by pair: two operators
    "what all write": ({"reads": lambda e: 1, "writes": lambda e: 1}, False),
}


@pytest.mark.parametrize("which", PLACES)
def test_places_that_are_apart(which):
    changed, lowers = PLACES[which]
    _, regions = regions_of(lambda x, moe: written(x, moe, **changed))
    assert (bool(regions) and all(region.lowered for region in regions)) == lowers


def test_places_that_are_not_apart_matter(monkeypatch):
    """Were they taken for apart, the step would be wrong."""
    monkeypatch.setattr(blocks, "are_apart", lambda write, read: True)
    with pytest.raises(AssertionError):
        regions_of(lambda x, moe: written(x, moe, **PLACES["what the one before wrote"][0]))


def summed(x, moe, *, token_of=lambda token: token, begin=0, read=False):
    """by_map with one thing done otherwise."""
    weight, index = moe.route(x)
    out = begin
    for e, expert in enumerate(moe.experts):
        token, slot = torch.where(index == e)
        part = torch.zeros_like(x).index_add(0, token_of(token), expert(x[token]) * weight[token, slot, None])
        out = out + part
        if read:
            out = out * part.square().mean()
    return out


SUMS = {
    "from 0": ({}, True),
    "from 1": ({"begin": 1}, False),
    "at other tokens, several at one": ({"token_of": lambda token: token // 2}, False),
    "a part is read again": ({"read": True}, False),
}


@pytest.mark.parametrize("which", SUMS)
def test_sums_of_parts(which):
    changed, lowers = SUMS[which]
    _, regions = regions_of(lambda x, moe: summed(x, moe, **changed))
    if lowers:
        assert regions and all(region.lowered for region in regions)


def levels(x, moe, passes_on):
    """nested, whose iterations may pass something on."""
    group, out = moe.gate(x)[:, :2].argmax(-1), torch.zeros_like(x)
    for g, experts in enumerate([list(moe.experts), list(moe.named.values())]):
        own = torch.where(group == g)[0]
        p, best = softmax(moe.gate(x[own]), -1).max(-1)
        for i, expert in enumerate(experts):
            token = own[torch.where(best == i)[0]]
            rows = x[token]
            rows = rows + out[token] + out.mean(0) if passes_on else rows
            out = out.index_add(0, token, expert(rows) * p[best == i, None])
    return out


@pytest.mark.parametrize("passes_on", [False, True])
def test_levels(passes_on):
    _, regions = regions_of(lambda x, moe: levels(x, moe, passes_on))
    assert any(region.lowered for region in regions) == (not passes_on)


@pytest.mark.parametrize("of", [lambda h, e: h, lambda h, e: h * (e + 1), lambda h, e: h - h.mean(0)])
def test_a_mask_over_what_is_made_of_the_tokens(of):
    def layer(x, moe):
        weight, index = moe.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        out = torch.zeros_like(x)
        for e, expert in enumerate(moe.experts):
            mask = (index == e).any(-1, keepdim=True)
            out = out + expert(of(torch.tanh(x), e) * mask) * gates[:, e : e + 1]
        return out

    regions_of(layer)


def test_weights_with_an_axis_that_is_summed():
    """``ted,tek->td`` of gates that are repeated: each counts as often as that."""

    def layer(x, moe):
        weight, index = moe.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        y = torch.stack([expert(x) for expert in moe.experts], 1)
        return torch.einsum("ted,tek->td", y, gates[:, :, None].expand(-1, -1, 3))

    regions_of(layer)


def test_one_of_a_product_that_sums_nothing():
    """``ted,te->ted`` and then one of the experts is no mixture."""

    def layer(x, moe):
        weight, index = moe.route(x)
        gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
        y = torch.stack([expert(x) for expert in moe.experts], 1)
        return torch.einsum("ted,te->ted", y, gates)[:, 0]

    regions_of(layer)


PLACED = ([2, 5], [0, 0], [5, 2], [-3, 8], [3, 100], [-100, 2])


@pytest.mark.parametrize("dim", [0, -1])
def test_cut_at_a_tensor_of_places(dim):
    """One graph for all places, however they lie."""

    def cut(x, places):
        return [part * 2 for part in torch.tensor_split(x, places, dim)], x.tensor_split(places, dim=dim)[0].sum()

    captured, x = capture(cut), torch.arange(81.0).view(9, 9)
    for places in map(torch.tensor, PLACED):
        (found, total), (parts, other) = captured(x, places), cut(x, places)
        assert len(found) == len(parts) and all(map(torch.equal, found, parts)) and torch.equal(total, other)
    assert stats(captured).graphs == 1 and not stats(captured).breaks


def test_cut_otherwise():
    def cut(x, count):
        return torch.tensor_split(x, count, 1), x.tensor_split((1, 3)), torch.tensor_split(x, sections=2)

    captured, x = capture(cut), torch.randn(4, 6)
    for count in (3, torch.tensor(4), torch.tensor([[1]]), torch.tensor([0.5])):
        try:
            expected = cut(x, count)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:60]):
                captured(x, count)
        else:
            found = captured(x, count)
            assert all(map(torch.equal, sum(map(tuple, found), ()), sum(map(tuple, expected), ())))


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("written_by_token", lambda patch: patch.setattr(blocks, "are_apart", lambda write, read: False)),
        ("masked_after_an_activation", lambda patch: patch.setattr(dense.Sparse, "is_shared", given)),
        ("take_along_the_experts", lambda patch: patch.setattr(combined, "by_product", lambda node: None)),
    ],
)
def test_what_lowers_it(monkeypatch, name, off):
    """Without it the layer is captured as it was written."""
    off(monkeypatch)
    by_gates_alone(monkeypatch)
    _, regions = regions_of(MODULES[name].function)
    assert not any(region.lowered for region in regions)


def test_rows_written_into_zeros_are_added(monkeypatch):
    """Without it the experts alone are the operator, and what they give is added as it was written."""
    for off in (False, True):
        if off:
            monkeypatch.setattr(buffers, "written_part", lambda end, reader: None)
        (region,) = regions_of(MODULES["by_map"].function)[1]
        assert region.lowered and region.idiom.endswith("rows of its own") == off


def given(self, rows):
    return rows.op == "placeholder"


def test_without_pieces_at_places_it_breaks(monkeypatch):
    monkeypatch.setattr(methods, "cuts_at_places", lambda *_, **__: False)
    runner = Runner("cut_by_tensor")
    assert not runner.call(0)
    assert runner.report()[0] == BROKEN
