"""Optimizers that a call makes for itself: test-time training, an inner loop, ``fit`` with everything in it."""

from __future__ import annotations

import pytest
import torch
from test_missing_gradients import BATCHES, OPTIMIZERS, Experts, batch
from torch.optim.lr_scheduler import StepLR

from moebius import capture, stats

NAMES = ["SGD", "SGD, nesterov, foreach", "AdamW", "AdamW, fused", "AdamW, two groups", "Adagrad", "Adafactor"]


def fitted(make, model, x, held):
    optimizer = make(model.parameters())
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def kept(make, model, x, held):
    """It lives on, with its state; two steps of it, with a schedule."""
    optimizer = make(model.parameters())
    schedule = StepLR(optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.dropout(model(x), 0.2).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    held.update(optimizer=optimizer, rate=schedule.get_last_lr())
    return loss.detach()


def filled_later(make, model, x, held):
    """Parameters that are added one by one, and state that is looked at."""
    first, *rest = model.parameters()
    optimizer = make([first])
    for p in rest:
        optimizer.add_param_group({"params": p, "lr": 0.01})
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    held.update(states=len(optimizer.state), groups=len(optimizer.param_groups))
    optimizer.zero_grad()
    return loss.detach()


def compare(step, make, batches=BATCHES, backend="eager"):
    found, counts = [], None
    for run in (capture(step, backend=backend), step):
        torch.manual_seed(0)
        model, held, seen = Experts(), {}, []
        for number, numbers in enumerate(batches):
            result = run(make, model, batch(numbers, number), held)
            kept = dict(held)
            if (optimizer := kept.pop("optimizer", None)) is not None:
                index = {p: i for i, p in enumerate(model.parameters())}
                kept["state"] = [(index[p], sorted(state.items())) for p, state in optimizer.state.items()]
                kept["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            parameters = [(p.detach().clone(), p.grad) for p in model.parameters()]
            seen.append((result, parameters, repr(kept)))
        found.append(seen)
        counts = counts if run is step else stats(run)
    for ours, plain in zip(*found, strict=True):
        assert repr(ours[2]) == repr(plain[2])
        torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_step_is_one_graph(name):
    make = OPTIMIZERS[name]
    make([torch.nn.Parameter(torch.ones(1))])  # torch patches the class when its first instance is made
    counts = compare(fitted, make)
    assert (counts.graphs, counts.breaks, counts.recompiles) == (1, 0, [])


@pytest.mark.share(2)
@pytest.mark.parametrize("step", [kept, filled_later], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["SGD, momentum", "AdamW", "Adagrad"])
def test_what_lives_on_is_as_in_plain_python(step, name):
    compare(step, OPTIMIZERS[name], BATCHES[:4])


def test_one_of_the_users_own():
    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters, lr=0.1):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["sum"] = state.get("sum", 0) + p.grad
                        p.sub_(state["sum"], alpha=group["lr"])

    compare(kept, Mine, [(0, 1, 2, 3), (0, 1, 2, 3), (1,)])


@pytest.mark.parametrize(
    "parameters",
    [lambda m: [], lambda m: m.weight, lambda m: [m.weight * 2], lambda m: [m.weight, 1]],
    ids=["empty", "a tensor", "no leaf", "no tensor"],
)
def test_its_errors_are_torchs(parameters):
    def step(model):
        return torch.optim.SGD(parameters(model), lr=0.1)

    said = []
    for run in (capture(step, backend="eager"), step):
        with pytest.raises((TypeError, ValueError)) as error:
            run(torch.nn.Linear(2, 2))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_parameters_in_two_groups_are_refused():
    def step(model):
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        optimizer.add_param_group({"params": model.parameters()})

    for run in (capture(step, backend="eager"), step):
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            run(torch.nn.Linear(2, 2))
