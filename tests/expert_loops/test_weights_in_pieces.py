"""Weights of all experts in one tensor that is cut into one piece an expert first, as DBRX has them."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from row_experts import Experts
from spellings import D, E, N
from torch.nn.functional import linear, silu

from moebius.lowering.experts import rules_rows


def layer_of(up, down):
    """up, down: the pieces, of the module."""

    def layer(x, moe):
        weight, index = moe.route(x)
        w1, w2, out = up(moe), down(moe), torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(index == e)
            if token.shape[0] == 0:
                continue
            out.index_add_(0, token, linear(silu(linear(x[token], w1[e])), w2[e]) * weight[token, slot, None])
        return out

    return layer


def chunks(moe):
    return [piece.squeeze(0) for piece in moe.whole["up"].view(E * N, D).view(E, N, D).chunk(E, dim=0)]


def splits(moe):
    return [piece[0] for piece in moe.whole["down"].split(1)]


def unbound(moe):
    return moe.whole["down"].unbind(0)


@pytest.mark.parametrize(("up", "down"), [(chunks, splits), (chunks, unbound)])
def test_one_piece_an_expert(up, down):
    _, regions = regions_of(layer_of(up, down), layer=Experts)
    assert regions and all(region.lowered for region in regions), regions


def of_two_rows(moe):
    """Half as many pieces, the first row of each: the last iterations have none."""
    return [piece[0] for piece in torch.cat([moe.whole["down"]] * 2).chunk(E, dim=0)]


def turned_round(moe):
    return splits(moe)[::-1]


def scaled(moe):
    return [piece.squeeze(0) * (i + 1) for i, piece in enumerate(moe.whole["down"].chunk(E))]


def one_written(moe):
    pieces = (moe.whole["down"] * 1.0).chunk(E)
    pieces[1].data.mul_(2.0)
    return [piece.squeeze(0) for piece in pieces]


@pytest.mark.share(2)
@pytest.mark.parametrize("down", [of_two_rows, turned_round, scaled, one_written])
def test_other_pieces(down):
    regions_of(layer_of(chunks, down), layer=Experts)


def test_pieces_of_more_than_one(monkeypatch):
    """Their first rows are not those of the whole."""
    layer = layer_of(chunks, of_two_rows)
    assert not all(region.lowered for region in regions_of(layer, layer=Experts)[1])
    real = rules_rows.value_of
    alone = lambda node: tuple(row for piece in real(node) for row in piece.split(1))  # noqa: E731
    monkeypatch.setattr(rules_rows, "value_of", alone)
    with pytest.raises(AssertionError):
        regions_of(layer, layer=Experts)
