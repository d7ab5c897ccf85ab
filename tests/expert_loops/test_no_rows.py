"""Layers that get no token at all: what then has no gradient in plain Python has none, and what has zeros has zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_spellings import MODULES
from spellings import SPELLINGS
from table import PUBLIC, layer, tensors  # noqa: F401 (PUBLIC adds the published ones)

import moebius

EVERY = {**SPELLINGS, **MODULES}
PARTS = 2  # of the spellings with the step that is captured whole; forward alone has the others


def some_rows(x: torch.Tensor, wanted: float) -> torch.Tensor:
    """As many as there are elements above a number: how many, only the running step knows."""
    return x[x[:, 0] > wanted]


def outcome(run: Callable[..., Any], inputs: list[Any], wanted: float) -> Any:
    """Result and gradients; or the type of what is raised."""
    leaves = [t for t in inputs if isinstance(t, torch.Tensor)]
    for module in inputs[len(leaves) :]:
        leaves += module.parameters()
    for leaf in leaves:
        leaf.grad = None
    try:
        result = run(inputs, wanted)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        return type(error)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def differs(mine: Any, plain: Any) -> str:
    if isinstance(mine, type) or isinstance(plain, type):
        return "" if mine is plain else f"{mine} is not {plain}"
    for number, (a, b) in enumerate(zip(mine, plain, strict=True)):
        if (a is None) != (b is None):
            return f"{number}: {'none' if a is None else 'zeros'}, not as in plain Python"
        if a is not None and not torch.allclose(a, b, rtol=1e-10, atol=1e-11):
            return f"{number}: off by {(a - b).abs().max()}"
    return ""


@pytest.mark.share(6)
@pytest.mark.filterwarnings("error:moebius could not")
@pytest.mark.parametrize("name", EVERY)
def test_no_rows(name: str) -> None:
    spelling = EVERY[name].function
    whole = list(EVERY).index(name) % PARTS == 0

    def loss(inputs: list[Any], wanted: float) -> torch.Tensor:
        x, *others = inputs
        return spelling(some_rows(x, wanted), *others).square().sum() + x.sum()

    def step(inputs: list[Any], wanted: float) -> torch.Tensor:
        result = loss(inputs, wanted)
        result.backward()
        return result

    captured = moebius.capture(step if whole else loss)

    def run(inputs: list[Any], wanted: float) -> torch.Tensor:
        result = captured(inputs, wanted)
        if not whole:
            result.backward()
        return result

    weights = (layer(), layer()) if name in MODULES else (None, None)
    for wanted in (-100.0, 100.0, -0.5, 100.0):
        made = [[tensors(0)[0], w] if w is not None else tensors(0) for w in weights]
        found = differs(outcome(run, made[0], wanted), outcome(step, made[1], wanted))
        assert not found, f"above {wanted}: {found}"
