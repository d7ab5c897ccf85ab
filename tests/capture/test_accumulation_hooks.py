"""Hooks on the autograd node that accumulates a parameter's gradient, as ZeRO and FSDP register them: kinds of hooks ×
when they are registered × backends."""

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import moebius
from moebius import lowering
from moebius.regions import hooks as capture_hooks


def scales(node, parameter, log):
    return node.register_hook(lambda *_: parameter.grad.mul_(0.5) is None or None)


def scales_before(node, parameter, log):
    return node.register_prehook(lambda gradients: (gradients[0] * 0.5,))


def trains(node, parameter, log):
    def in_backward(*_):
        with torch.no_grad():
            parameter.sub_(parameter.grad * 0.1)
        parameter.grad = None

    return node.register_hook(in_backward)


def counts(node, parameter, log):
    return node.register_hook(lambda *_: log.append(tuple(parameter.shape)))


KINDS = [scales, scales_before, trains, counts]


def told(kind, before, wrap):
    torch.manual_seed(0)
    model, log = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), []
    optimizer, nodes = torch.optim.SGD(model.parameters(), lr=0.1), []

    def register():
        for parameter in model.parameters():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            nodes.append(node)  # it lives as long as somebody holds it
            kind(node, parameter, log)

    def step(x_TD):
        optimizer.zero_grad()
        loss = model(x_TD).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() * len(log) if kind is counts and before else loss.detach()

    run, found = wrap(step), []
    for number in range(5):
        if number == (0 if before else 3):
            register()
        found.append(run(torch.randn(3, 4)).item())
    return found, sorted(log), [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "moebius", "aot_eager"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_they_run_as_in_plain_python(kind, before, backend):
    plain = told(kind, before, lambda step: step)
    captured = told(kind, before, lambda step: moebius.capture(step, backend=backend))
    assert captured[:2] == plain[:2]
    assert all(map(torch.equal, captured[2], plain[2]))


@pytest.mark.parametrize("module, kind, backend", [
    (capture_hooks, counts, "eager"), (lowering.torch_private, scales, "aot_eager"),
], ids=["while capturing", "in each call"])  # fmt: skip
def test_with_the_question_switched_off_they_are_lost(monkeypatch, module, kind, backend):
    monkeypatch.setattr(module, "hooks_of_accumulation", lambda leaves: False)
    assert told(kind, module is capture_hooks, lambda step: moebius.capture(step, backend=backend)) != told(
        kind, module is capture_hooks, lambda step: step
    )


def test_a_backward_at_the_same_time_is_not_disturbed(monkeypatch):
    """That of another thread, which has the parameter too."""
    parameter, remove = nn.Parameter(torch.ones(3)), RemovableHandle.remove
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    monkeypatch.setattr(RemovableHandle, "remove", lambda handle: (parameter.sum().backward(), remove(handle)))
    assert not lowering.torch_private.hooks_of_accumulation([parameter]) and node is not None
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_call_asks_once_for_all_parameters(monkeypatch):
    asked, ask = [], lowering.torch_private.hooks_of_accumulation
    monkeypatch.setattr(
        lowering.torch_private, "hooks_of_accumulation", lambda leaves: asked.append(len(leaves)) or ask(leaves)
    )
    told(counts, False, lambda step: moebius.capture(step, backend="aot_eager"))
    assert set(asked) == {4} and len(asked) >= 5
