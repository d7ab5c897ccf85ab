"""Layers as functions (layers_as_functions.py), trained a few steps beside eager, and what becomes of each."""

from __future__ import annotations

import layers_as_functions_too  # noqa: F401 (adds to HELD)
import pytest
import torch
from layers_as_functions import HELD, Held
from table import SEEDS, tensors
from test_structures import said_of

import moebius
from moebius import capture

NONE = 0  # rows of a batch without tokens


def trained(call, layer, seed, rows):
    """One step of training: what came out, and all that it changed; or the type of what it raised."""
    x = tensors(seed)[0].detach()[:rows].requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    try:
        out = call(x, layer)
        out.square().sum().backward()
    except (RuntimeError, ValueError, ZeroDivisionError) as error:
        return type(error)
    grads = [parameter.grad for parameter in layer.parameters()]
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    return [out, x.grad, *grads, *layer.parameters(), *layer.buffers()]


@pytest.mark.share(16)
@pytest.mark.parametrize("name", HELD)
def test_layer(name):
    moebius.reset()
    function, outcome = HELD[name]
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(Held().double())
    captured, becomes = capture(function), set()
    for seed, rows in [*((seed, 10) for seed in SEEDS), (0, NONE)]:
        ours, plain = trained(captured, layers[0], seed, rows), trained(function, layers[1], seed, rows)
        if isinstance(ours, type) or isinstance(plain, type):
            assert ours is plain and rows == NONE
            continue
        for a, b in zip(ours, plain, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        if rows != NONE:
            becomes.add(said_of(captured))
    assert becomes == {outcome}
