"""Loops over the experts that were hit whose iterations need the expert's number in Python: one iteration for each
expert."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from moebius import capture, stats

E, D = 4, 3
BATCHES = ([0, 2, 2, 1], [3, 3, 3, 3], [0, 1, 2, 3], [1, 0, 1, 0])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(D, D).double() for _ in range(E))


def hits(index):
    return torch.nn.functional.one_hot(index, num_classes=E).sum(0).gt(0).nonzero()


def by_module(layer, x, index):
    out = torch.zeros_like(x)
    for e in hits(index):
        token = torch.where(index == e)[0]
        out.index_add_(0, token, layer.experts[e](x[token]))
    return out


def two_bodies(layer, x, index):
    out = torch.zeros_like(x)
    for row in hits(index):
        e = int(row.item())
        token = torch.where(index == e)[0]
        if e >= E - 1:
            rows = x[token]
        else:
            rows = layer.experts[e](x[token])
        out.index_add_(0, token, rows)
    return out


def named(layer, x, index):
    out = torch.zeros_like(x)
    modules = {f"expert_{i:02}": module for i, module in enumerate(layer.experts)}
    for e in hits(index):
        token = torch.where(index == e)[0]
        out.index_add_(0, token, modules[f"expert_{e[0]:02}"](x[token]))
    return out


def last_column(layer, x, index):
    """Of a list of hits in another shape, and numbers computed of e."""
    out = torch.zeros_like(x)
    for e in hits(index)[:, 0].flatten():
        token = torch.where(index == e)[0]
        out.index_add_(0, token, layer.experts[(int(e) + 1) % E](x[token]) * (2 * e + 1))
    return out


def list_that_a_iteration_changes(layer, x, index):
    """The second iteration finds another number than the list had."""
    out = torch.zeros_like(x)
    listed = hits(index)
    for e in listed:
        out += layer.experts[e[0]](x)
        listed.add_(1).remainder_(E)
    return out


def list_that_was_changed(layer, x, index):
    out = torch.zeros_like(x)
    listed = hits(index)
    listed.neg_().add_(E - 1)
    for e in listed:
        out = out * 0.5 + layer.experts[e[0]](x)
    return out


def row_that_is_changed(layer, x, index):
    out = torch.zeros_like(x)
    for e in hits(index).clone():
        e.add_(1).remainder_(E)
        out = out * 0.5 + layer.experts[e](x)
    return out


def left_early(layer, x, index):
    out = torch.zeros_like(x)
    for e in hits(index):
        if layer.experts[e].bias is None or e[0] == 2:
            break
        out = out + layer.experts[e](x)
    return out


def what_the_last_iteration_left(layer, x, index):
    last = x
    for e in hits(index):
        last = layer.experts[e](x)
    return last * 2


WHOLE = (by_module, two_bodies, named, last_column, what_the_last_iteration_left)
BROKEN = (list_that_a_iteration_changes, list_that_was_changed, row_that_is_changed, left_early)


@pytest.mark.share(7)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("function", WHOLE + BROKEN)
def test_same_as_plain(function, backend):
    captured = capture(function, backend=backend)
    mine, plain = Layer(), Layer()
    for batch in BATCHES:
        index = torch.tensor(batch)
        x = torch.randn(len(batch), D, dtype=torch.float64)
        inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, wanted = captured(mine, inputs[0], index), function(plain, inputs[1], index)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        for layer, result in ((mine, found), (plain, wanted)):
            layer.zero_grad()
            result.square().sum().backward()
        pairs = zip((inputs[0], *mine.parameters()), (inputs[1], *plain.parameters()), strict=True)
        for p, q in pairs:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    assert (stats(captured).graphs == 1 and not stats(captured).breaks) == (function in WHOLE)


def test_switched_off(monkeypatch):
    """Without it the iteration breaks the graph."""
    from moebius.regions import loops

    monkeypatch.setattr(loops, "active_iterations", lambda *given: None)
    captured, layer = capture(by_module), Layer()
    for batch in BATCHES:
        captured(layer, torch.randn(4, D, dtype=torch.float64), torch.tensor(batch))
    assert stats(captured).graphs > 1


def test_written_is_looked_at(monkeypatch):
    """Without the look at what is written, the wrong experts would run."""
    from moebius.regions import active_experts

    monkeypatch.setattr(active_experts, "unwritten", lambda node: True)
    layer, x, index = Layer(), torch.randn(4, D, dtype=torch.float64), torch.tensor([0, 2, 2, 1])
    captured = capture(list_that_was_changed)
    assert not torch.allclose(captured(layer, x, index), list_that_was_changed(layer, x, index))


def returns_from_the_iteration(layer, x, index):
    out = torch.zeros_like(x)
    for _ in hits(index):
        return out * 3
    return out


def raises_in_the_iteration(layer, x, index):
    def iterations():
        for _ in hits(index):
            raise KeyError("no iteration ends")
        return x * 5

    try:
        return iterations()
    except KeyError:
        return x * 2


@pytest.mark.parametrize("function", [returns_from_the_iteration, raises_in_the_iteration], ids=lambda f: f.__name__)
def test_a_loop_that_is_left_is_a_graph_break(function):
    x, captured = torch.randn(3, 4), capture(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would say that capture failed
        for index in (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [1, 3]])):
            assert torch.equal(captured(None, x, index), function(None, x, index))
    assert stats(captured).breaks
