"""Loops of very many iterations with graph breaks in them: no call goes deeper with the iterations, and not each is
captured."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import warnings
import weakref

import pytest
import torch

from moebius import capture, disable, stats

TURNS = 10_000
DEEP = sys.getrecursionlimit() // 2


@disable
def native(x):
    return x


@disable
def deep(n):
    def inner(n):
        return n and inner(n - 1)

    return inner(n)


def numbers(n):
    yield from range(n)


def over_a_range(x):
    for i in range(TURNS):
        x = native(x) + i
    return x


def over_a_generator(x):
    for i in numbers(TURNS):
        if i % 1000 == 999:
            deep(DEEP)  # there is room left
        x = native(x) + i
    return x


def while_something_holds(x):
    while x.sum().item() < 2 * TURNS:
        x = native(x) + 1
        x = native(x)
    return x


def in_blocks(x):
    left = []
    for i, j in zip(range(TURNS), numbers(TURNS), strict=True):
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(left.append, i)
                x = native(x) + 1
                if i % 7 == 0:
                    raise ValueError(j)
        except ValueError as error:
            x = x + error.args[0] * 0.001
        finally:
            x = native(x) * 1
    return x, len(left), left[-3:]


def with_a_cell(x):
    seen = 0

    def count():
        nonlocal seen
        seen += 1

    for _ in numbers(TURNS):
        count()
        x = native(x) + seen
    return x, seen


def that_raises(x):
    try:
        for i in numbers(TURNS):
            x = native(x) + 1
            if i == TURNS - 5:
                [][i]
    except IndexError as error:
        return x, str(error)


LOOPS = [over_a_range, over_a_generator, while_something_holds, in_blocks, with_a_cell, that_raises]


@pytest.mark.share(2)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_ten_thousand_iterations(loop):
    captured = capture(loop, backend="eager")
    want = str(loop(torch.zeros(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert str(captured(torch.zeros(2))) == want
    assert 0 < stats(captured).graphs < 300


def test_few_iterations_are_captured_each_with_what_is_known_of_it():
    layers = [torch.nn.Linear(2, 2) for _ in range(5)]

    def step(x):
        for layer in layers:
            x = native(layer(x))
        return x

    captured = capture(step)
    for _ in range(3):
        torch.testing.assert_close(captured(torch.ones(1, 2)), step(torch.ones(1, 2)))
    assert stats(captured).graphs == 5 and not stats(captured).recompiles


def test_an_error_far_on_has_the_users_lines_and_a_short_traceback():
    def step(x):
        for i in range(TURNS):
            x = native(x)[: 3 - i // 9000]
            x.view(3)
        return x

    captured = capture(step, backend="eager")
    for function in (step, captured):
        with pytest.raises(RuntimeError, match="shape '\\[3\\]' is invalid") as found:
            function(torch.zeros(3))
        entries = traceback.extract_tb(found.tb)
        assert entries[-1].line == "x.view(3)" and len(entries) < 8


def test_what_was_captured_of_a_long_loop_goes_with_the_function():
    class Marker:
        pass

    marker = Marker()

    def step(x, marker=marker):
        for i in range(300):
            x = native(x) + i
        return x, marker

    captured = capture(step, backend="eager")
    captured(torch.zeros(2))
    alive = weakref.ref(marker)
    del captured, step, marker
    gc.collect()
    assert alive() is None


def test_shadow_mode_runs_the_call_to_its_end():
    def step(x):
        for i in range(100):
            x = native(x) + i
        return x

    captured = capture(step, verify=1)
    for _ in range(2):
        assert torch.equal(captured(torch.zeros(2)), step(torch.zeros(2)))
    assert stats(captured).verified == 2 and not stats(captured).differences


def test_iterations_for_which_the_guards_of_one_before_hold_are_captured_once():
    def epoch(x, batches, log):
        total, meter = 0.0, {"sum": 0.0, "count": 0}
        for i, batch in enumerate(numbers(batches)):
            x = native(x) + batch * 0.5
            loss = x.sum().item()
            total += loss
            meter["sum"] += loss * len(x)
            meter["count"] += len(x)
            if i % 5 == 0:
                log.append((i, meter["sum"] / meter["count"]))
        return x, total

    captured = capture(epoch, backend="eager")
    graphs = []
    for start in range(4):
        logs = [], []
        x = torch.full((2,), start / 3)
        assert str(captured(x, 40 + start, logs[0])) == str(epoch(x, 40 + start, logs[1])) and logs[0] == logs[1]
        graphs.append(stats(captured).graphs)
    assert graphs[0] <= 16 and graphs[2] == graphs[3]


def test_what_an_earlier_iterations_guards_do_not_cover_is_captured_by_itself():
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]

    def step(x):
        for i in numbers(9):
            layer = layers[i % 3]
            x = native(layer(x)) + (i == 4)
        return x

    captured = capture(step, backend="eager")
    for _ in range(3):
        assert torch.equal(captured(torch.ones(1, 2)), step(torch.ones(1, 2)))
