"""Models that each call is given anew: after two that died unused, what stands there is known by what is read in it."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.cache.short_lived import ShortLived

BASE, SHARED = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
X_BD = [torch.arange(12.0).reshape(3, 4) / (number + 7) for number in range(8)]


class Wrapper(nn.Module):
    """Of a module that lives on, as torchdiffeq puts one around the user's function in each call."""

    def __init__(self, inner: nn.Module, factor: float = 1.0):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BD) * self.factor


class Own(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.w_D = nn.Parameter(torch.full((4,), 1.0 + number))
        self.register_buffer("b_D", torch.ones(4) * number)
        self.calls = 0

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.b_D.add_(1)
        return x_BD * self.w_D + self.b_D


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x_BD))


class OfShared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p_D = SHARED

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD * self.p_D


def hooked(number: int) -> nn.Module:
    made = nn.Linear(4, 4)
    made.register_forward_hook(lambda _, args, out: out * 2)
    return made


# How a call's model is made; whether what is captured for one serves the next (None: what follows a break does).
MODELS: dict[str, tuple[Callable[[int], nn.Module], bool | None]] = {
    "a layer": (lambda number: nn.Linear(4, 4), True),
    "around one that lives on": (lambda number: Wrapper(BASE), True),
    "with a number of its own": (lambda number: Wrapper(BASE, float(number)), True),
    "parameters, a buffer, a counter": (Own, True),
    "tied": (lambda number: Tied(), True),
    "a parameter that lives on": (lambda number: OfShared(), True),
    "statistics": (lambda number: nn.BatchNorm1d(4), True),
    "a copy": (lambda number: copy.deepcopy(BASE), True),
    "two classes in turn": (lambda number: nn.Linear(4, 4) if number % 2 else Own(number), True),
    "training in turn": (lambda number: nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(number % 2 == 0), True),
    "frozen in turn": (lambda number: nn.Linear(4, 4).requires_grad_(number % 2 == 0), True),
    "two dtypes in turn": (lambda number: nn.Linear(4, 4).double() if number % 2 else nn.Linear(4, 4), True),
    "two sizes in turn": (lambda number: nn.Linear(4, 4 + number % 2), True),
    "several layers": (lambda number: nn.Sequential(Own(number), nn.Sequential(Own(2), nn.Tanh())), True),
    "other numbers of layers": (lambda number: nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + number % 3)]), False),
    "hooked": (hooked, None),
    "a class of its own": (lambda number: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), False),
}


def forward(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    return model(x_BD.to(next(itertools.chain(model.parameters(), [SHARED])).dtype))


def backward(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    loss = forward(model, x_BD).square().sum() + SHARED.sum() * 0
    loss.backward()
    return loss.detach()


def trained(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    trainable = dict.fromkeys([*(p for p in model.parameters() if p.requires_grad), SHARED])
    optimizer = torch.optim.SGD(list(trainable), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, x_BD)
        optimizer.step()
    return forward(model, x_BD).detach()


def state(model: nn.Module, x_BD: torch.Tensor) -> Any:
    return forward(model, x_BD), sorted(model.state_dict()), sum(p.sum() for p in model.parameters())


def both_modes(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    model.eval()
    out_BD = forward(model, x_BD)
    model.train()
    return out_BD + forward(model, x_BD)


def attributes(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    model.extra = x_BD.sum()
    out_BD = forward(model, x_BD)
    model.mark = 3
    return out_BD * model.extra


def is_base(model: nn.Module, x_BD: torch.Tensor) -> Any:
    return forward(model, x_BD), model is BASE, model in {BASE: 1}, model in [BASE]


def frozen(model: nn.Module, x_BD: torch.Tensor) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return forward(model, x_BD)


def written(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return forward(model, x_BD)


def beside_base(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    return forward(model, x_BD) + BASE(x_BD).sum() + (SHARED * 2).sum()


QUESTIONS = (forward, backward, trained, state, both_modes, attributes, is_base, frozen, written, beside_base)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    begin_anew()


def begin_anew() -> None:
    with torch.no_grad():
        for number, parameter in enumerate((BASE.weight, BASE.bias, SHARED)):
            parameter.requires_grad_(False).fill_(0.1 + number)
            parameter.requires_grad_(True)
            parameter.grad = None


def seen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.requires_grad, value.detach().tolist()
    return list(map(seen, value)) if isinstance(value, list | tuple) else value


def calls(function: Callable[..., Any], make: Callable[[int], nn.Module]) -> Iterator[Any]:
    """What each call gives, and leaves in its model and in what lives on."""
    for number, x_BD in enumerate(X_BD):
        begin_anew()
        torch.manual_seed(number)
        model = make(number)
        result = function(model, x_BD)
        left = [*model.state_dict().values(), *(p.grad for p in (*model.parameters(), *BASE.parameters(), SHARED))]
        yield seen(result), seen(left), model.training, [getattr(each, "calls", 0) for each in model.modules()]
        yield sorted(name for name in vars(model) if not name.startswith("_"))
        del model, result, left


@pytest.mark.share(16)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:moebius. .* was captured")
def test_as_in_python(name, question):
    make, serves = MODELS[name]
    captured = capture(lambda model, x_BD: question(model, x_BD), backend="eager")
    assert list(calls(captured, make)) == list(calls(question, make))
    assert serves is None or (stats(captured).hits >= 3) == serves


class Solver(nn.Module):
    """As an adaptive solver of a differential equation is: one for each call, whose steps go on until data say so."""

    def __init__(self, function: nn.Module, y_D: torch.Tensor, in_a_cycle: bool):
        super().__init__()
        self.function, self.y_D = Wrapper(function), y_D
        if in_a_cycle:
            self.chosen = self.advance

    def advance(self, h: float) -> torch.Tensor:
        change_D = self.function(self.y_D) * h
        if change_D.norm() > 1:
            print({}, file=SINK)  # a graph break
            change_D = change_D / 2
        self.y_D = self.y_D + change_D
        print({}, file=SINK)
        return change_D.norm()

    def solve(self) -> torch.Tensor:
        steps = 0
        while self.advance(0.1) > 1e-3 and steps < 12:
            steps += 1
        return self.y_D.sum() * steps


SINK = io.StringIO()


def solved(y_D: torch.Tensor, in_a_cycle: bool) -> torch.Tensor:
    loss = Solver(BASE, y_D, in_a_cycle).solve()
    loss.backward()
    return loss.detach()


def misses_late(in_a_cycle: bool, calls: int = 14, late: int = 4) -> int:
    begin_anew()
    captured, misses = capture(solved, backend="eager"), []
    for number in range(calls):
        y_D = torch.full((4,), number / 7)
        results = []
        for step in (captured, solved):
            results.append((step(y_D, in_a_cycle).item(), BASE.weight.grad.tolist()))
            BASE.weight.grad = None
        assert results[0] == results[1]
        misses.append(stats(captured).misses)
    return misses[-1] - misses[-1 - late]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("in_a_cycle", (False, True))
@pytest.mark.filterwarnings("ignore:moebius. .* was captured")
def test_met_often_in_one_call_it_has_not_been_used_in_another(in_a_cycle, monkeypatch):
    """In a cycle it lives on, until a collector comes."""
    assert misses_late(in_a_cycle) == 0
    monkeypatch.setattr(ShortLived, "places", lambda self: set())
    assert misses_late(in_a_cycle) > 0


def test_known_by_identity_it_serves_no_other(monkeypatch):
    monkeypatch.setattr(ShortLived, "places", lambda self: set())
    captured = capture(lambda model, x_BD: forward(model, x_BD), backend="eager")
    list(calls(captured, MODELS["a layer"][0]))
    assert stats(captured).hits == 0
