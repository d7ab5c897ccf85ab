"""Histories of a trainer: between calls somebody changes anything that the step reads, as in a debugger or a notebook.

Two equal trainers live through the same history, one captured, one plain; every loss, log, parameter and state of the
optimizer is the same to the bit. A change is one function below; whatever it is, the guards must see it.
`python tests/capture/test_outside_changes.py COUNT` runs many histories.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from seeds import seed_of_the_code

from moebius import capture, reset, stats

FRESH = 10**6 + seed_of_the_code()
FIXED, NEW, LONG = 1, 1, 8  # histories of each kind of captured thing, and changes in one

SCALE = 0.5
TABLE = {"aux": 0.01, "names": ["ce"], "inner": {"power": 2}}


class Config:
    top_k = 2
    jitter = 0.0

    def __init__(self) -> None:
        self.act = "silu"
        self.norm_topk = True
        self.order = [0, 1, 2]
        self.tags = {"a"}


def balance(probs_TE: torch.Tensor, power: int = 2, *, weight: float = 1.0) -> torch.Tensor:
    return weight * (probs_TE.mean(0) ** power).sum()


class Expert(nn.Module):
    slope = 1.0

    def __init__(self, dim: int, wide: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, wide, bias=False), nn.Linear(wide, dim)
        self.act = F.silu

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x_TD)) * self.slope)


class OtherExpert(Expert):
    slope = 0.75


class Layer(nn.Module):
    def __init__(self, config: Config, dim: int):
        super().__init__()
        self.config, self.norm = config, nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(Expert(dim, 2 * dim) for _ in range(4))
        self.register_buffer("count", torch.zeros(4))
        self.seen = collections.Counter()
        self.last = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        probs_TE = self.gate(self.norm(x_TD)).softmax(-1)
        weight_TK, index_TK = probs_TE.topk(self.config.top_k, -1)
        if self.config.norm_topk:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index_TK == number)
            if token.numel():
                out_TD.index_add_(0, token, expert(x_TD[token]) * weight_TK[token, slot, None])
        if self.training:
            self.count += torch.bincount(index_TK.flatten(), minlength=4).to(self.count.dtype)
        self.last = probs_TE
        self.seen["calls"] += 1
        return x_TD + out_TD * getattr(self.gate.weight, "scale", 1.0)


class Model(nn.Module):
    def __init__(self, config: Config, dim: int = 8):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, dim) for _ in range(3))
        self.head = nn.Linear(dim, 5)
        self.dropout = 0.0

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        for number in self.config.order:
            x_TD = self.layers[number](x_TD)
        return self.head(F.dropout(x_TD, self.dropout, self.training)) * SCALE


class Trainer:
    losses: list[str] = ["ce"]

    def __init__(self, captures: str):
        torch.manual_seed(0)
        self.config = Config()
        self.model = Model(self.config)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 0.9**i)
        self.history: list[Any] = []
        self.clip: float | None = 1.0
        self.factor = self.closure(1.0)
        self.callbacks: list[Callable] = []
        self.shift = torch.zeros(8)
        self.penalty: Callable = functools.partial(balance, weight=0.5)
        self.step: Callable = self.plain_step
        self.forward: Callable = self.model
        if captures == "step":
            self.step = capture(self.plain_step, backend="eager")
        elif captures == "model":
            self.forward = capture(self.model, backend="eager")
        elif captures == "loss":
            self.loss = capture(self.loss, backend="eager")  # type: ignore[method-assign]

    @staticmethod
    def closure(value: float) -> Callable:
        def factor() -> float:
            return value

        return factor

    def loss(self, x_TD: torch.Tensor, y_T: torch.Tensor) -> torch.Tensor:
        out = F.cross_entropy(self.forward(x_TD + self.shift), y_T) * self.factor()
        if "aux" in TABLE:
            for layer in self.model.layers:
                if layer.last is not None:
                    out = out + TABLE["aux"] * self.penalty(layer.last, TABLE["inner"]["power"])
        return out

    def plain_step(self, x_TD: torch.Tensor, y_T: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x_TD, y_T)
        if loss.requires_grad:
            loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
        for callback in self.callbacks:
            callback(self, loss)
        self.history.append((len(self.history), tuple(self.losses), os.environ.get("MOEBIUS_TEST_NOTE")))
        return loss.detach()


Change = Callable[[Trainer, random.Random], Any]
CHANGES: list[Change] = []


def change(function: Change) -> Change:
    CHANGES.append(function)
    return function


def some_parameter(t: Trainer, r: random.Random) -> nn.Parameter:
    return r.choice(list(t.model.parameters()))


def some_layer(t: Trainer, r: random.Random) -> Layer:
    return t.model.layers[r.randrange(len(t.model.layers))]


def some_expert(t: Trainer, r: random.Random) -> Any:
    return some_layer(t, r).experts[r.randrange(4)]


def added(layer: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
    return out + 0.125


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


def logs_the_loss(t: Trainer, loss: torch.Tensor) -> None:
    t.history.append(float(loss.detach()))


def squared(self: Any, x_TD: torch.Tensor) -> torch.Tensor:
    return self.down(self.up(x_TD) ** 2)


# Numbers and switches that the step reads from objects, dicts, classes, globals, cells, defaults.
change(lambda t, r: t.optimizer.param_groups[0].update(lr=r.choice([1e-2, 3e-3, 5e-2])))
change(lambda t, r: t.optimizer.param_groups[0].update(weight_decay=r.choice([0.0, 0.1])))
change(lambda t, r: t.optimizer.param_groups[0].update(betas=r.choice([(0.9, 0.99), (0.8, 0.95)])))
change(lambda t, r: t.optimizer.param_groups[0].update(maximize=r.random() < 0.5))
change(lambda t, r: t.scheduler.step())
change(lambda t, r: setattr(t, "clip", r.choice([None, 0.1, 1.0])))
change(lambda t, r: setattr(t, "factor", Trainer.closure(r.choice([1.0, 2.0]))))
change(lambda t, r: setattr(t.factor.__closure__[0], "cell_contents", r.choice([0.5, 3.0])))
change(lambda t, r: setattr(t, "penalty", r.choice([balance, functools.partial(balance, weight=2.0)])))
change(lambda t, r: t.history.clear())
change(lambda t, r: t.callbacks.append(logs_the_loss))
change(lambda t, r: t.callbacks and t.callbacks.pop())
change(lambda t, r: setattr(t, "shift", torch.full((8,), r.random())))
change(lambda t, r: t.shift.add_(0.25))
change(lambda t, r: setattr(t, "losses", ["ce", "own"]))
change(lambda t, r: Trainer.losses.append("more"))
change(lambda t, r: setattr(Config, "top_k", r.choice([1, 2, 3])))
change(lambda t, r: setattr(t.config, "top_k", r.choice([1, 2])))
change(lambda t, r: vars(t.config).pop("top_k", None))
change(lambda t, r: setattr(t.config, "norm_topk", not t.config.norm_topk))
change(lambda t, r: r.shuffle(t.config.order))
change(lambda t, r: t.config.order.append(r.randrange(len(t.model.layers))) if len(t.config.order) < 5 else None)
change(lambda t, r: setattr(t.config, "order", t.config.order[: max(1, len(t.config.order) - 1)]))
change(lambda t, r: globals().update(SCALE=r.choice([0.5, 0.25, 1])))
change(lambda t, r: TABLE.update(aux=r.choice([0.01, 0.1])))
change(lambda t, r: TABLE.pop("aux", None))
change(lambda t, r: TABLE["inner"].update(power=r.choice([2, 3])))
change(lambda t, r: TABLE.update(inner={"power": r.choice([1, 4])}))
change(lambda t, r: setattr(balance, "__defaults__", (r.choice([2, 3]),)))
change(lambda t, r: setattr(balance, "__kwdefaults__", {"weight": r.choice([1.0, 3.0])}))
change(lambda t, r: os.environ.update(MOEBIUS_TEST_NOTE=r.choice("ab")))

# Modules: their mode, hooks, parts, classes and methods.
change(lambda t, r: t.model.train(r.random() < 0.5))
change(lambda t, r: some_layer(t, r).train(r.random() < 0.5))
change(lambda t, r: setattr(t.model, "dropout", r.choice([0.0, 0.5])))
change(lambda t, r: some_expert(t, r).register_forward_hook(added))
change(lambda t, r: some_expert(t, r)._forward_hooks.clear())
change(lambda t, r: some_layer(t, r).norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,)))
change(lambda t, r: setattr(some_expert(t, r), "act", r.choice([F.silu, F.gelu, torch.tanh])))
change(lambda t, r: setattr(some_expert(t, r), "slope", r.choice([0.5, 2])))
change(lambda t, r: setattr(Expert, "slope", r.choice([1.0, 1.5])))
change(lambda t, r: setattr(some_expert(t, r), "__class__", r.choice([Expert, OtherExpert])))
change(lambda t, r: setattr(some_expert(t, r), "forward", types.MethodType(squared, some_expert(t, r))))
change(lambda t, r: some_expert(t, r).__dict__.pop("forward", None))
change(lambda t, r: setattr(OtherExpert, "forward", r.choice([squared, Expert.forward])))
change(lambda t, r: some_layer(t, r).experts.__setitem__(0, copy.deepcopy(some_expert(t, r))))
change(lambda t, r: some_layer(t, r).experts.__setitem__(1, some_layer(t, r).experts[2]))
change(lambda t, r: some_layer(t, r).experts._modules.update({"3": nn.Identity()}))
change(lambda t, r: setattr(some_layer(t, r), "config", copy.copy(t.config)))
change(lambda t, r: setattr(some_layer(t, r).norm, "eps", r.choice([1e-5, 1e-2])))
change(lambda t, r: setattr(t.model, "head", nn.Linear(8, 5)))
change(lambda t, r: some_layer(t, r).seen.clear())
change(lambda t, r: setattr(some_layer(t, r), "last", None))
change(lambda t, r: setattr(some_layer(t, r), "count", torch.ones(4)))
change(lambda t, r: some_layer(t, r).count.zero_())
change(lambda t, r: t.model.layers.append(copy.deepcopy(some_layer(t, r))) if len(t.model.layers) < 5 else None)

# Parameters: values, attributes, gradients, ties, dtypes of what they hold.
change(lambda t, r: some_parameter(t, r).requires_grad_(r.random() < 0.5))
change(lambda t, r: some_parameter(t, r).data.mul_(0.5))
change(lambda t, r: [p.register_hook(halved) for p in [some_parameter(t, r)] if p.requires_grad])
change(lambda t, r: [setattr(p, "data", p.data.clone()) for p in [some_parameter(t, r)]])
change(lambda t, r: [setattr(p, "grad", torch.ones_like(p)) for p in [some_parameter(t, r)]])
change(lambda t, r: setattr(some_layer(t, r).gate.weight, "scale", r.choice([0.5, 2.0])))
change(lambda t, r: vars(some_layer(t, r).gate.weight).pop("scale", None))
change(lambda t, r: setattr(some_layer(t, r).gate, "weight", nn.Parameter(torch.randn(4, 8))))
change(lambda t, r: setattr(some_layer(t, r).gate, "bias", nn.Parameter(torch.randn(4))))
change(lambda t, r: setattr(some_layer(t, r).gate, "weight", some_layer(t, r).gate.weight))
change(lambda t, r: t.model.load_state_dict({k: v + 0.01 for k, v in t.model.state_dict().items()}))
change(lambda t, r: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict())))
change(lambda t, r: t.optimizer.state.clear())
change(lambda t, r: t.optimizer.state.pop(some_parameter(t, r), None))
change(lambda t, r: setattr(t, "optimizer", torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)))
change(lambda t, r: setattr(t, "optimizer", torch.optim.AdamW(t.model.parameters(), lr=1e-2, amsgrad=True)))
change(lambda t, r: t.optimizer.zero_grad(set_to_none=r.random() < 0.5))
change(lambda t, r: t.optimizer.register_step_post_hook(lambda o, args, kwargs: t.history.append("stepped")))
change(lambda t, r: torch.set_grad_enabled(r.random() < 0.5))


def state_of(t: Trainer) -> list[torch.Tensor]:
    states = [value for state in t.optimizer.state.values() for value in state.values()]
    return [*t.model.parameters(), *t.model.buffers(), *(v for v in states if isinstance(v, torch.Tensor))]


def remembered() -> tuple:
    of_classes = list(Trainer.losses), Config.top_k, Expert.slope, vars(OtherExpert).get("forward")
    return (SCALE, copy.deepcopy(TABLE), *of_classes)


def put_back(kept: tuple) -> None:
    scale, table, losses, Config.top_k, Expert.slope, forward = kept
    globals().update(SCALE=scale)
    TABLE.clear()
    TABLE.update(table)
    Trainer.losses[:] = losses
    if forward is None and "forward" in vars(OtherExpert):
        del OtherExpert.forward
    balance.__defaults__, balance.__kwdefaults__ = (2,), {"weight": 1.0}
    os.environ.pop("MOEBIUS_TEST_NOTE", None)
    torch.set_grad_enabled(True)


def live(seed: int, captures: str, length: int = LONG) -> tuple[list[Any], Trainer]:
    """Everything that one trainer's history shows, a call at a time."""
    kept, shown, r = remembered(), [], random.Random(seed)
    t = Trainer(captures)
    try:
        for _ in range(length):
            for _ in range(r.choice([0, 0, 1, 1, 2])):
                number = r.randrange(len(CHANGES))
                try:
                    CHANGES[number](t, r)
                    shown.append(f"change of line {CHANGES[number].__code__.co_firstlineno}")
                except Exception as error:  # what another change made impossible
                    shown.append(f"change of line {CHANGES[number].__code__.co_firstlineno}: {type(error).__name__}")
            torch.manual_seed(r.randrange(100))
            x_TD = torch.randn(r.choice([6, 6, 6, 9]), 8)
            try:
                loss: Any = t.step(x_TD, torch.arange(len(x_TD)) % 5)
            except Exception as error:
                loss = f"{type(error).__name__}: {error}"
            shown.append([loss, *(p.detach().clone() for p in state_of(t)), copy.deepcopy(t.history)])
    finally:
        put_back(kept)
    return shown, t


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def difference(seed: int, captures: str) -> tuple[str, int]:
    """The first call that differs, with the changes before it, or ""; and how many calls hit."""
    reset()
    plain, _ = live(seed, "")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, t = live(seed, captures)
    failed = [str(w.message) for w in caught if "could not capture" in str(w.message)]
    hits = stats({"step": t.step, "model": t.forward, "loss": t.loss}[captures]).hits
    if failed:
        return failed[0], hits
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        if not same(a, b):
            changes = [line for line in plain[:number] if isinstance(line, str)]
            return f"item {number}: {a[0]} plain, {b[0]} captured, after {changes}", hits
    return "", hits


@pytest.mark.share(3)
@pytest.mark.parametrize("first", [0, FRESH], ids=["fixed", "fresh"])
@pytest.mark.parametrize("captures", ["step", "model", "loss"])
def test_a_history_of_outside_changes(captures: str, first: int) -> None:
    for seed in range(first, first + (NEW if first else FIXED)):
        found, _ = difference(seed, captures)
        assert not found, f"seed {seed}: {found}"


def test_a_guard_that_is_forgotten_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from moebius.guards import program

    original = program.GuardProgram

    def build(n_positional: int, kwnames: tuple, slots: list, checks: list) -> Any:
        return original(n_positional, kwnames, slots, [("answers", ()) if c[0] == "dict" else c for c in checks])

    monkeypatch.setattr(program, "GuardProgram", build)
    assert any(difference(seed, "step")[0] for seed in range(4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1])
    for seed in range(FRESH, FRESH + count):
        for captures in ("step", "model", "loss"):
            found, hits = difference(seed, captures)
            print(seed, captures, hits, found or "same", flush=True)
