"""What an iteration does with each row of its expert's result before it adds it (norms of rows), right and subtly
wrong."""

from __future__ import annotations

import pytest
import torch
from spellings import E
from table import tensors
from torch.nn import functional

import moebius
from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import writing

D = 8


def rms(y, scale):
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + scale)


def scaled_then_rms(y, scale):
    y = y.float().double() * (1.0 + scale)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(scale)


def layer_norm(y, scale):
    return functional.layer_norm(y, (D,), scale, scale * 0.5)


def centered(y, scale):
    return (y - y.mean(1, keepdim=True)) / (y.var(dim=-1, keepdim=True) + 0.1).sqrt() + scale


def shares(y, scale):
    return torch.softmax(y, dim=-1) * scale


def largest(y, scale):
    return y / (y.abs().amax(dim=(-1,), keepdim=True) + 1.0)


RIGHT = [rms, scaled_then_rms, layer_norm, centered, shares, largest]


def across_rows(y, scale):
    return y - y.mean(0, keepdim=True)


def of_everything(y, scale):
    return y / (1.0 + y.pow(2).mean())


def shares_of_rows(y, scale):
    return torch.softmax(y, dim=0) * scale


def by_the_number_of_rows(y, scale):
    return y * scale / (1 + y.shape[0])


def one_row_for_all(y, scale):
    return y - y[:1]


def in_another_order(y, scale):
    return rms(y, scale).flip(0)


def summed_up(y, scale):
    return rms(y, scale).cumsum(0)


def kept_in_place(y, scale):
    return rms(y, scale).mul_(y.sum())


WRONG = [across_rows, of_everything, shares_of_rows, by_the_number_of_rows, one_row_for_all, in_another_order,
         summed_up, kept_in_place]  # fmt: skip


def layer(after, drop=False, own=False):
    def function(x, router, gate_up, down, scale):
        weight, index = (x @ router.T).softmax(-1).topk(2, -1)
        if drop:
            index = torch.where(weight < 0.3, E, index)
        out = torch.zeros_like(x)
        mask = functional.one_hot(index, E + 1).permute(2, 1, 0)
        for row in mask.sum((1, 2)).nonzero():
            e = row[0]
            if e == E:
                continue
            slot, token = torch.where(mask[e])
            gate, up = functional.linear(x[token], gate_up[e]).chunk(2, -1)
            y = functional.linear(functional.silu(gate) * up, down[e])
            y = after(y, scale[e] if own else scale[0]) * weight[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    return function


def lowered(function):
    moebius.reset()
    captured = capture(function)
    for seed in range(3):
        scale = torch.randn(E, D, dtype=torch.float64)
        results = []
        for run in (captured, function):
            given = [*tensors(seed), scale.clone().requires_grad_()]
            out = run(*given)
            out.square().sum().backward()
            results.append([out, *(t.grad for t in given)])
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
    (region,) = report_of(captured_of(captured)).expert_regions
    assert region.lowered or ".py:" in region.refusal
    return region.kernel == "cpu"


@pytest.mark.share(10)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("after", RIGHT)
def test_right(after, drop, own):
    assert lowered(layer(after, drop, own))


BEHIND = [torch.relu, torch.tanh, torch.exp, torch.neg, torch.square, lambda y: y - 1, lambda y: y.clamp(-1, 1),
          lambda y: y / (1 + y.abs())]  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("after", [rms, layer_norm, shares])
def test_what_is_computed_behind_them(after, behind):
    """It is done after the operator, too: alone it would be no work of this form."""
    assert lowered(layer(lambda y, scale: behind(after(y, scale))))


@pytest.mark.parametrize("after", WRONG)
def test_wrong(after):
    assert not lowered(layer(after))


def test_slots_of_no_expert_add_nothing(monkeypatch):
    """Without the check, what a norm with a bias makes of zeros would be added for them."""
    monkeypatch.setattr(writing, "is_among", lambda *_: True)
    with pytest.raises(AssertionError):
        lowered(layer(layer_norm, drop=True))


def residual_then_norm(y, rows, scale):
    return functional.layer_norm(rows + y, (D,), scale)


def weighted_by_its_row(y, rows, scale):
    return torch.softmax(y * rows, -1)


def norm_of_a_sum_inside(y, rows, scale):
    return functional.layer_norm(torch.tanh(y + scale) * 0.5 + rows.sigmoid(), (D,))


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("over_hits", [False, True])
@pytest.mark.parametrize("after", [residual_then_norm, weighted_by_its_row, norm_of_a_sum_inside])
def test_rows_of_x_besides(after, over_hits, top_k):
    """What is computed of the expert's rows and of other rows is not of the expert's rows alone."""

    def function(x, router, gate_up, down, scale):
        weight, index = (x @ router.T).softmax(-1).topk(top_k, -1)
        out = torch.zeros_like(x)
        for e in index.unique() if over_hits else range(E):
            token, slot = torch.where(index == e)
            gate, up = functional.linear(x[token], gate_up[e]).chunk(2, -1)
            y = functional.linear(functional.silu(gate) * up, down[e])
            out.index_add_(0, token, after(y, x[token], scale[0]) * weight[token, slot, None])
        return out

    lowered(function)
