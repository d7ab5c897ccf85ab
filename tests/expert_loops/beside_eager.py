"""A layer of experts, captured and as it is, on batches of which one leaves experts without tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from module_layers import Layer
from table import SEEDS, tensors

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering import ExpertRegion
from moebius.lowering.experts import rewrite

Errors = tuple[type[Exception], ...]


def outcome(function: Callable[..., torch.Tensor], seed: int, layer: Layer, errors: Errors) -> Any:
    """The result and every gradient, None where there is none; or the type of what it raises, one of the errors."""
    layer.zero_grad()
    x = tensors(seed)[0]
    torch.manual_seed(seed)
    try:
        out = function(x, layer)
        out.square().sum().backward()
    except errors as error:
        return type(error)
    return [out, x.grad, *(p.grad for p in layer.parameters())]


def compare(
    function: Callable[..., torch.Tensor], seeds: Iterable[int] = SEEDS, text: str = "", errors: Errors = ()
) -> tuple[int, bool]:
    """Equal to eager in float64, missing gradients included. Returns the number of graphs, and whether there are
    expert regions and all of them were lowered.

    text: what a failure shows. errors: what both may raise.
    """
    graphs, regions = regions_of(function, seeds, text, errors)
    return graphs, bool(regions) and all(region.lowered for region in regions)


def by_gates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on experts that every token has stay as they are: only the masked ones are operators."""
    monkeypatch.setattr(rewrite, "replace_meeting", lambda work, failed: None)


def regions_of(
    function: Callable[..., torch.Tensor],
    seeds: Iterable[int] = SEEDS,
    text: str = "",
    errors: Errors = (),
    layer: Callable[[], Layer] = Layer,
) -> tuple[int, list[ExpertRegion]]:
    """The same; returns the number of graphs and the regions. layer: makes what the function gets beside x."""
    moebius.reset()
    torch.manual_seed(1)
    layers = [layer().double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    captured = capture(function)
    for seed in seeds:
        runs = zip((captured, function), layers, strict=True)
        found, expected = (outcome(run, seed, layer, errors) for run, layer in runs)
        if isinstance(found, type) or isinstance(expected, type):
            assert found is expected, (seed, found, text)
            continue
        for ours, plain in zip(found, expected, strict=True):
            assert (ours is None) == (plain is None), (seed, text)
            if ours is not None:
                torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10, msg=lambda m: f"{m}\n{text}")
    regions = report_of(captured_of(captured)).expert_regions
    for region in regions:
        assert region.lowered or ".py:" in region.refusal or "<layer" in region.refusal, region.refusal
    return stats(captured).graphs, regions
