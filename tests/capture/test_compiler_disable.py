"""Functions under ``torch.compiler.disable``: to plain Python they are what they wrap, and so they are to us."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from moebius import capture, stats


@torch.compiler.disable
def scaled(x, by=2.0):
    return x * by


@torch.compiler.disable
def raised(x):
    return x + 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)

    @torch.compiler.disable
    def forward(self, x):
        return scaled(self.linear(x)).sum()


def step(net, x):
    net(x).backward()
    return net.linear.weight.grad


X = torch.arange(6.0).reshape(2, 3)


def same(mine, plain, captured):
    assert torch.equal(captured(mine, X), step(plain, X))


def test_a_disabled_function_is_in_the_graph():
    mine, plain, captured = Model(), Model(), capture(step, backend="eager", fullgraph=True)
    for _ in range(3):
        same(mine, plain, captured)
    assert (stats(captured).graphs, stats(captured).misses) == (2, 2)  # no gradient yet, and one to add to


def test_another_disabled_function_in_its_place(monkeypatch):
    """All wrappers have the same code: only their cells tell them apart."""
    mine, plain, captured = Model(), Model(), capture(step, backend="eager", fullgraph=True)
    for _ in range(2):
        same(mine, plain, captured)
    monkeypatch.setitem(globals(), "scaled", raised)
    same(mine, plain, captured)
    monkeypatch.setattr(Model, "forward", torch.compiler.disable(lambda self, x: self.linear(x).square().sum()))
    same(mine, plain, captured)
    Model.forward.__closure__[0].cell_contents = lambda self, x: self.linear(x).exp().sum()
    same(mine, plain, captured)


@pytest.mark.parametrize("what", ["code", "defaults"])
def test_what_is_wrapped_is_changed(what, monkeypatch):
    mine, plain, captured = Model(), Model(), capture(step, backend="eager", fullgraph=True)
    for _ in range(2):
        same(mine, plain, captured)
    (cell,) = (c for c in scaled.__closure__ if isinstance(c.cell_contents, types.FunctionType))
    wrapped = cell.cell_contents
    if what == "code":
        monkeypatch.setattr(wrapped, "__code__", (lambda x, by=2.0: x / by).__code__)
    else:
        monkeypatch.setattr(wrapped, "__defaults__", (5.0,))
    before = stats(captured).misses
    same(mine, plain, captured)
    assert stats(captured).misses == before + 1


def test_a_break_within():
    said = []

    @torch.compiler.disable
    def told(x):
        said.append(float(x.sum()))
        return x * 2

    captured = capture(lambda x: told(x + 1) + 1, backend="eager")
    for _ in range(2):
        assert torch.equal(captured(X), (X + 1) * 2 + 1)
    assert said == [21.0, 21.0]
