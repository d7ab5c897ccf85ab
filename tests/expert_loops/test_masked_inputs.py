"""Experts on all tokens whose input a mask is laid over, ``expert(x * mask) * gate``: the operator runs the tokens that
chose the expert on what the mask leaves of them, which is all, if it is the mask of those that chose it."""

from __future__ import annotations

import itertools

import pytest
import torch
from beside_eager import compare, outcome
from module_layers import Layer
from spellings import E

from moebius import capture

LAID_OVER = {
    "cast": lambda x, mask: x * mask.to(x.dtype),
    "mask first": lambda x, mask: mask.double() * x,
    "bool": lambda x, mask: x * mask,
    "where": lambda x, mask: torch.where(mask, x, 0.0),
    "where not": lambda x, mask: torch.where(~mask, torch.zeros_like(x), x),
    "filled": lambda x, mask: x.masked_fill(~mask, 0.0),
    "once more": lambda x, mask: torch.where(mask, x * mask, 0.0),
    "something before": lambda x, mask: torch.tanh(x) * mask,
    "something behind": lambda x, mask: torch.tanh(x * mask),
}
GATES = {
    "summed": lambda weight, index, e, x: (weight * (index == e)).sum(-1, keepdim=True),
    "scattered": lambda weight, index, e, x: x.new_zeros(len(x), E).scatter(1, index, weight)[:, e, None],
}


def layer(laid_over, gate, mask_of=lambda weight, index, e: (index == e).any(-1, keepdim=True), experts="experts"):
    def function(x, moe):
        weight, index = moe.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(getattr(moe, experts)):
            out = out + expert(laid_over(x, mask_of(weight, index, e))) * gate(weight, index, e, x)
        return out

    return function


@pytest.mark.share(6)
@pytest.mark.parametrize(("over", "gate", "experts"), [*itertools.product(LAID_OVER, GATES, ("experts", "mlps"))])
def test_masked_inputs(over, gate, experts):
    assert compare(layer(LAID_OVER[over], GATES[gate], experts=experts))[0] == 1


@pytest.mark.parametrize("over", [name for name in LAID_OVER if name != "something before"])
def test_one_operator(over):
    assert compare(layer(LAID_OVER[over], GATES["summed"])) == (1, True)


OTHER_MASKS = {
    "of another expert": lambda weight, index, e: (index == (e + 1) % E).any(-1, keepdim=True),
    "of other tokens": lambda weight, index, e: (index.flip(0) == e).any(-1, keepdim=True),
    "those that did not choose": lambda weight, index, e: ~(index == e).any(-1, keepdim=True),
    "in all slots": lambda weight, index, e: (index == e).all(-1, keepdim=True),
    "by weight": lambda weight, index, e: (weight * (index == e)).sum(-1, keepdim=True) > 0.6,
    "the first slot": lambda weight, index, e: (index[:, :1] == e).any(-1, keepdim=True),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks(name):
    compare(layer(LAID_OVER["cast"], GATES["summed"], OTHER_MASKS[name]))
    compare(layer(LAID_OVER["filled"], GATES["summed"], OTHER_MASKS[name]))


@pytest.mark.parametrize("scale", [lambda mask: mask * 2.0, lambda mask: mask + 1.0])
def test_not_quite_a_mask(scale):
    compare(layer(lambda x, mask: (x.float() * scale(mask)).double(), GATES["summed"]))
    compare(layer(lambda x, mask: x * scale(mask), GATES["summed"]))


def test_a_mask_in_float32():
    """Where the rows are float32, too, plain Python adds their gradients in it: one rounding of it is no error."""
    assert compare(layer(lambda x, mask: x * mask.float(), GATES["summed"])) == (1, True)
    function = layer(lambda x, mask: (x.float() * mask.float()).double(), GATES["summed"])
    moe = Layer().double()
    ours, plain = (outcome(run, 0, moe, ()) for run in (capture(function), function))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_whose_mask_it_is_counts(monkeypatch):
    """Taken for the mask of those that chose, another one gives another result."""
    monkeypatch.setattr("moebius.lowering.experts.masked.holds_for_chosen", lambda *args: True)
    with pytest.raises(AssertionError):
        compare(layer(LAID_OVER["cast"], GATES["summed"], OTHER_MASKS["the first slot"]))
