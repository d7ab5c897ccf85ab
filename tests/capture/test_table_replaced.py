"""What a program puts in the places of Python's and torch's own functions: each is noticed, at the next call."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import random
import sys
import time
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from moebius import capture, stats
from moebius.python import calls, originals
from moebius.tensors import tensor_class

T = torch.Tensor


@pytest.fixture(autouse=True)
def some_run_natively():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moebius: .* was replaced, and capture relies on it")
        warnings.filterwarnings("ignore", "hello|None of the inputs have requires_grad")
        yield


ADAM = sys.modules["torch.optim.adam"]
CLIPPING = sys.modules["torch.nn.utils.clip_grad"]


def twice(original: Any) -> Any:
    def doubled(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return torch.mul(found, 2) if isinstance(found, torch.Tensor) else found

    return doubled


def with_options(**options: Any) -> Any:
    return lambda original: lambda *args, **kwargs: original(*args, **kwargs | options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.embedding = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.last, self.loss = nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Linear(4, 4)), nn.CrossEntropyLoss()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.more = nn.ParameterDict({"a": nn.Parameter(torch.full((4,), 3.0))})

    def forward(self, x):
        x = self.norm(self.first(x) + self.embedding(torch.tensor([1, 2, 3])) * self.scale)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return torch.cat([self.last(x) * self.more["a"], torch.zeros(1, 4)]) ** 2


def made() -> Any:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(x, y):
        optimizer.zero_grad()
        found = model(x)[:3]
        loss = model.loss(found, y) + found.pow(2).sum() + torch.softmax(found, -1).max()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return types.SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, step=step)


# name: where (an object, or what gives it of the things of one run), the attribute, what stands there then
STEPS: dict[str, tuple[Any, str, Any]] = {
    **{f"F.{name}": (F, name, twice) for name in ("gelu", "linear", "layer_norm", "relu", "embedding")},
    "F.cross_entropy": (F, "cross_entropy", twice),
    "F.dropout": (F, "dropout", lambda original: lambda x, *args: x),
    **{f"torch.{name}": (torch, name, twice) for name in ("cat", "softmax", "tensor")},
    **{f"Tensor.{name}": (T, name, twice) for name in ("pow", "sum", "max", "detach")},
    **{f"Tensor.{name}": (T, name, twice) for name in ("__add__", "__mul__", "__pow__", "__getitem__")},
    "Tensor.grad, clipped": (T, "clamp", twice),
    "Module.__call__": (nn.Module, "__call__", twice),
    "Module._call_impl": (nn.Module, "_call_impl", twice),
    "Module.__getattr__": (nn.Module, "__getattr__", twice),
    "Module.parameters": (nn.Module, "parameters", lambda original: lambda self: list(original(self))[:2]),
    "Linear.forward": (nn.Linear, "forward", twice),
    "Linear.__call__": (nn.Linear, "__call__", twice),
    "Sequential.forward": (nn.Sequential, "forward", twice),
    "ModuleList.__iter__": (nn.ModuleList, "__iter__", lambda original: lambda self: iter([*original(self)][:1])),
    "ParameterDict.__getitem__": (nn.ParameterDict, "__getitem__", twice),
    "CrossEntropyLoss.forward": (nn.CrossEntropyLoss, "forward", twice),
    "the class's forward": (Model, "forward", twice),
    "a layer's forward": (lambda run: run.model.first, "forward", twice),
    "the model's forward": (lambda run: run.model, "forward", twice),
    "the optimizer's step, called twice": (
        lambda run: run.optimizer, "step", lambda original: lambda: (original(), original())
    ),
    "the optimizer's step, left out": (lambda run: run.optimizer, "step", lambda _: lambda: None),
    "the optimizer's zero_grad": (lambda run: run.optimizer, "zero_grad", lambda _: lambda: None),
    "the optimizer's class": (
        lambda run: run.optimizer, "__class__",
        lambda _: type("Slow", (torch.optim.AdamW,), {"zero_grad": lambda self: None}),
    ),
    "Optimizer.zero_grad": (torch.optim.Optimizer, "zero_grad", lambda _: lambda self: None),
    "Adam._init_group": (  # (torch.compile, once used, has set one in each class of optimizers)
        lambda run: next(c for c in type(run.optimizer).__mro__ if "_init_group" in vars(c)), "_init_group",
        lambda original: lambda self, group, *rest: original(self, {**group, "params": group["params"][:2]}, *rest),
    ),
    "adam": (ADAM, "adam", with_options(lr=0.5)),
    "_single_tensor_adam": (ADAM, "_single_tensor_adam", with_options(lr=0.5)),
    "the scheduler's step": (lambda run: run.scheduler, "step", lambda original: lambda: (original(), original())),
    "StepLR.get_lr": (torch.optim.lr_scheduler.StepLR, "get_lr", lambda _: lambda self: [0.3]),
    "clip_grad_norm_": (nn.utils, "clip_grad_norm_", lambda original: lambda given, most: original(given, most / 9)),
    "_get_total_norm": (CLIPPING, "_get_total_norm", twice),
    "_clip_grads_with_norm_": (CLIPPING, "_clip_grads_with_norm_", lambda _: lambda *args, **kwargs: None),
}  # fmt: skip


@contextlib.contextmanager
def in_its_place(owner: Any, name: str, make: Any) -> Any:
    before = vars(owner).get(name) if hasattr(owner, "__dict__") else None
    had = name in vars(owner)
    original = getattr(owner, name, None)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if name == "__class__":
            owner.__class__ = original
        elif had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def trained(name: str | None, captured: bool) -> list[Any]:
    """What each of four calls gives and leaves; what is replaced, is so in the third."""
    run = made()
    step = capture(run.step, backend="eager") if captured else run.step
    torch.manual_seed(1)
    found = []
    for iteration in range(4):
        x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
        owner, attribute, make = STEPS[name] if name and iteration == 2 else (run, "unused", lambda _: None)
        if isinstance(owner, types.FunctionType):
            owner = owner(run)
        with in_its_place(owner, attribute, make):
            try:
                outcome: Any = step(x, y).clone()
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
        weights = [*run.model.parameters()]
        rates = [group["lr"] for group in run.optimizer.param_groups]
        left = [w.detach().clone() for w in weights], [None if w.grad is None else w.grad.clone() for w in weights]
        found.append((outcome, *left, rates, torch.get_rng_state()))
    return found


def differing(some: list[Any], others: list[Any]) -> list[int]:
    """The iterations in which two runs differ."""
    words = [[repr([part.tolist() if isinstance(part, T) else part for part in flat(iteration)]) for iteration in run]
             for run in (some, others)]  # fmt: skip
    return [iteration for iteration, (a, b) in enumerate(zip(*words, strict=True)) if a != b]


def flat(value: Any) -> list[Any]:
    return [part for item in value for part in flat(item)] if isinstance(value, tuple | list) else [value]


@pytest.mark.share(5)
@pytest.mark.parametrize("name", STEPS)
def test_what_is_replaced_in_a_training_step(name):
    plain = trained(name, captured=False)
    if name != "Tensor.grad, clipped":  # the others say something
        assert differing(plain, trained(None, captured=False))[:1] == [2]
    assert differing(plain, trained(name, captured=True)) == []


# ----------------------------------------------------------------------------------------------------------------------
# Functions that capture answers itself
# ----------------------------------------------------------------------------------------------------------------------

LAYER = nn.Linear(2, 2)


def after_backward(x):
    x = x.clone().requires_grad_()
    torch.autograd.backward((x * 2).sum())
    return torch.ones(2, 2) if x.grad is None else x.grad


def hooked(x):
    x = x.clone().requires_grad_()
    y = x * 2
    y.register_hook(lambda g: g * 3)
    y.sum().backward()
    return x.grad


def without_gradients(x):
    with torch.no_grad():
        y = LAYER(x)
    return y * (1 + y.requires_grad)


ANSWERED: dict[str, tuple[Any, str, Any, Any]] = {
    "json.loads": (json, "loads", lambda _: lambda text: [7], lambda x: x * json.loads("[2]")[0]),
    "random.random": (random, "random", lambda _: lambda: 0.25, lambda x: x * random.random()),
    "random.random, another's": (random, "random", lambda _: random.Random(3).random, lambda x: x * random.random()),
    "random.random, wrapped": (random, "random", lambda f: lambda: f() * 2, lambda x: x * random.random()),
    "time.time": (time, "time", lambda _: lambda: 10.0, lambda x: x * (2 if time.time() < 11 else 1)),
    "math.floor": (math, "floor", lambda _: lambda number: 7, lambda x: x * math.floor(x.shape[0] / 2)),
    "checkpoint": (
        torch.utils.checkpoint, "checkpoint", lambda _: lambda f, *args, **options: f(*args) * 3,
        lambda x: torch.utils.checkpoint.checkpoint(LAYER, x, use_reentrant=False),
    ),
    "checkpoint, with other defaults": (  # a partial object of torch's own
        torch.utils.checkpoint, "checkpoint", lambda f: functools.partial(twice(f), use_reentrant=False),
        lambda x: torch.utils.checkpoint.checkpoint(LAYER, x, use_reentrant=True),
    ),
    "is_compiling": (
        torch.compiler, "is_compiling", lambda _: lambda: True,
        lambda x: x * (2 if torch.compiler.is_compiling() else 1),
    ),
    "is_tensor": (torch, "is_tensor", lambda _: lambda x: False, lambda x: x * 2 if torch.is_tensor(x) else x),
    "warnings.warn": (warnings, "warn", lambda _: lambda text: LAYER.told.append(text), lambda x: told(x)),
    "no_grad": (torch, "no_grad", lambda _: contextlib.nullcontext, without_gradients),
    "is_grad_enabled": (
        torch, "is_grad_enabled", lambda _: lambda: False, lambda x: x * 2 if torch.is_grad_enabled() else x
    ),
    "get_rng_state": (
        torch, "get_rng_state", lambda _: lambda: torch.ones(3), lambda x: x * len(torch.get_rng_state())
    ),
    "autograd.backward": (torch.autograd, "backward", lambda _: lambda *args: None, after_backward),
    "functools.partial": (
        functools, "partial", lambda _: lambda f, y: lambda x: y * 9, lambda x: functools.partial(torch.add, x)(x)
    ),
    "Tensor.size": (T, "size", lambda _: lambda self, dim: 5, lambda x: x * x.size(0)),
    "Tensor.dim": (T, "dim", lambda _: lambda self: 5, lambda x: x * x.dim()),
    "Tensor.is_contiguous": (T, "is_contiguous", lambda _: lambda self: False, lambda x: x * (1 + x.is_contiguous())),
    "Tensor.device": (T, "device", lambda _: property(lambda self: "x"), lambda x: x * 2 if x.device == "x" else x),
    "Tensor.register_hook": (T, "register_hook", lambda _: lambda self, hook: None, hooked),
    "Tensor.__len__": (T, "__len__", lambda _: lambda self: 7, lambda x: x * len(x)),
    "Tensor.__iter__": (T, "__iter__", lambda _: lambda self: iter([1.0, 2.0]), lambda x: x * sum(x)),
    "Tensor.__float__": (T, "__float__", lambda _: lambda self: 2.5, lambda x: x * float(x.sum())),
    "Tensor.item": (T, "item", lambda _: lambda self: 2.5, lambda x: x * x.sum().item()),
    "Tensor.cosh, which only the program calls": (T, "cosh", lambda _: lambda self: self * 9, lambda x: x.cosh()),
    "Tensor.mT": (T, "mT", lambda _: property(lambda self: self * 9), lambda x: x.mT),
    "a method that Tensor has not": (
        T, "fancy", lambda _: lambda self: self * 9, lambda x: (x * 1).fancy() if hasattr(x * 1, "fancy") else x
    ),
    "a property that Tensor has not": (
        T, "fancy", lambda _: property(lambda self: self.shape[0] * 9), lambda x: x * getattr(x, "fancy", 1)
    ),
    "a constant that Tensor has not": (T, "fancy", lambda _: 9, lambda x: x * getattr(x, "fancy", 1)),
    "a method that Parameter has not": (
        nn.Parameter, "fancy", lambda _: lambda self: self * 9,
        lambda x: LAYER.weight.fancy() if hasattr(LAYER.weight, "fancy") else x + 1,
    ),
}  # fmt: skip
CAPTURED_ALL_THE_SAME = (
    "json.loads", "random.random, wrapped", "checkpoint", "is_compiling", "is_tensor", "math.floor",
    "a method that Tensor has not", "a property that Tensor has not", "a constant that Tensor has not",
    "a method that Parameter has not",
)  # fmt: skip


def told(x):
    warnings.warn("hello")  # noqa: B028
    return x * (1 + len(LAYER.told))


def called(name: str, captured: bool, first: int) -> tuple[list[Any], Any]:
    """What calls give before, while and after something is replaced."""
    owner, attribute, make, function = ANSWERED[name]
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    random.seed(0)
    LAYER.told = []
    step = capture(function, backend="eager") if captured else function
    found = [step(x).tolist() for _ in range(first)]
    with in_its_place(owner, attribute, make):
        found += [step(x).tolist() for _ in range(3)]
    found += [step(x).tolist() for _ in range(2)]
    return [*found, torch.is_grad_enabled(), random.random()], stats(step) if captured else None


@pytest.mark.parametrize("first", [0, 2], ids=["from the first call on", "after two calls"])
@pytest.mark.parametrize("name", ANSWERED)
def test_what_capture_answers_itself(name, first):
    plain, _ = called(name, False, first)
    assert plain[first] != plain[-3]  # it says something
    found, seen = called(name, True, first)
    assert found == plain
    if name in CAPTURED_ALL_THE_SAME:
        assert seen.graphs and not seen.breaks and seen.misses <= 3 and seen.hits >= 2


def test_how_tensors_are_shown_and_copied_is_no_matter_of_graphs(monkeypatch, capsys):
    """Libraries show tensors in their way; ``copy`` and ``pickle`` keep a list of slots in the class."""
    for name in ("__repr__", "__str__"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor: f"a tensor of {tuple(tensor.shape)}")
    copy.copy(nn.Parameter(torch.ones(2)))
    step = capture(lambda x: (print(x, str(x * 2)), x * 2)[1], backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert step(torch.ones(2, 3)).equal(torch.full((2, 3), 2.0))
            nn.Parameter.__slotnames__ = []  # as if it were the first copy
    assert capsys.readouterr().out == "a tensor of (2, 3) a tensor of (2, 3)\n" * 3
    assert stats(step).graphs == 1 and stats(step).hits == 2


def test_without_a_look_at_the_class_an_added_method_would_go_unnoticed(monkeypatch):
    monkeypatch.setattr(
        tensor_class,
        "read",
        lambda attributes, proxy, name: attributes.objects.made(
            attributes.tensors.attribute(proxy, name, attributes.objects.enter)
        ),
    )
    name = "a method that Tensor has not"
    assert called(name, True, 2)[0] != called(name, False, 2)[0]


def test_without_a_guard_on_it_a_replaced_operator_would_go_unnoticed(monkeypatch):
    monkeypatch.setattr(tensor_class, "guard", lambda recorder: None)
    assert called("Tensor.__len__", True, 2)[0] != called("Tensor.__len__", False, 2)[0]


def test_without_a_look_at_what_capture_relies_on_it_would_be_wrong(monkeypatch):
    monkeypatch.setattr("moebius.cache.captured.replaced", lambda: None)
    monkeypatch.setattr(tensor_class, "guard", lambda recorder: None)
    monkeypatch.setattr(tensor_class, "rely_on", lambda *args: None)
    assert called("Tensor.__len__", True, 0)[0] != called("Tensor.__len__", False, 0)[0]


def test_told_by_name_another_function_would_be_torchs(monkeypatch):
    monkeypatch.setattr(calls, "CHECKPOINT", torch.utils.checkpoint.checkpoint)
    monkeypatch.setattr(originals, "is_own", lambda function: True)
    with in_its_place(torch.utils.checkpoint, "checkpoint", ANSWERED["checkpoint"][2]):
        monkeypatch.setattr(calls, "CHECKPOINT", torch.utils.checkpoint.checkpoint)
        x, step = torch.ones(2, 2), ANSWERED["checkpoint"][3]
        assert not capture(step, backend="eager")(x).equal(step(x))


def test_all_that_calls_are_told_by_is_pythons_and_torchs_own(monkeypatch):
    sizes = []

    def kept(stand_ins):
        found = originals.of_originals(stand_ins)
        sizes.append((len(stand_ins), len(found)))
        return found

    monkeypatch.setattr(calls, "kept", kept)
    capture(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert len(sizes) == 2 and all(before == after for before, after in sizes)
