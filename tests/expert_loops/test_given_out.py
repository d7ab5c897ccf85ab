"""What the iterations compute and a step gives out, or has hooks on, with backward outside of the step: it goes through
that as it does in plain Python, so such a loop stays one."""

from __future__ import annotations

import pytest
import torch
from module_layers import Layer
from spellings import D, E, K
from torch.nn.functional import linear, silu

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering import pipeline


def layer_with(look):
    """look: what is done with each iteration's hidden rows; what it gives is given out."""

    def step(x, moe):
        weight, index = moe.route(x)
        out, kept = torch.zeros_like(x), []
        for e in range(E):
            token, slot = torch.where(index == e)
            h = linear(x[token], moe.w1[e].t())
            kept += look(h)
            out = out.index_add(0, token, linear(silu(h), moe.w2[e].t()) * weight[token, slot, None])
        return out, kept

    return step


def hooked(h):
    h.register_hook(lambda gradient: gradient * 2)
    return []


LOOKS = {
    "given out": lambda h: [h],
    "hooked": hooked,
    "both": lambda h: hooked(h) or [h],
    "detached": lambda h: [h.detach()],
}


def outcome(step, moe):
    moe.zero_grad()
    torch.manual_seed(3)
    x = torch.randn(10, D, dtype=torch.float64, requires_grad=True)
    out, kept = step(x, moe)
    asked = [h for h in kept if h.requires_grad]
    found = torch.autograd.grad(out.square().sum(), [x, moe.w1, moe.w2, *asked])
    return [out, *kept, *found]


def compare(look):
    torch.manual_seed(1)
    moe, step = Layer().double(), layer_with(LOOKS[look])
    captured = capture(step)
    for ours, plain in zip(outcome(captured, moe), outcome(step, moe), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
    return [region.lowered for region in report_of(captured_of(captured)).expert_regions]


@pytest.mark.parametrize("look", LOOKS)
def test_backward_goes_through_it(look):
    assert not any(compare(look)) or look == "detached"


def test_without_a_look_it_is_lowered(monkeypatch):
    monkeypatch.setitem(LOOKS, "nothing", lambda h: [])
    assert compare("nothing") == [True]


@pytest.mark.parametrize("look", ["given out", "hooked", "both"])
def test_lowered_backward_would_go_past_it(look, monkeypatch):
    monkeypatch.setattr(pipeline, "is_lost", lambda *_: False)
    monkeypatch.setattr(pipeline, "is_unread", lambda *_: False)  # (what is given out may be written, too)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(look)


def test_a_gradient_that_may_be_asked_for_is_enough(monkeypatch):
    """Also where nobody may write into it."""
    monkeypatch.setattr(pipeline, "is_unread", lambda *_: False)
    assert compare("given out") == [False]


# ----------------------------------------------------------------------------------------------------------------------
# Other front ends: whose operator reads of a value that is given out only how long it is, or its dtype
# ----------------------------------------------------------------------------------------------------------------------


def by_slices(x, moe, look):
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    kept, parts = [], []
    for e, part in enumerate(x[order // K].split(torch.bincount(index.flatten(), minlength=E).tolist())):
        kept += look(part)
        y = moe.mlps[e](part)
        kept += look(y)
        parts.append(y)
    rows = torch.cat(parts) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // K, rows), kept


def by_counts(x, moe, look):
    weight, index = moe.route(x)
    order = index.flatten().argsort(stable=True)
    rows, kept, parts, start = x[order // K], [], [], 0
    for e, n in enumerate(torch.bincount(index.flatten(), minlength=E).tolist()):
        part = rows[start : start + n]
        kept += look(part)
        parts.append(moe.mlps[e](part))
        start += n
    return torch.zeros_like(x).index_add(0, order // K, torch.cat(parts) * weight.flatten()[order, None]), kept


def masked(x, moe, look):
    weight, index = moe.route(x)
    gates, total, kept = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight), 0, []
    for e, expert in enumerate(moe.experts):
        y = expert(x)
        kept += look(y)
        product = y * gates[:, e, None]
        kept += look(product)
        total = total + product
    return total, kept


def stacked(x, moe, look):
    weight, index = moe.route(x)
    gates, rows = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight), [expert(x) for expert in moe.experts]
    kept = look(rows[0]) + look(rows[-1])
    return (torch.stack(rows, 1) * gates[..., None]).sum(1), kept


def gathered(x, moe, look):
    weight, index = moe.route(x)
    h = torch.relu(torch.einsum("td,tkdn->tkn", x, moe.w1[index]))
    kept = look(h)
    y = torch.einsum("tkn,tknd->tkd", h, moe.w2[index])
    return (y * weight[..., None]).sum(1), kept + look(y)


def own_gates(x, moe, look):
    weight, index = moe.route(x)
    kept, out = look(weight), torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        mask = (index == e).any(-1)
        if mask.sum() > 0:
            out[mask] += expert(x[mask]) * (weight * (index == e)).sum(-1)[mask].unsqueeze(1)
    return out, kept


def in_phases(x, moe, look):
    """Behind branches that give nothing: they add in place."""
    weight, index = moe.route(x)
    kept, out, rows = [], torch.zeros_like(x), []
    for e in range(E):
        token, slot = torch.where(index == e)
        h = x[token] @ moe.w1[e]
        kept += look(h)
        rows.append((token, slot, h))
    for e, (token, slot, h) in enumerate(rows):
        if token.numel() > 0:
            out.index_add_(0, token, torch.tanh(h) @ moe.w2[e] * weight[token, slot, None])
    return out, kept


@pytest.mark.share(17)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("form", [by_slices, by_counts, masked, stacked, gathered, own_gates, in_phases])
def test_other_front_ends(form, look):
    def step(x, moe):
        return form(x, moe, LOOKS[look])

    def gradients(function):
        torch.manual_seed(3)
        moe.zero_grad()
        x = torch.randn(10, D, dtype=torch.float64, requires_grad=True)
        out, kept = function(x, moe)
        asked = [h for h in kept if h.requires_grad]
        found = torch.autograd.grad(out.square().sum(), asked, retain_graph=True, allow_unused=True) if asked else ()
        out.square().sum().backward()
        return [out, *kept, *found, x.grad, *(p.grad for p in moe.parameters())]

    torch.manual_seed(1)
    moe = Layer().double()
    for ours, plain in zip(gradients(capture(step)), gradients(step), strict=True):
        assert (ours is None) == (plain is None)
        if ours is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)
