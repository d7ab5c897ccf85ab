"""Second derivatives of the operator, beside those of the user's loop, in float64."""
from __future__ import annotations

import warnings

import pytest
import torch
from experts_oracle import Layer, activations, loop, make_layer, run
from torch import Tensor

from moebius.kernels import experts, separate_weights, twice

GATES = ["concat", "interleaved", "none"]


def second(result: Tensor, layer: Layer, first: list[Tensor]) -> list[Tensor]:
    """First gradients of a function that is not linear in the result, and those of the sum of their squares' roots."""
    found = torch.autograd.grad(result.sin().sum(), first, create_graph=True)
    again = sum((g * g + 1).sqrt().sum() for g in found) + result.square().sum()
    return [*found, *torch.autograd.grad(again, layer.leaves(), allow_unused=True, materialize_grads=True)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("gate", "activation"), [(g, a) for g in GATES for a in activations(g)])
def test_as_the_loops(gate: str, activation: str) -> None:
    layer = make_layer(9, 6, 4, 5, 2, gate=gate, activation=activation, bias=True, dtype=torch.float64)
    close(second(run(layer), layer, layer.leaves()), second(loop(layer), layer, layer.leaves()))


@pytest.mark.parametrize("save", ["default", "recompute"])
@pytest.mark.parametrize("weighting", ["output", "hidden", "input"])
def test_every_way_of_weighting(weighting: str, save: str) -> None:
    layer = make_layer(9, 6, 4, 5, 2, weighting=weighting, dtype=torch.float64)
    layer.index[0, 0] = layer.index[4, 1] = -1
    close(second(run(layer, save=save), layer, layer.leaves()), second(loop(layer), layer, layer.leaves()))


@pytest.mark.parametrize("asked", ["x", "gate_up", "down", "weight", "up_bias"])
def test_one_gradient_alone(asked: str) -> None:
    layer = make_layer(9, 6, 4, 5, 2, bias=True, dtype=torch.float64)
    first = [getattr(layer, asked)]
    close(second(run(layer), layer, first), second(loop(layer), layer, first))


def through_the_router(layer: Layer, call) -> list[Tensor]:
    """x reaches the result by the tokens and by the routing weights, and the weights are no leaves."""
    layer = Layer(layer.x, layer.gate_up, layer.down, layer.index, layer.x[:, :2].softmax(-1))
    scaled = Layer(layer.x, layer.gate_up * 2, layer.down.tanh(), layer.index, layer.weight)
    found = torch.autograd.grad(call(scaled).sin().sum(), layer.x, create_graph=True)
    return [*found, *torch.autograd.grad(found[0].square().sum(), [layer.x, layer.gate_up, layer.down])]


def test_inputs_that_are_computed_from_one_another() -> None:
    layer = make_layer(9, 6, 4, 5, 2, dtype=torch.float64)
    close(through_the_router(layer, run), through_the_router(layer, loop))


def test_third_order() -> None:
    found = []
    for call in (run, loop):
        layer = make_layer(5, 4, 3, 3, 2, dtype=torch.float64)
        result = call(layer).sin().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(result, layer.x, create_graph=True)
            result = gradient.square().sum()
        found.append([gradient])
    close(*found)


def separate(layer: Layer, hit: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The layer with a parameter for each expert, gate and up apart and turned; the loop's result; the leaves."""
    leaves, blocks = [], []
    for weight, turned in ((layer.gate_up[:, :4], True), (layer.gate_up[:, 4:], False), (layer.down, True)):
        parts = tuple((w.mT if turned else w).detach().clone().requires_grad_() for w in weight)
        leaves.append(parts)
        blocks.append(separate_weights.Block(turned, parts))
    whole = [torch.stack([p.mT if turned else p for p in parts]) for parts, turned in zip(
        leaves, (True, False, True), strict=True)]
    every = [layer.x, layer.weight, *(p for parts in leaves for p in parts)]
    result = separate_weights.experts_apart(layer.x, blocks[:2], blocks[2:], layer.index, layer.weight, "silu", hit=hit)
    expected = loop(Layer(layer.x, torch.cat(whole[:2], 1), whole[2], layer.index, layer.weight))
    return result, expected, every


def test_experts_with_parameters_of_their_own() -> None:
    layer = make_layer(9, 6, 4, 5, 2, dtype=torch.float64)
    result, expected, every = separate(layer, None)
    found = []
    for out in (result, expected):
        first = torch.autograd.grad(out.sin().sum(), every, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in first), every)
        found.append([*first, *again])
    close(*found)


def test_an_expert_that_is_not_hit_gets_no_gradient() -> None:
    layer = make_layer(9, 6, 4, 5, 2, dtype=torch.float64)
    layer.index[:] = torch.where(layer.index == 3, 2, layer.index)
    result, _, every = separate(layer, layer.index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reference cycle
        result.sum().backward(create_graph=True)
    assert [p.grad is None for p in every] == [False, False] + [e == 3 for _ in range(3) for e in range(5)]
    for p in every:
        p.grad = None


def test_data_that_was_set_between() -> None:
    """As in the loop: the expert's results are forward's, and so are the weights that they were computed with."""
    layer = make_layer(9, 6, 4, 5, 2, dtype=torch.float64)
    want = second(run(layer), layer, [layer.x])
    result = run(layer)
    kept, layer.gate_up.data = layer.gate_up.data, torch.ones_like(layer.gate_up)
    close(second(result, layer, [layer.x]), want)
    layer.gate_up.data = kept


def test_under_autocast_the_numbers_are_the_same() -> None:
    layer = make_layer(9, 6, 4, 5, 2)
    want = torch.autograd.grad(run(layer).sum(), layer.leaves(), create_graph=True)
    result = run(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(result.sum(), layer.leaves(), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_without_create_graph_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(9, 6, 4, 5, 2)
    monkeypatch.setattr(twice, "gradients", None)
    run(layer).sum().backward()
    with pytest.raises(TypeError):
        run(layer).sum().backward(create_graph=True)


def test_with_a_precision_there_is_none() -> None:
    layer = make_layer(16, 32, 32, 2, 1)
    out = experts(*(getattr(layer, name) for name in ("x", "gate_up", "down", "index", "weight")), precision="fp8")
    (gradient,) = torch.autograd.grad(out.square().sum(), layer.x, create_graph=True)
    with pytest.raises(RuntimeError, match="experts_backward"):
        gradient.sum().backward()
