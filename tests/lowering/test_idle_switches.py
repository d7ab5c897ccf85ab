"""``with torch.no_grad():`` around what has no gradients anyway is not in the lowered graph (lowering/dead_code.py)."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.lowering import dead_code
from moebius.lowering.torch_private import set_grad_enabled


def counts(x, w, seen):
    y = x @ w
    with torch.no_grad():
        seen[0] += (y > 0).sum()
    return y.sin() * w.sum()


def mean_of_what_is_seen(x, w, seen):
    y = x @ w
    with torch.no_grad():
        seen.mul_(0.9).add_(seen.mean() * 0.1)
    return y.sin() * w.sum()


def of_a_weight(x, w, seen):
    with torch.no_grad():
        y = w * 2
    return x @ (w * y)


def into_what_has_a_history(x, w, seen):
    y = x @ w
    with torch.no_grad():
        y[0] = 0.0
    return y * y


def of_what_is_cut_off_later(x, w, seen):
    out, y = x @ w, w * 2
    with torch.no_grad():
        z = y * 3
    y.detach_()
    return out * z.sum()


def of_a_weight_that_is_frozen_later(x, w, seen):
    out, y = x @ w, w.detach().requires_grad_()
    with torch.no_grad():
        z = y * 3
    y.requires_grad_(False)
    return out * z.sum()


DROPPED = (counts, mean_of_what_is_seen)
KEPT = (of_a_weight, into_what_has_a_history, of_what_is_cut_off_later, of_a_weight_that_is_frozen_later)


def step(function, x, w, seen):
    out = function(x, w, seen)
    out.sum().backward()
    return out.detach()


def outcome(run, function):
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    seen = torch.rand(3, dtype=torch.float64)
    out = run(function, x, w, seen)
    return out, w.grad, seen


def switches(monkeypatch, function):
    """How many grad-mode switches are left in the captured step, whose results are plain Python's."""
    found = []

    def drop(graph):
        dropped(graph)
        found.append(sum(node.target is set_grad_enabled for node in graph.nodes))

    dropped = dead_code.drop_idle_switches
    monkeypatch.setattr(dead_code, "drop_idle_switches", drop)
    captured = capture(step)
    for ours, plain in zip(outcome(captured, function), outcome(step, function), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert not stats(captured).breaks
    return found[-1]


@pytest.mark.parametrize("function", DROPPED, ids=lambda f: f.__name__)
def test_dropped(function, monkeypatch):
    assert switches(monkeypatch, function) == 0


@pytest.mark.parametrize("function", KEPT, ids=lambda f: f.__name__)
def test_kept(function, monkeypatch):
    assert switches(monkeypatch, function) == 2


@pytest.mark.parametrize("function", (of_what_is_cut_off_later,), ids=lambda f: f.__name__)
def test_what_is_cut_off_later_is_asked(function, monkeypatch):
    monkeypatch.setattr(dead_code, "cut_off", lambda graph: set())
    ours, plain = outcome(capture(step), function), outcome(step, function)
    assert not torch.allclose(ours[1], plain[1])
