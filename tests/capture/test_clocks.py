"""A step that takes the time: the clock is read in the graph, where the program reads it."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from moebius import capture, disable, explain, stats

TIMES: list[float] = []


@disable
def native(x):
    return x


@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time])
def test_each_reading_is_a_new_one_in_one_graph(clock):
    def step(x):
        begun = clock()
        y = (x @ x).relu()
        taken = clock() - begun
        TIMES.append(taken)
        return y, begun, taken, f"{taken * 0:.1f} s"

    captured = capture(step)
    before = clock()
    readings = []
    for _ in range(3):
        TIMES.clear()
        y, begun, taken, text = captured(torch.ones(3, 3))
        assert torch.equal(y, torch.full((3, 3), 3.0)) and TIMES == [taken] and text == "0.0 s"
        assert type(begun) is type(taken) is float and before <= begun <= begun + taken <= clock()
        readings.append(begun)
    assert readings == sorted(set(readings)) or clock in (time.process_time, time.thread_time)
    assert stats(captured).graphs == 1 and not stats(captured).breaks and not stats(captured).recompiles


def test_a_branch_on_the_time_and_a_reading_in_a_loop_over_experts():
    late = [False]

    def step(x):
        begun = time.perf_counter() - (100 if late[0] else 0)
        y = x * 2
        if time.perf_counter() - begun > 50:
            y = y + 100
        return native(y) + (time.perf_counter() > begun)

    captured = capture(step)
    for late[0] in (False, False, True, True, False):
        assert captured(torch.ones(2)).tolist() == step(torch.ones(2)).tolist()

    def experts(x):
        out, seen = torch.zeros_like(x), []
        for row in (x.sum(-1) > 0).nonzero():
            out[row[0]] += x[row[0]]
            seen.append(time.time())
        return out, len(seen)

    captured = capture(experts)
    for x in (torch.ones(3, 2), torch.eye(3, 2) - 0.5):
        found, want = captured(x), experts(x)
        assert torch.equal(found[0], want[0]) and found[1] == want[1]
    assert all(b.hint for b in explain(experts)(torch.ones(3, 2)).breaks)


def test_a_reading_that_only_the_handler_needs():
    def step(x, i):
        begun = time.monotonic()
        try:
            return x[i]
        except IndexError:
            return time.monotonic() - begun

    captured = capture(step, backend="eager")
    for index in (0, 9, 1, 9):
        got = captured(torch.ones(2), torch.tensor([index]))
        assert got.tolist() == [1.0] if index < 2 else 0 <= got < 60


@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic, time.process_time, time.thread_time])
def test_a_timer_around_a_block_is_in_the_graph(clock):
    """No handler waits for an error of a clock's: contextlib's own, around the timer's generator, does not."""
    spent = {"forward": 0.0, "backward": 0.0}

    @contextlib.contextmanager
    def timer(name):
        begun = clock()
        try:
            yield
        finally:
            spent[name] += clock() - begun

    def step(x):
        with timer("forward"):
            y = (x @ x).relu().sum()
        with timer("backward"):
            return y * 2

    captured = capture(step)
    for _ in range(4):
        assert captured(torch.ones(3, 3)).item() == 54.0
    assert min(spent.values()) >= 0.0 and stats(captured).hits == 2 and not stats(captured).breaks
