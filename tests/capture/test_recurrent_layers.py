"""Recurrent layers and Fourier transforms whose sizes vary: one graph for all lengths and batches, with plain bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.tensors.recurrent import like_recurrent
from moebius.torch_facts.torch_fakes import FakeWorld

KINDS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}
LENGTHS, BATCHES = [(5, 4), (7, 4), (6, 4), (9, 4), (4, 4)], [(5, 4), (5, 3), (5, 6), (5, 7), (5, 2)]
FORMS = list(itertools.product((False, True), (1, 2), (True, False), (False, True), (0.0, 0.2)))


def trained(kind: str, sizes: list, run=lambda step: step, **options) -> list[torch.Tensor]:
    """Losses of a few steps, and the weights then."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(6, 8, **options)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        y, last = layer(x)
        loss = y.pow(2).mean() + sum(h.sum() for h in last) * 0.1
        loss.backward()
        optimizer.step()
        return loss.detach()

    again = run(step)
    return [*(again(torch.randn(*size, 6)) for size in sizes), *layer.parameters()]


@pytest.mark.share(8)
@pytest.mark.parametrize(("kind", "sizes"), list(itertools.product((*KINDS, "relu"), (LENGTHS, BATCHES))))
@pytest.mark.parametrize("form", [{}, {"bidirectional": True, "num_layers": 2}, {"batch_first": True, "bias": False}])
def test_two_captures_serve_all_lengths_and_batches(kind, sizes, form):
    made = []

    def run(step):
        made.append(capture(step, backend="eager"))
        return made[0]

    options = form | ({"nonlinearity": "relu"} if kind == "relu" else {})
    kind = "RNN" if kind == "relu" else kind
    assert all(map(torch.equal, trained(kind, sizes, run, **options), trained(kind, sizes, **options)))
    assert (stats(made[0]).misses, stats(made[0]).breaks) == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_fake_stands_for_is_laid_out_as_what_torch_gives(kind):
    for two_ways, layers, bias, batch_first, dropout in FORMS:
        torch.manual_seed(0)
        made = getattr(nn, kind)(6, 8, layers, bias=bias, batch_first=batch_first, bidirectional=two_ways)
        x = torch.randn((3, 5, 6) if batch_first else (5, 3, 6), requires_grad=True)
        state = torch.randn(layers * (1 + two_ways), 3, 8, requires_grad=True)

        def run(function, x, state, *weights, options=(bias, layers, dropout, True, two_ways, batch_first)):
            states = (state, state * 1) if kind == "LSTM" else state
            given = function(x, states, list(weights), *options)
            return [*given, *torch.autograd.grad(sum(t.sum() for t in given), [x, state, *weights])]

        operands = [x, state, *made.parameters()]
        world = FakeWorld()
        fakes = [world.fakify(tensor, "x") for tensor in operands]
        with world.mode:
            found = run(like_recurrent, *fakes)
        for ours, torchs in zip(found, run(KINDS[kind], *operands), strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (torchs.shape, torchs.stride(), torchs.dtype)


def through(name: str):
    function = getattr(torch.fft, name)

    def step(x):
        x = x.transpose(0, 1).contiguous().transpose(0, 1) * 2
        complex_ones = name.startswith(("ir", "hf")) and x.to(torch.complex64)
        return torch.view_as_real(function(x if complex_ones is False else complex_ones) + 0j) * 2

    return step


TRANSFORMS = [n for n, f in vars(torch.fft).items() if type(f) is type(torch.abs) and "freq" not in n and n[0] != "_"]


@pytest.mark.share(9)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_two_captures_serve_all_sizes_of_a_transform(name):
    step = through(name)
    captured = capture(step, backend="eager")
    for rows in (9, 3, 5, 7):
        x = torch.randn(rows, 8, 4)
        assert torch.equal(captured(x), step(x))
    known = name == "ihfftn"  # torch's Python form of it takes a size for a constant, too
    assert known or (stats(captured).misses, stats(captured).breaks) == (2, 0)
