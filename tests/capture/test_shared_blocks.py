"""Modules that are called twice, or that share a part, before another one of their class is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture
from moebius.regions.module_reuse import ModuleReuse


class Outer(nn.Module):
    """A module around another one, which may be shared."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh() * self.scale


def twice_then_others() -> nn.Module:
    a, b, c = (nn.Linear(3, 3) for _ in range(3))
    return nn.Sequential(a, a, b, a, c, b)


def shared_inside() -> nn.Module:
    inner, other = nn.Linear(3, 3), nn.Linear(3, 3)
    return nn.Sequential(Outer(inner), Outer(inner), Outer(other), Outer(inner), Outer(other))


def shared_last() -> nn.Module:
    inner, other = nn.Linear(3, 3), nn.Linear(3, 3)
    return nn.Sequential(Outer(other), Outer(inner), Outer(inner), Outer(other), Outer(nn.Linear(3, 3)))


def thawed(freeze: Any) -> list[Any]:
    """The gradients of a step that uses a module before and after it thaws a part of it."""

    def step(model: nn.Module, x: torch.Tensor) -> list[Any]:
        model.zero_grad()
        freeze(model, False)
        model(x).square().mean().backward()
        before = [p.grad is None for p in model.parameters()]
        freeze(model, True)
        model(x).square().mean().backward()
        return [before, [None if p.grad is None else p.grad * 1 for p in model.parameters()]]

    found = []
    for run in (capture(step, backend="eager"), step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
        found.append(repr([run(model, torch.rand(2, 3)) for _ in range(3)]))
    return found


def by_method(model: nn.Module, on: bool) -> None:
    model[2].weight.requires_grad_(on)


def by_attribute(model: nn.Module, on: bool) -> None:
    model[0].bias.requires_grad = on


def whole_layer(model: nn.Module, on: bool) -> None:
    model[3].requires_grad_(on)


@pytest.mark.parametrize("freeze", [by_method, by_attribute, whole_layer])
def test_a_module_that_is_thawed_in_the_step(freeze: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plain = thawed(freeze)
    assert ours == plain
    monkeypatch.setattr(ModuleReuse, "forget", lambda self: None)
    ours, plain = thawed(freeze)
    assert ours != plain


def test_a_layer_beside_a_frozen_one() -> None:
    """It is like the one before but for what the step has switched off there."""

    def step(model: nn.Module, x: torch.Tensor) -> list[Any]:
        model.zero_grad()
        model[0].weight.requires_grad_(False)
        sum(layer(x) for layer in model).square().mean().backward()
        return [None if p.grad is None else p.grad * 1 for p in model.parameters()]

    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), torch.rand(2, 3)
    ours = capture(step, backend="eager")(model, x)
    model.requires_grad_(True)
    assert repr(ours) == repr(step(model, x)) and [g is None for g in ours] == [True] + [False] * 5


def shared_parameter() -> nn.Module:
    layers = [nn.Linear(3, 3) for _ in range(4)]
    layers[1].weight = layers[0].weight
    layers[3].bias = layers[0].bias
    return nn.Sequential(*layers, *layers)


def shared_table() -> nn.Module:
    """Two modules with one dict of parameters."""
    layers = [nn.Linear(3, 3) for _ in range(3)]
    layers[1].__dict__["_parameters"] = layers[0]._parameters
    return nn.Sequential(layers[0], layers[1], layers[2])


MODELS = [twice_then_others, shared_inside, shared_last, shared_parameter, shared_table]


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
def test_each_module_runs_with_its_own_weights(make) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3)
    captured = capture(step, backend="eager")
    for _ in range(2):
        assert torch.equal(captured(model, x), step(model, x))


def test_with_the_check_switched_off_the_answer_is_wrong(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ModuleReuse, "hold_together", lambda self, plan, pairs: None)
    torch.manual_seed(0)
    model, x = shared_last(), torch.randn(2, 3)
    assert not torch.equal(capture(step, backend="eager")(model, x), step(model, x))
