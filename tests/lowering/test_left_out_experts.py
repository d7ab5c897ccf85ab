"""Experts with parameters of their own, some of them chosen by no token, by backends of torch.compile: gradients, those
that are None, and the optimizer's state are plain Python's, and so they are where the backend fails."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moebius


class Experts(nn.Module):
    """Each a module; the loop visits those that a token goes to."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).T
        for expert in mask.sum(1).nonzero()[:, 0].tolist():
            (token,) = torch.where(mask[expert])
            out.index_add_(0, token, self.experts[expert](x[token]) * weight[token, None])
        return x + out


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def trained(run, model: nn.Module) -> list:
    """After each step: the loss, each gradient or None, which parameters have state, and the parameters."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    names, found = {p: name for name, p in model.named_parameters()}, []
    for number in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))  # three tokens, of six experts
        loss = run(model, optimizer, x).item()
        gradients = {name: None if p.grad is None else p.grad.clone() for p, name in names.items()}
        found.append((loss, gradients, [names[p] for p in optimizer.state], [p.detach().clone() for p in names]))
    return found


def agree(mine: list, theirs: list) -> None:
    for (loss, gradients, state, parameters), (other, expected, kept, after) in zip(mine, theirs, strict=True):
        assert loss == pytest.approx(other, rel=1e-5)
        assert {n for n, g in gradients.items() if g is None} == {n for n, g in expected.items() if g is None}
        assert set(state) == set(kept)
        for name, gradient in gradients.items():
            if gradient is not None:
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        # a step of AdamW is as long for a gradient that is nothing but rounding: its direction is not compared
        for a, b in zip(parameters, after, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def forwarded(gm, examples):
    return gm.forward


def failing(gm, examples):
    raise RuntimeError("this backend compiles nothing")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Experts(), nn.Linear(8, 8), Experts())


@pytest.fixture(scope="module")
def plain(model):
    return trained(step, model)


def test_the_batches_leave_experts_out(plain) -> None:
    left = [{n for n, g in gradients.items() if g is None} for _, gradients, *_ in plain]
    assert all(left) and len({frozenset(names) for names in left}) > 1


@pytest.mark.share(2)
@pytest.mark.parametrize("backend", ["moebius", "eager", "aot_eager", forwarded, failing])
def test_as_plain_python(backend, model, plain) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if backend is not failing else "ignore")
        agree(trained(moebius.capture(step, backend=backend), model), plain)


def test_a_backend_gets_the_parts_around_them(model) -> None:
    """They are lowered, and what backward of them asks of the batch is in no part."""
    parts = []

    def keeping(gm, examples):
        parts.append(gm)
        return gm.forward

    captured = moebius.capture(step, backend=keeping)
    trained(captured, model)
    targets = [getattr(node.target, "__name__", "") for gm in parts for node in gm.graph.nodes]
    assert targets and "stack_experts" not in targets
