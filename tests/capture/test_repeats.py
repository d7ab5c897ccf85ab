"""The code of equal layers is made once, and the graph does what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture
from moebius.api import captured_of


class Layer(nn.Module):
    """About twenty operators; a dropout, and a row that can be missing."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.scale = scale

    def forward(self, x, rows, shift):
        h = self.norm(x)
        h = torch.tanh(self.a(h)) * torch.sigmoid(self.a(h + shift)) + 0.5
        h = torch.nn.functional.dropout(h.clamp(-1, 1).square().neg().exp(), 0.1, True)
        h = self.b(h.mul(self.scale).add(0.25))
        return (x + h * h.softmax(-1))[rows.clone()] + x.mean() * shift.exp()


class Model(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, scales))

    def forward(self, x, rows, log):
        shift, rows = x.mean(0), rows.unbind(0)
        for n, layer in enumerate(self.layers):
            log.append(n)
            x = layer(x, rows[n], shift)
        return x * shift


ROWS = torch.tensor([[2, 1, 0]]).repeat(8, 1)


def outcome(function, model, rows):
    torch.manual_seed(3)
    model.zero_grad()
    log: list = []
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    try:
        result = function(model, x, rows, log)
    except IndexError as error:
        return str(error), getattr(error, "__notes__", None), log
    result.sum().backward()
    return result, x.grad, [p.grad for p in model.parameters()], log, torch.rand(1)


def alike(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    return first == second


def run(model, x, rows, log):
    return model(x, rows, log)


def repeats_of(captured):
    return [s.lowered.repeats for s in captured_of(captured).segments if s.lowered is not None]


@pytest.mark.parametrize("backend", ["moebius", "eager"])
def test_equal_layers_have_one_function(backend):
    model = Model([1.0] * 8)
    captured = capture(run, backend=backend)
    for _ in range(2):
        assert alike(outcome(captured, model, ROWS), outcome(run, model, ROWS))
    (repeats,) = repeats_of(captured)
    assert len(repeats.bodies) == 1 and len(repeats.calls) >= 7
    lines = sum(m.code.count("\n") for m in repeats.modules)
    assert lines < 0.4 * captured_of(captured).segments[0].captured.gm.code.count("\n")


@pytest.mark.parametrize("bad", [0, 4, 7])
def test_an_operator_that_fails_in_a_layer(bad):
    model, rows = Model([1.0] * 8), ROWS.clone()
    rows[bad, 1] = 9
    captured = capture(run)
    outcome(captured, model, ROWS)
    for given in (rows, ROWS, rows):
        assert alike(outcome(captured, model, given), outcome(run, model, given))
    assert repeats_of(captured)[0] is not None


@pytest.mark.parametrize(
    "scales", [[1.0, 2.0] * 4, [1.0] * 3 + [-0.0] * 5, [0.0, -0.0] * 4, [float(n) for n in range(8)]]
)
def test_layers_with_other_constants(scales):
    """One number of a layer is another: what is not equal has lines of its own, or two layers are the repeated one."""
    model = Model(scales)
    captured = capture(run)
    for _ in range(2):
        assert alike(outcome(captured, model, ROWS), outcome(run, model, ROWS))


def test_few_layers_are_written_as_they_are():
    model = Model([1.0] * 3)
    captured = capture(run)
    assert alike(outcome(captured, model, ROWS), outcome(run, model, ROWS))
    assert repeats_of(captured) == [None]
