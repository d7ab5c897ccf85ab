"""What a first call does once, or not at all: traces and continuations are counted."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from moebius import capture, stats
from moebius.codegen import continuation_code
from moebius.lowering.step import checkpoint
from moebius.python.domain import TrackingDomain
from moebius.trace import trace


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """How often a trace ran, and how often a continuation was assembled."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(trace.Trace, "run")
    count(continuation_code, "build_continuation")
    return found


class Tried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, rows):
        try:
            return self.linear(x[rows])
        except RuntimeError:
            return None


def test_operators_that_may_fail_in_a_try_block_below(counted):
    model, x = Tried(), torch.randn(5, 4)
    step = capture(lambda x, rows: model(x, rows), backend="eager")
    assert torch.equal(step(x, torch.tensor([1, 2])), model(x, torch.tensor([1, 2])))
    assert counted["run"] == 1


@pytest.mark.parametrize("branches", [1, 4, 16])
def test_side_exits_are_assembled_as_they_are_taken(counted, branches):
    def inner(x, log):
        if x.sum() > 0:
            log.append(len(log))
            x = x + 1
        return x

    def plain(x, log):
        for _ in range(branches):
            x = inner(x, log)
        return x

    step = capture(plain, backend="eager")
    for x, assembled in ((torch.ones(4), False), (-torch.ones(4), True)):
        logs: tuple[list, list] = [], []
        assert torch.equal(step(x, logs[0]), plain(x, logs[1])) and logs[0] == logs[1]
        assert bool(counted["build_continuation"]) is assembled
    assert stats(step).hits == 1 and counted["build_continuation"] <= 2 * 2


@functools.lru_cache
def chosen(name):
    return {"twice": 2.0, "as it is": 1.0}[name]


SCALES = {"a": 1.0}


@functools.lru_cache
def scale_of(name):
    return SCALES[name]


class Chooses(nn.Module):
    """Asks functions with a cache; the state that it keeps is made in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * chosen("twice") * scale_of("a")


def layers(n: int, write: bool) -> tuple[nn.ModuleList, Any]:
    modules = nn.ModuleList(Chooses() for _ in range(n))

    def plain(x):
        seen = []
        for module in modules:
            if write:
                module.seen = len(seen)
            x = module(x) + x
            seen.append(x)
        return x, seen

    return modules, plain


@pytest.fixture
def interpreted(monkeypatch) -> Counter[str]:
    """How many instructions of each function were interpreted."""
    seen: Counter[str] = Counter()
    inner = TrackingDomain.observe

    def observe(self: Any, frame: Any) -> None:
        seen[frame.code.co_qualname] += 1
        inner(self, frame)

    monkeypatch.setattr(TrackingDomain, "observe", observe)
    return seen


@pytest.mark.parametrize("write", [False, True])
def test_layers_that_ask_cached_functions_are_interpreted_once(interpreted, write):
    found = []
    for n in (3, 12):
        _, plain = layers(n, write)
        x = torch.randn(2, 4)
        interpreted.clear()
        result = capture(plain, backend="eager")(x)
        assert torch.equal(result[0], plain(x)[0])
        found.append(interpreted["Chooses.forward"])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)])
def test_lists_of_gradients_are_asked_as_a_whole(interpreted, dtypes):
    """Where all are of one dtype; a norm over several is taken group by group."""
    found = []
    for n in (4, 16):
        weights = [nn.Parameter(torch.randn(3, dtype=dtypes[i % len(dtypes)])) for i in range(n)]

        def plain(weights, x):
            for weight in weights:
                weight.grad = weight.detach() * x
            return nn.utils.clip_grad_norm_(weights, 0.1), [weight.grad for weight in weights]

        interpreted.clear()
        expected, (norm, gradients) = plain(weights, 2.0), capture(plain, backend="eager")(weights, 2.0)
        assert torch.equal(norm, expected[0]) and all(map(torch.equal, gradients, expected[1]))
        found.append(sum(n for name, n in interpreted.items() if "group_tensors" in name or "foreach" in name))
    assert (found[0] == found[1]) is (len(dtypes) == 1)


def test_what_a_cached_function_looks_at_changes_between_layers():
    def plain(modules, x):
        scale_of.cache_clear()
        x = modules[0](x)
        SCALES["a"] += 1.0
        scale_of.cache_clear()
        return modules[1](x)

    modules, _ = layers(2, False)
    x = torch.randn(2, 4)
    expected, SCALES["a"] = plain(modules, x), 1.0
    try:
        assert torch.equal(capture(plain, backend="eager")(modules, x), expected) and SCALES["a"] == 2.0
    finally:
        SCALES["a"] = 1.0
        scale_of.cache_clear()


class Routed(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, n), nn.ModuleList(nn.Linear(8, 8) for _ in range(n))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == i)
            made = torch.utils.checkpoint.checkpoint(expert, x[rows], use_reentrant=False)
            y = y.index_add(0, rows, made * weights[rows, slots, None])
        return x + y


def test_where_checkpoints_begin_is_found_once_for_all_that_moves(monkeypatch):
    found, inner = [0], checkpoint.marked
    monkeypatch.setattr(checkpoint, "marked", lambda *args: (found.append(found.pop() + 1), inner(*args))[1])
    counts = []
    for n in (4, 16):
        model, x = Routed(n).double(), torch.randn(6, 8, dtype=torch.float64)
        step, found[0] = capture(lambda x, model=model: model(x).square().mean()), 0
        assert torch.allclose(step(x), model(x).square().mean())
        assert stats(step).graphs == 1
        counts.append(found[0])
    assert counts[0] == counts[1] > 0, counts
