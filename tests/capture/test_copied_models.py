"""``copy.deepcopy`` of a model in the step, and parameters made there: kinds of models × what is done with the copy."""

from __future__ import annotations

import copy
from collections import deque

import plain_python
import pytest
import torch
from torch import nn

import moebius


class Tied(nn.Module):
    """One parameter in two places, a buffer, and state of other kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.seen, self.names = {"a", "b"}, {"rows": [1, (2, [3])], "calls": 0}

    def forward(self, x):
        self.names["calls"] += len(self.seen)
        return self.second(torch.relu(self.first(x))) * self.scale


class Stated(nn.Linear):
    """Says itself what a copy is given."""

    def __getstate__(self):
        return {**super().__getstate__(), "copies": getattr(self, "copies", 0) + 1}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.told = len(state)


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


KINDS = {
    "linear": lambda: nn.Linear(4, 4),
    "normalized": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)),
    "frozen": frozen,
    "tied": Tied,
    "stated": lambda: Stated(4, 4),
    "list": lambda: nn.Sequential(*nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])),
}


def applied(model, kept):
    def step(x):
        net = copy.deepcopy(model)
        return net(x) + model(x), [n for n, _ in net.named_parameters()], vars(net).get("told")

    return step


def trained(model, kept):
    def step(x):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
        for _ in range(2):
            net.zero_grad()
            loss = net(x.detach()).square().mean()
            loss.backward()
            optimizer.step()
        model.load_state_dict(net.state_dict())
        return loss.item()

    return step


def averaged(model, kept):
    def step(x):
        target = copy.deepcopy(model).requires_grad_(False)
        loss = (model(x.detach()) - target(x.detach() * 2)).square().mean()
        loss.backward()
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
                new.grad = None
        return loss.item(), [p.sum().item() for p in target.parameters()]

    return step


def remembered(model, kept):
    def step(x):
        kept.append(copy.deepcopy(model))
        again = copy.deepcopy({"models": [model, kept[-1]], "same": model})
        return again["same"] is again["models"][0], again["models"][1](x), type(next(again["same"].parameters()))

    return step


def replaced(model, kept):
    """Parameters as averages that the step makes (``nn.Parameter`` over another's memory, of nothing, without grad)."""

    def step(x):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        made = {name: nn.Parameter(p * 0.9, requires_grad=p.requires_grad) for name, p in before.items()}
        out = torch.func.functional_call(model, made, (x,))
        view = next(iter(before.values()))
        shared = nn.Parameter(view, False)
        view.add_(1)
        return out, shared, nn.Parameter().shape, shared.is_leaf, isinstance(shared, nn.Parameter), made

    return step


@pytest.mark.share(10)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("use", [applied, trained, averaged, remembered, replaced], ids=lambda use: use.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_as_in_plain_python(kind, use, backend):
    def recipe():
        model, kept = KINDS[kind](), deque(maxlen=1)
        return use(model, kept), [model, kept]

    captured = plain_python.compared(recipe, backend, (3, 3, 3, 4))
    assert not plain_python.graph_breaks(captured)


def test_in_an_exported_step(tmp_path):
    def step(x):
        weight = nn.Parameter(x * 2)
        (weight * nn.Parameter(x.clone(), False)).sum().backward()
        return weight.grad

    captured, x = moebius.capture(step), torch.randn(3, 4)
    expected = captured(x)
    captured.export(tmp_path / "file")
    assert torch.equal(moebius.load(tmp_path / "file")(x), expected)


WRONG = {
    "too many": lambda x: nn.Parameter(x, True, 3),
    "twice": lambda x: nn.Parameter(x, data=x),
    "by another name": lambda x: nn.Parameter(tensor=x),
}


@pytest.mark.parametrize("call", WRONG)
def test_parameters_made_wrongly_raise_as_in_plain_python(call):
    def step(x):
        try:
            return WRONG[call](x * 2)
        except TypeError as error:
            return str(error)

    assert moebius.capture(step, backend="eager")(torch.ones(3)) == step(torch.ones(3))
