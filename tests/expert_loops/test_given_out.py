"""What the turns compute and a step gives out, or has hooks on, with backward outside of the step: it goes through that
as it does in plain Python, so such a loop stays one."""

from __future__ import annotations

import pytest
import torch
from module_layers import Layer
from spellings import D, E
from torch.nn.functional import linear, silu

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering import pipeline


def layer_with(look):
    """look: what is done with each turn's hidden rows; what it gives is given out."""

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
    with pytest.raises((AssertionError, RuntimeError)):
        compare(look)
