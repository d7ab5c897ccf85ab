"""Experts with a parameter each: what backward lets go of, and when."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations

from moebius.kernels import by_expert, separate_weights
from moebius.kernels.separate_weights import Block, experts_apart

T, D, N, E = 32, 16, 24, 8


def layer(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    up = [torch.randn(N, D, dtype=dtype, requires_grad=True) for _ in range(E)]
    down = [torch.randn(D, N, dtype=dtype, requires_grad=True) for _ in range(E)]
    index = torch.randint(0, E, (T, 1))
    weight = torch.rand(T, 1, dtype=dtype, requires_grad=True)
    return x, up, down, index, weight


def run(x, up, down, index, weight):
    blocks = [Block(False, tuple(up))], [Block(False, tuple(down))]
    return experts_apart(x, *blocks, index, weight, "silu", gate="none")


def written_out(x, up, down, index, weight):
    out = torch.zeros_like(x)
    for e in range(E):
        token = torch.where(index[:, 0] == e)[0]
        rows = torch.nn.functional.silu(x[token] @ up[e].T) @ down[e].T
        out = out.index_add(0, token, rows * weight[token])
    return out


def test_backward_twice():
    """What is saved stays for a second backward, and only then."""
    x, up, down, index, weight = layer()
    leaves = [x, weight, *up, *down]
    expected = torch.autograd.grad(written_out(x, up, down, index, weight).square().sum(), leaves)
    loss = run(x, up, down, index, weight).square().sum()
    for again in (True, True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=again)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("frozen", ["up", "down", "x", "weight"])
def test_some_need_no_gradient(frozen):
    x, up, down, index, weight = layer()
    given = {"x": x, "up": up, "down": down, "weight": weight}
    for tensor in given[frozen] if isinstance(given[frozen], list) else [given[frozen]]:
        tensor.requires_grad_(False)
    leaves = [t for t in (x, weight, *up, *down) if t.requires_grad]
    expected = torch.autograd.grad(written_out(x, up, down, index, weight).square().sum(), leaves)
    for a, b in zip(torch.autograd.grad(run(x, up, down, index, weight).square().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(a, b)


def peak() -> int:
    given = layer()
    with Allocations() as made:
        run(*given).sum().backward()
    return made.peak


def test_peak_of_backward(monkeypatch):
    """Beside the gradients: dH, the sum for x, one buffer of rows and what comes in, but not what forward saved."""
    let_go = peak()
    assert let_go <= 2 * E * N * D + T * (N + 3 * D) + 16 * T
    monkeypatch.setattr(separate_weights, "release", lambda ctx: None)
    assert peak() >= let_go + T * N


@pytest.mark.parametrize("which", ["x", "weight", "grad"])
def test_numbers_that_a_view_negates(which, monkeypatch):
    """Their memory holds others; C reads memory."""
    x, up, down, index, weight = layer(torch.float32)
    monkeypatch.setattr(by_expert, "PANEL_ROWS", 0)
    monkeypatch.setattr(by_expert, "UNEVEN", 100.0)
    given = {"x": x.detach(), "weight": weight.detach(), "grad": torch.randn(T, D)}

    def results():
        leaves = [given["x"].requires_grad_(), given["weight"].requires_grad_(), *up, *down]
        out = run(leaves[0], up, down, index, leaves[1])
        return [out, *torch.autograd.grad(out, leaves, given["grad"])]

    expected = results()
    given[which] = torch._neg_view(-given[which].detach())
    assert given[which].is_neg()
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))
