"""What a thread keeps for itself (``threading.local``): read and written in the graph, for the thread of each call."""

from __future__ import annotations

import threading

import torch

from moebius import capture, stats

LOCAL = threading.local()


def scaled(x):
    return x * getattr(LOCAL, "scale", 2.0) * len(getattr(LOCAL, "parts", [1]))


def test_each_thread_has_its_own():
    step = capture(scaled, backend="eager")

    def both(**values):
        vars(LOCAL).update(values)
        assert step(torch.ones(2)).equal(scaled(torch.ones(2)))
        assert step(torch.ones(2)).equal(scaled(torch.ones(2)))

    both()
    both(scale=3.0)
    both(scale=4.0, parts=[1, 2])
    LOCAL.parts.append(3)
    both()
    del LOCAL.scale
    both()
    found = []
    other = threading.Thread(target=lambda: found.append((step(torch.ones(2)).tolist(), stats(step).breaks)))
    other.start()
    other.join()
    assert found == [([2.0, 2.0], 0)] and stats(step).graphs == 5
    misses = stats(step).misses
    both()
    assert stats(step).misses == misses


def test_what_the_step_sets():
    def step(x):
        before = getattr(LOCAL, "scale", 0.0)
        LOCAL.scale = 5.0
        return x * LOCAL.scale, before, vars(LOCAL)

    captured = capture(step, backend="eager")
    for before in (0.0, 1.0, 1.0):
        if before:
            LOCAL.scale = before
        y, seen, namespace = captured(torch.ones(2))
        assert y.tolist() == [5.0, 5.0] and LOCAL.scale == 5.0 and seen == before and namespace is vars(LOCAL)
    found = []
    other = threading.Thread(target=lambda: found.append((captured(torch.ones(2))[1], LOCAL.scale)))
    other.start()
    other.join()
    assert found == [(0.0, 5.0)] and stats(captured).breaks == 0
    del LOCAL.scale


def test_what_the_step_sets_through_its_dict():
    def step(x):
        vars(LOCAL)["scale"] = 5.0
        y = x * LOCAL.scale
        LOCAL.__dict__["scale"] = 6.0
        return y * getattr(LOCAL, "scale", 1.0)

    captured = capture(step, backend="eager")
    for _ in range(2):
        LOCAL.scale = 1.0
        assert captured(torch.ones(2)).tolist() == [30.0, 30.0] and LOCAL.scale == 6.0
    del LOCAL.scale


def test_one_that_the_step_makes():
    def step(x):
        local = threading.local()
        local.scale = x + 1
        return local.scale * 2

    assert capture(step, backend="eager")(torch.ones(2)).tolist() == [4.0, 4.0]


def test_the_default_device_is_no_graph_break():
    step = capture(lambda x: x.to(torch.get_default_device()) + 1, backend="eager")
    assert step(torch.ones(2)).tolist() == [2.0, 2.0] and stats(step).breaks == 0
