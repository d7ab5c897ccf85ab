"""Experts whose weights or tokens go through another precision in the iteration, fp8 above all, and come back."""

from __future__ import annotations

import pytest
import torch
from beside_eager import regions_of
from row_experts import Experts
from spellings import E
from torch.nn.functional import linear, silu

from moebius.lowering import operators
from moebius.lowering.experts import rules_rows
from moebius.lowering.experts.reader import Reader


def through(x, dtype=torch.float8_e4m3fn):
    return x.to(dtype).to(x.dtype)


def loop(expert, hits=False, whole=True):
    def layer(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e in index.unique() if hits else range(E):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, expert(x[token], moe.of(e, whole)) * weight[token, slot, None])
        return out

    return layer


def weights(h, p):
    return linear(silu(linear(h, through(p["up"]))), through(p["down"]))


def tokens_too(h, p):
    return linear(silu(linear(through(h), through(p["up"]))), through(p["down"]))


def between(h, p):
    return linear(through(silu(linear(through(h), through(p["up"]), p["b_up"]))), through(p["down"]), p["b_down"])


def vectors(h, p):
    return linear(silu(linear(h, through(p["up"]), through(p["b_up"], torch.bfloat16))), through(p["down"]))


def turned(h, p):
    return (h @ through(p["square"].T, torch.float8_e5m2)).tanh() @ through(p["square"]).T


def rounded_twice(h, p):
    """Each cast rounds the gradient that goes through it."""
    return linear(silu(linear(h, through(p["up"]))) * linear(h, through(p["up"])), p["down"])


def rounded_twice_to_half(h, p):
    up = [through(p["up"], torch.float16) for _ in range(2)]
    return linear(silu(linear(h, up[0])) * linear(h, up[1]), p["down"])


def rounded_and_cut(h, p):
    """The parts' gradients are one tensor before it is rounded (fp8 has no sums)."""
    gate, up = through(p["up"]).chunk(2)
    return linear(silu(linear(h, gate)) * linear(h, up), p["down"][:, : len(up)])


def cut_and_rounded(h, p):
    gate, up = through(p["up"][:5]), through(p["up"])[-5:]
    return linear(silu(linear(h, gate)) * linear(h, up), p["down"][:, :5])


def tokens_twice(h, p):
    return linear(silu(linear(through(h), p["up"])) * linear(through(h), p["up"]), p["down"])


def three_precisions(h, p):
    up = through(through(p["up"], torch.float16), torch.bfloat16)
    return linear(silu(linear(h, up)), p["down"].to(torch.float8_e5m2).to(torch.float8_e4m3fn).to(h.dtype))


RIGHT = [weights, tokens_too, between, vectors, turned, rounded_twice, rounded_twice_to_half, rounded_and_cut,
         cut_and_rounded, tokens_twice, three_precisions]  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize("expert", RIGHT)
@pytest.mark.parametrize(("hits", "whole"), [(False, True), (True, True), (False, False)])
def test_through_another_precision(expert, hits, whole):
    _, regions = regions_of(loop(expert, hits, whole), layer=Experts)
    assert regions and all(region.lowered for region in regions), regions


def scaled(h, p):
    """By the largest of its own weights: no element's own business."""
    largest = p["up"].abs().amax() / 448
    return linear(silu(linear(h, through(p["up"] / largest) * largest)), p["down"])


@pytest.mark.parametrize("whole", [True, False])
def test_scaled_by_its_own_weights(whole):
    regions_of(loop(scaled, whole=whole), layer=Experts)


def bits_of_weights(h, p):
    """The same bytes as another number, which is no view of the number."""
    up = p["up"].half().view(torch.bfloat16).to(h.dtype)
    return linear(silu(linear(h, up)), p["down"])


def bits_of_tokens(h, p):
    return linear(silu(linear(h.half().view(torch.int16).to(h.dtype) / 1e4, p["up"])), p["down"])


@pytest.mark.parametrize("expert", [bits_of_weights, bits_of_tokens])
@pytest.mark.parametrize("whole", [True, False])
def test_bits_seen_as_another_dtype(expert, whole):
    regions_of(loop(expert, whole=whole), layer=Experts)


def test_bits_are_no_reshape(monkeypatch):
    monkeypatch.setattr(operators, "BITS", operators.METHODS["reshape"])
    with pytest.raises(AssertionError):
        regions_of(loop(bits_of_weights), layer=Experts)


@pytest.mark.parametrize(("expert", "error"), [(rounded_twice, AssertionError), (tokens_twice, NotImplementedError)])
def test_each_cast_stands_for_itself(monkeypatch, expert, error):
    make = Reader.make
    monkeypatch.setattr(Reader, "make", lambda self, *args, each=None: make(self, *args))
    monkeypatch.setattr(rules_rows, "rounds_alone", lambda _: False)
    with pytest.raises(error):
        regions_of(loop(expert), layer=Experts)


@pytest.mark.parametrize("expert", [weights, vectors, turned])
def test_rounding_is_no_rounding_back(monkeypatch, expert):
    monkeypatch.setattr(rules_rows, "holds", lambda *_: True)
    with pytest.raises(AssertionError):
        regions_of(loop(expert), layer=Experts)
