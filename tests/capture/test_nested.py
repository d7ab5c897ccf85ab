"""Captured callables among others: inside of a captured step, copied, moved, and asked for what they are."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from moebius import GraphBreakError, NotCapturableError, capture, explain, stats


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def test_a_captured_function_inside_a_captured_step_is_part_of_its_graph():
    scale = {"by": 2}
    helper = capture(lambda x: x * scale["by"])
    model = capture(linear())

    @capture(fullgraph=True)
    def step(x):
        return helper(model(x)).sum()

    x = torch.randn(2, 3)
    for _ in range(3):
        assert torch.equal(step(x), (linear()(x) * 2).sum())
    assert stats(step).graphs == 1 and stats(helper).misses == 0
    scale["by"] = 3
    assert torch.equal(step(x), (linear()(x) * 3).sum())


def test_another_captured_function_in_its_place_is_noticed():
    helpers = [capture(lambda x: x * 2), capture(lambda x: x * 5)]

    @capture
    def step(x):
        return helpers[0](x) + 1

    assert step(torch.ones(1)).item() == 3
    helpers.reverse()
    assert step(torch.ones(1)).item() == 6


def test_other_options_are_a_break():
    helper = capture(lambda x: x * 2, backend="eager")
    report = explain(lambda x: helper(x) + 1)(torch.ones(1))
    assert report.result.item() == 3
    assert [b.reason for b in report.breaks] == ["captured function"]
    with pytest.raises(GraphBreakError, match="other options"):
        capture(lambda x: helper(x) + 1, fullgraph=True)(torch.ones(1))


def test_recursion_through_the_captured_name():
    @capture
    def power(x, n):
        return x if n == 0 else power(x * 2, n - 1)

    for _ in range(2):
        assert power(torch.ones(1), 4).item() == 16
    assert stats(power).graphs == 1


def test_a_captured_module_is_what_its_module_is():
    model = capture(linear())
    assert isinstance(model, nn.Linear) and list(model.state_dict()) == ["weight", "bias"]
    assert inspect.signature(model.__class__.forward) == inspect.signature(nn.Linear.forward)
    with pytest.raises(NotCapturableError, match="captured already"):
        capture(model)


def test_what_returns_the_module_returns_the_captured_one():
    model = capture(linear())
    for moved in (model.to(torch.float64), model.eval(), model.train(), model.requires_grad_(False)):
        assert moved is model
    assert model.weight.dtype is torch.float64 and not model.weight.requires_grad
    model.double()(torch.ones(1, 3, dtype=torch.float64))
    assert stats(model).graphs == 1


def test_a_copy_is_captured_too_and_shares_nothing():
    model = capture(linear(), backend="eager")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.weight.add_(1)
        x = torch.ones(1, 3)
        assert torch.equal(other(x), nn.functional.linear(x, other.weight, other.bias))
        assert stats(other).graphs == 1 and not torch.equal(other.weight, model.weight)
