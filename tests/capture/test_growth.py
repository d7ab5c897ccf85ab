"""The cost of capture grows with the program, not with its square.

Each program is captured at three lengths, n, 4n and 16n, and the lines of ours that run meanwhile are counted, function
by function. What is linear runs, between the second and the third, four times as many lines more as between the first
and the second; what walks the whole program for each question, sixteen times as many.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moebius
from moebius import capture, stats
from moebius.cache import captured
from moebius.lowering import aliasing
from moebius.lowering.experts import idle
from moebius.lowering.memo import Memo
from moebius.lowering.torch_private import returns_new

OURS = tuple(os.path.dirname(os.path.abspath(m.__file__)) for m in (moebius, moebius.interpreter, moebius.lowering))
BASE = 4
MOST = 6.0  # times: four for what is linear, five for what also sorts
FEW = 400  # lines: what runs fewer at the greatest length is not looked at


def lines_of(run: Callable[[], Any]) -> Counter[str]:
    """How many lines of each function of ours ``run`` runs."""
    found: Counter[str] = Counter()
    names: dict[Any, str | None] = {}

    def name_of(code: Any) -> str | None:
        inside = code.co_filename.startswith(OURS)
        return f"{code.co_filename.rsplit('/', 1)[-1]} {code.co_qualname}" if inside else None

    def tracer(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in names:
            names[code] = name_of(code)
        name = names[code]
        if name is None:
            return None
        found[name] += 1

        def local(frame: Any, event: str, _: Any) -> Any:
            if event == "line":
                found[name] += 1
            return local

        return local

    inner = captured.Captured.capture

    def capturing(*args: Any, **kwargs: Any) -> Any:  # (under a trace function a captured callable runs as Python)
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            return inner(*args, **kwargs)
        finally:
            sys.settrace(before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured.Captured, "capture", capturing)
        run()
    return found


def asks_for_strides(n: int) -> Any:
    def step(x, w):
        for _ in range(n):
            x = torch.relu(x @ w + x)
            if not x.transpose(0, 1).is_contiguous():
                x = (x + 1).contiguous()
            x = x.view(-1).view(x.shape)
        return x

    return step, (torch.randn(4, 4), torch.randn(4, 4))


def keeps_what_it_made(n: int) -> Any:
    def step(x):
        kept = x[:, :1]
        for _ in range(n):
            kept = torch.cat([kept, x[:, :1]], 1).contiguous()
            x = x + kept.sum()
        return x, kept

    return step, (torch.randn(4, 4),)


def writes_in_place(n: int) -> Any:
    def step(x, w):
        y = torch.zeros(4, 4)
        for i in range(n):
            y.add_(x @ w)
            y[0] = i
            y.view(-1).mul_(0.5)
        return y

    return step, (torch.randn(4, 4), torch.randn(4, 4))


def branches_on_data(n: int) -> Any:
    def step(x):
        for _ in range(n):
            if x.sum() > 0:
                x = x * 2
            x = x + 1
        return x

    return step, (torch.randn(4, 4),)


def branches_with_gradients(n: int) -> Any:
    w = nn.Parameter(torch.randn(4, 4))

    def step(x):
        for _ in range(n):
            x = x @ w
            if x.sum() > 0:
                x = x * 2
            if x.requires_grad:
                x = x + 1
        return x

    return step, (torch.randn(4, 4),)


class Counting(nn.Module):
    def __init__(self, i: int):
        super().__init__()
        self.linear, self.i, self.calls, self.seen = nn.Linear(4, 4), i, 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.i)
        return self.linear(x) * self.i


def layers_that_count(n: int) -> Any:
    model = nn.Sequential(*[Counting(i) for i in range(n)])
    return (lambda x: model(x).sum()), (torch.randn(4, 4),)


def counters_in_an_argument(n: int) -> Any:
    class State:
        pass

    states = [State() for _ in range(n)]
    for state in states:
        state.n, state.log = 0, []

    def step(x, states):
        for state in states:
            state.n += 1
            state.log.append(state.n)
            x = x + state.n
        return x

    return step, (torch.randn(4, 4), states)


def trains(n: int) -> Any:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(4, 4),)


def accumulates(n: int) -> Any:
    w = nn.Parameter(torch.randn(4, 4))

    def step(x):
        for _ in range(n):
            (x @ w).sum().backward()
            w.grad.mul_(0.5)
        return w.grad.clone()

    return step, (torch.randn(4, 4),)


def reads_and_writes_texts(n: int) -> Any:
    def step(x):
        total, lines = 0.0, []
        for i in range(n):
            x = x * 0.5
            total += x.sum().item()
            lines.append(f"{i}: {total:.3f}")
        return total, lines

    return step, (torch.randn(4, 4),)


def reads_constants(n: int) -> Any:
    def step(x):
        total = 0
        for i in range(n):
            t = torch.full((2,), i).cumsum(0)
            total += int(t.sum()) + sum(torch.tensor([i, 1]).tolist())
            x = x * (2 if x.size(0) and t.sum() > 1 else 3)
        return x, total

    return step, (torch.randn(4, 4),)


def asks_caches(n: int) -> Any:
    import functools

    @functools.lru_cache
    def scale(i):
        return i * 0.5

    class State:
        total = 0

    states = [State() for _ in range(n)]

    def step(x, states):
        for i, _ in enumerate(states):
            x = x * scale(i)
        return x

    return step, (torch.randn(4, 4), states)


def asks_caches_after_writes(n: int) -> Any:
    import functools

    class State:
        scale, total = 0.5, 0

    state = State()
    state.seen = [0] * n

    @functools.lru_cache
    def scale(i):
        return i * state.scale

    def step(x):
        for i in range(n):
            state.total += 1
            state.seen[i] = i
            x = x * scale(i) * scale(3)
        return x

    return step, (torch.randn(4, 4),)


def experts_in_layers(n: int) -> Any:
    layers = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(n))

    def step(x):
        for experts in layers:
            chosen = (x.sum(1) > 0).long()
            out = torch.zeros_like(x)
            for e, expert in enumerate(experts):
                rows = torch.where(chosen == e)[0]
                out.index_add_(0, rows, expert(x[rows]))
            x = out.contiguous()
        return x

    return step, (torch.randn(8, 4),)


def checkpoints(n: int) -> Any:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(n))

    def step(x):
        for layer in layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.sum()

    return step, (torch.randn(4, 4, requires_grad=True),)


def random_and_modes(n: int) -> Any:
    def step(x):
        for _ in range(n):
            with torch.no_grad():
                x = F.dropout(x, 0.5)
            with torch.autocast("cpu"):
                x = (x @ x).float()
        return x

    return step, (torch.randn(4, 4),)


class Unlike(nn.Module):
    """A layer with a loop over experts; no two of them are equal, and each adds to a long sum."""

    def __init__(self, i: int):
        super().__init__()
        self.scale, self.router = 1.0 + 0.25 * i, nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8) * 0.3), nn.Parameter(torch.randn(4, 8, 6) * 0.3)

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.router(x), -1), 2)
        out, mask = torch.zeros_like(x), F.one_hot(chosen, 4).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert[0]])
            y = F.linear(F.relu(F.linear(x[token], self.up[expert[0]])), self.down[expert[0]])
            out.index_add_(0, token, y * weights[token, slot, None])
        return x + out * self.scale


def trains_unlike_layers(n: int) -> Any:
    model = nn.Sequential(*[Unlike(i) for i in range(n)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(8, 8),)


class Grouped(nn.Module):
    """A layer of experts as grouped products, as transformers' models have them by default; no two are equal."""

    def __init__(self, i: int):
        super().__init__()
        self.scale, self.router = 1.0 + 0.25 * i, nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 8) * 0.3), nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.router(x), -1), 2)
        order = chosen.flatten().argsort()
        ends = torch.histc(chosen.flatten().float(), 4, 0, 3).cumsum(0).to(torch.int32)
        h = F.relu(F.grouped_mm(x[order // 2], self.up.mT, offs=ends))
        y = F.grouped_mm(h, self.down.mT, offs=ends) * weights.flatten()[order, None]
        return x + torch.zeros_like(x).index_add_(0, order // 2, y) * self.scale


def trains_grouped_layers(n: int) -> Any:
    model = nn.Sequential(*[Grouped(i) for i in range(n)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(8, 8),)


def trains_over_lists(n: int) -> Any:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step, (torch.randn(4, 4),)


PROGRAMS = (
    asks_for_strides, keeps_what_it_made, writes_in_place, branches_on_data, branches_with_gradients, layers_that_count,
    counters_in_an_argument, trains, accumulates, reads_and_writes_texts, reads_constants,
    asks_caches,
    asks_caches_after_writes, experts_in_layers, checkpoints, random_and_modes,
)  # fmt: skip


def growth(
    program: Callable[[int], Any], base: int = BASE, backend: str = "eager"
) -> dict[str, tuple[int, float]]:
    """Of each function of ours, how many lines of it ran at the greatest length, and how these grew."""
    counts = []
    for length in (base, base, 4 * base, 16 * base):  # (what is found once of a function's code is in the first)
        torch.manual_seed(0)
        step, args = program(length)
        whole = capture(step, backend=backend)
        counts.append(lines_of(lambda whole=whole, args=args: whole(*args)))
        assert stats(whole).graphs == 1 and not stats(whole).breaks
    _, short, middle, long = counts
    names = {name for name, lines in long.items() if lines >= FEW}
    return {n: (long[n], (long[n] - middle[n]) / max(middle[n] - short[n], FEW // 4)) for n in names}


@pytest.mark.share(1)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_lines_grow_with_the_program(program):
    found = growth(program)
    assert sum(lines for lines, _ in found.values()) > 10_000
    walking = {name: seen for name, seen in found.items() if seen[1] > MOST}
    assert not walking, walking


@pytest.mark.share(1)
@pytest.mark.parametrize("kept", [True, False])
def test_what_lowering_costs_grows_with_the_program(kept, monkeypatch):
    """kept: where it isn't, what is zero is asked anew of all that a long sum adds, for each addition."""
    if not kept:
        monkeypatch.setattr(idle, "MEMO", Memo())
    found = growth(trains_unlike_layers, 2 if kept else BASE, "moebius")
    walking = {name: seen for name, seen in found.items() if seen[1] > MOST}
    assert bool(walking) != kept, walking


# One comparison a node, for each layer: what changed since it was asked last (a fifteenth of the lines at 48 layers).
COMPARES = "aliasing.py Storage.catch_up"


@pytest.mark.share(1)
@pytest.mark.parametrize("kept", [True, False])
def test_what_grouped_layers_cost_grows_with_the_program(kept, monkeypatch):
    """kept: where it isn't, each layer walks the graph to know who writes where."""
    if not kept:
        monkeypatch.setattr(aliasing.Storage, "catch_up", aliasing.Storage.walk)
    found = growth(trains_grouped_layers, 3, "moebius")
    few = sum(lines for lines, _ in found.values()) / 1000
    walking = {n: seen for n, seen in found.items() if seen[1] > MOST and seen[0] > few and n != COMPARES}
    assert bool(walking) != kept, walking


@pytest.mark.parametrize("known", [True, False])
def test_what_operators_on_lists_cost_grows_with_the_program(known, monkeypatch):
    """known: where it isn't, each tensor that such an operator makes may share memory with all that it was given."""
    if not known:
        monkeypatch.setattr(aliasing, "returns_new", lambda name: "_foreach_" not in name and returns_new(name))
    found = growth(trains_over_lists, BASE, "moebius")
    walking = {name: seen for name, seen in found.items() if seen[1] > MOST}
    assert bool(walking) != known, walking


def test_a_product_of_itself_is_asked_about_once():
    """Each factor is the same one: what is asked of both, at each step, is asked 2**60 times."""

    def step(x):
        for _ in range(60):
            x = x * x
        return x + x

    x = torch.full((3,), 1.0)
    torch.testing.assert_close(capture(step)(x), step(x))
