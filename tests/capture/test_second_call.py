"""What the second call learns: a break that was met only once, and sizes that show in several tensors."""

from __future__ import annotations

import gc
import re
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from moebius import capture, stats
from moebius.api import captured_of
from moebius.cache import continuations
from moebius.hook import finish
from moebius.trace import segment as segment_module

LOCK = threading.Lock()


class Lazy(nn.Module):
    """Installs a hook in its first call, under a lock, as libraries do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []
        self.installed = False

    def forward(self, x):
        if not self.installed:
            with LOCK:
                self.linear.register_forward_hook(lambda module, args, output: output * 2)
                self.installed = True
        return self.linear(x) + 1


def test_what_breaks_only_in_the_first_call_is_one_graph_from_the_second():
    torch.manual_seed(0)
    model, plain = Lazy(), Lazy()
    plain.load_state_dict(model.state_dict())

    @capture
    def step(x):
        return model(x).relu()

    for _ in range(4):
        x = torch.randn(3, 4)
        assert torch.equal(step(x), plain(x).relu())
    seen = stats(step)
    assert (seen.graphs, seen.breaks) == (1, 0)
    assert [(r.guard, r.new) for r in seen.recompiles] == [("graph break", "none")]


def test_a_break_that_stays_is_captured_once():
    @capture
    def step(x):
        y = x * 2
        with LOCK:
            y = y + 1
        return y * 3

    for _ in range(5):
        assert step(torch.ones(2)).tolist() == [9.0, 9.0]
    assert stats(step).breaks and not stats(step).recompiles
    first = stats(step).entries
    step(torch.ones(2))
    assert stats(step).entries == first


def test_a_break_that_comes_and_goes_is_looked_at_a_few_times_only():
    often = {"traced": 0}

    @capture
    def step(x, flag):
        if flag["on"]:
            with LOCK:
                x = x + 1
        return x * 2

    flag = {"on": True}
    for i in range(30):
        flag["on"] = i % 3 != 2
        assert step(torch.ones(1), flag).item() == (4.0 if flag["on"] else 2.0)
        often["traced"] = stats(step).misses
    assert often["traced"] <= 8


def test_one_size_in_several_tensors_is_one_recompile():
    @capture
    def step(ids, labels, mask):
        return ((ids - labels) * mask).sum()

    for n in (5, 7, 9, 6, 11):
        ids, labels, mask = (torch.randn(2, n) for _ in range(3))
        torch.testing.assert_close(step(ids, labels, mask), ((ids - labels) * mask).sum())
    assert stats(step).graphs == 2
    assert len(stats(step).recompiles) == 1


def test_an_optimizer_captured_alone_does_not_recompile_for_its_own_state():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    optimizers[0].step = update = capture(optimizers[0].step)
    for _ in range(4):
        x = torch.randn(3, 4)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(models[0].weight, models[1].weight)
    seen = stats(update)
    assert (seen.graphs, seen.breaks, seen.recompiles) == (1, 0, [])


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"nesterov": True, "weight_decay": 0.1}])
def test_the_first_momentum_is_the_gradient_with_its_zeros(options):
    def step(p, optimizer, zeros):
        (p * zeros).sum().backward()
        optimizer.step()

    found = []
    for run in (step, capture(step, backend="eager", fullgraph=True)):
        p = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, **options)
        run(p, optimizer, torch.tensor([0.0, -0.0, 1.0, -0.0]))
        found.append(torch.signbit(optimizer.state[p]["momentum_buffer"]).tolist())
    assert found[0] == found[1] == [False, True, False, True] or options.get("weight_decay") and found[0] == found[1]


def step_with_a_generator_that_is_left(x, closed):
    def numbers():
        try:
            yield 2
            yield 3
        finally:
            closed.append(True)

    return x * next(numbers())


def looks(step):
    """The seconds of capture after each of five calls."""
    captured, seconds, closed = capture(step), [], []
    for number in range(5):
        assert captured(torch.full((2,), float(number)), closed).tolist() == [2.0 * number] * 2
        assert len(closed) == number + 1
        seconds.append(stats(captured).cold_seconds)
    return captured, seconds


def test_what_cannot_be_rebuilt_is_looked_at_once():
    """A frame that no residual code stands for runs natively from then on: it is not captured again and again."""
    captured, seconds = looks(step_with_a_generator_that_is_left)
    (segment,) = captured_of(captured).segments
    assert segment.graph_break.reason == "result cannot be rebuilt"
    assert seconds[1:] == [seconds[1]] * 4 and not stats(captured).recompiles


def test_without_the_comparison_it_is_captured_again(monkeypatch):
    run_natively = segment_module.run_whole_natively

    def without(*args):
        return replace(run_natively(*args), instructions=-1)

    monkeypatch.setattr(segment_module, "run_whole_natively", without)
    captured, seconds = looks(step_with_a_generator_that_is_left)
    assert seconds[4] > seconds[1] and stats(captured).recompiles


def test_what_was_met_below_a_native_call_is_counted_after_its_caller_is_captured_again():
    """The caller's break is gone in its second call; the function is captured once, hit from then on, and counted."""
    model, found = Lazy(), []

    def doubled(x):
        return x * 2 + 1

    def met(match):
        found.append(doubled(torch.ones(3)))
        return "b"

    @capture
    def step(x):
        y = model(x)
        re.sub("a", met, "aa")
        return y + 1

    counted = []
    for _ in range(4):
        step(torch.ones(3, 4))
        gc.collect()
        counted.append(stats(step))
    assert len(found) == 8 and all(torch.equal(one, torch.full((3,), 3.0)) for one in found)
    assert [r.guard for r in counted[-1].recompiles] == ["graph break"]
    alive = [one for one in captured_of(step).family() if one.function.__name__ == "met"]
    assert [(len(one.segments), one.entry.hits) for one in alive] == [(1, 7)]
    assert all(later.hits > before.hits for before, later in pairwise(counted))
    assert {s.function for s in captured_of(step).family()} >= {one.function for one in alive}


def test_what_follows_a_break_that_stays_is_counted_where_one_before_it_went():
    """The rest after it is captured anew: what was captured of it has gone with the break that led there."""
    model = Lazy()

    @capture(backend="eager")
    def step(x):
        y = model(x)
        with LOCK:
            y = y + 1
        return y.sin()

    step(torch.randn(3, 4))
    step(torch.randn(3, 4))
    seen = stats(step)
    assert seen.breaks == 2 and seen.graphs == 3 and all(one.segments for one in captured_of(step).family())
    for _ in range(3):
        gc.collect()
        step(torch.randn(3, 4))
    assert stats(step).misses == seen.misses


def test_a_rest_whose_other_one_died_is_captured():
    step, other = capture(lambda x: x.sin()), capture(lambda x: x.cos())
    step(torch.ones(2))
    mine = captured_of(step)
    go_on = continuations.elsewhere(mine, captured_of(other), mine.segments[0].guards.program)
    del other
    gc.collect()
    misses = stats(step).misses
    assert finish(go_on(torch.ones(2))).equal(torch.ones(2).sin()) and stats(step).misses == misses + 1
