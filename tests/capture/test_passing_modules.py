"""A criterion that each call makes anew and that goes over a graph break: known by what is in it, not by identity."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moebius import capture, disable, stats
from moebius.guards.recorder import GuardRecorder

CHECK = GuardRecorder.check


@disable
def natively(x):
    return x * 1


class Weighted(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x.pow(2).mean() * self.weight


def epoch(model, x, weight, hook=None, keyed=True):
    criterion = Weighted(weight)
    if hook is not None:
        criterion.register_forward_hook(hook)
    total = 0.0
    for _ in range(3):
        y = natively(model(x))
        loss = criterion(y) + nn.L1Loss()(y, x)
        loss.backward()
        y = natively(loss.detach())
        total += (y * criterion.weight).item()
    same = criterion is criterion, isinstance(criterion, Weighted), criterion.training
    return total, same, {criterion: 1}[criterion] if keyed else 1


def doubled(module, args, out):
    return out * 2


def runs(step):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    found = [step(model, x, weight, hook) for weight, hook in (
        (1.0, None), (1.0, None), (1.0, None), (0.5, None), (0.25, None), (1.0, doubled), (3, None), (1.0, None)
    )]  # fmt: skip
    return [*found, model.weight.grad]


def test_each_call_with_another_criterion():
    captured = capture(epoch, backend="eager")
    assert str(runs(captured)) == str(runs(epoch))


def test_no_capture_once_it_is_known():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    captured = capture(epoch, backend="eager")
    misses = []
    for _ in range(5):
        captured(model, x, 1.0, keyed=False)
        misses.append(stats(captured).misses)
    assert misses[2] == misses[4]


def test_one_with_parameters_is_known_by_its_identity():
    def step(x, seed):
        torch.manual_seed(seed)
        layer = nn.Linear(3, 3)
        return natively(layer(x)) + layer(x)

    captured = capture(step, backend="eager")
    x = torch.randn(2, 3)
    for seed in (1, 1, 2, 3, 1):
        assert torch.equal(captured(x, seed), step(x, seed))


def test_what_is_read_in_it_is_guarded(monkeypatch):
    monkeypatch.setattr("moebius.guards.recorder.GuardRecorder.check", ignoring_values)
    with pytest.raises(AssertionError):
        test_each_call_with_another_criterion()


def ignoring_values(self, kind, source, *operands, text):
    if kind != "equal" or "weight" not in source.name:
        CHECK(self, kind, source, *operands, text=text)
