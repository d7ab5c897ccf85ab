"""Captured calls among others of their kind: in threads, in themselves, inside ``torch.compile`` and around it."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from moebius import capture, disable, explain, stats


@disable
def native(x):
    return x * 3


@pytest.fixture
def compiled():
    """Compiles with torch.compile, and counts the graphs that it asks for."""
    torch.compiler.reset()

    def compile_(function):
        graphs = []

        def backend(gm, inputs):
            graphs.append(gm)
            return gm.forward

        made = torch.compile(function, backend=backend)
        return made, graphs

    yield compile_
    torch.compiler.reset()


def in_threads(count, work):
    """``work(number)`` in that many threads, all of which begin together; what they gave, by number."""
    start, results, errors = threading.Barrier(count), {}, []

    def run(number):
        try:
            start.wait(60)
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(t.is_alive() for t in threads)
    return results


# ----------------------------------------------------------------------------------------------------------------------
# Threads
# ----------------------------------------------------------------------------------------------------------------------


def test_one_function_in_threads():
    """All of them find it cold, each with another size; there is a graph break in it, and one of them gets an error."""

    def plain(x, row):
        y = x * 2 + 1
        y = native(y)
        return y[row] + x.sum()

    captured = capture(plain)

    def work(number):
        x = torch.arange(2.0 * (number + 2)).reshape(number + 2, 2)
        found = []
        for row in (0, 99 if number == 2 else 1, 0):
            try:
                found.append(captured(x, torch.tensor(row)).tolist())
            except IndexError as error:
                found.append(str(error))
        return found

    def expected(number):
        x, found = torch.arange(2.0 * (number + 2)).reshape(number + 2, 2), []
        for row in (0, 99 if number == 2 else 1, 0):
            try:
                found.append(plain(x, torch.tensor(row)).tolist())
            except IndexError as error:
                found.append(str(error))
        return found

    assert in_threads(4, work) == {n: expected(n) for n in range(4)}


def test_warm_calls_while_another_thread_captures():
    model = nn.Linear(4, 4)
    warm = capture(model)
    x = torch.ones(2, 4)
    want = model(x)
    warm(x)
    before = stats(warm).misses

    def work(number):
        if number:
            return all(torch.equal(warm(x), want) for _ in range(200))
        for n in range(8):
            fresh = capture(lambda t, n=n: native(torch.tanh(t) * n) + n)
            assert torch.equal(fresh(x), native(torch.tanh(x) * n) + n)
        return True

    assert in_threads(3, work) == {0: True, 1: True, 2: True}
    assert stats(warm).misses == before


def test_grad_mode_is_each_threads_own():
    captured = capture(lambda x: (x * 2).sum())

    def work(number):
        with torch.set_grad_enabled(number % 2 == 0):
            return [captured(torch.ones(2, requires_grad=True)).requires_grad for _ in range(4)]

    assert in_threads(4, work) == {n: [n % 2 == 0] * 4 for n in range(4)}


# ----------------------------------------------------------------------------------------------------------------------
# Recursion
# ----------------------------------------------------------------------------------------------------------------------


def test_recursion_with_a_break_at_the_bottom():
    log = []

    def down(x, depth):
        log.append(depth)
        if depth == 0:
            return native(x)
        y = down(x + 1, depth - 1)
        log.append(-depth)
        return y * 2

    captured = capture(down)
    for _ in range(2):
        for depth in (0, 1, 4):
            log.clear()
            want, expected = down(torch.ones(2), depth), list(log)
            log.clear()
            assert torch.equal(captured(torch.ones(2), depth), want) and log == expected


def test_a_native_part_calls_the_captured_function_again():
    """From a function that runs natively, below the graph break of the same captured function."""
    seen = []

    @disable
    def outside(x, depth):
        seen.append(depth)
        return step(x, depth - 1) if depth else x

    @capture
    def step(x, depth):
        y = outside(x * 2, depth)
        return y + 1

    for _ in range(3):
        seen.clear()
        assert step(torch.ones(1), 3).item() == 20 and seen == [3, 2, 1, 0]


# ----------------------------------------------------------------------------------------------------------------------
# torch.compile
# ----------------------------------------------------------------------------------------------------------------------


def test_compiled_code_below_a_captured_function(compiled):
    model = nn.Linear(3, 3)
    inner, graphs = compiled(lambda x: model(x).relu() * 2)

    def step(x):
        y = x + 1
        y = inner(y)
        return (y * 3).sum()

    captured = capture(step)
    for _ in range(3):
        model.zero_grad()
        want = step(torch.ones(2, 3))
        want.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found = captured(torch.ones(2, 3))
        found.backward()
        assert torch.equal(found, want)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert len(graphs) == 1, "torch.compile's own code was compiled again"


def test_a_captured_function_below_compiled_code(compiled):
    inner = capture(lambda x: native(x * 2) + 1)
    outer, graphs = compiled(lambda x: inner(x + 1) * 2)
    for _ in range(3):
        assert outer(torch.ones(2)).tolist() == [26, 26]
    count = len(graphs)
    assert count and outer(torch.zeros(2)).tolist() == [14, 14]
    assert len(graphs) == count and stats(inner).hits >= 2


def test_each_hook_is_there_after_the_other_was_used(compiled):
    """Captures and compilations in turns, some with graph breaks: every later function is still taken by its tool."""
    for n in range(3):

        def body(x, n=n):
            y = torch.sin(x) * n
            y = native(y)
            return y + n

        def straight(x, n=n):
            return torch.cos(x) + n

        theirs, graphs = compiled(straight)
        broken, parts = compiled(body)
        ours = capture(body)
        x = torch.ones(2)
        for _ in range(2):
            assert torch.equal(ours(x), body(x))
            assert torch.equal(theirs(x), straight(x))
            assert torch.equal(broken(x), body(x))
        assert len(graphs) == 1 and len(parts) >= 1
        assert stats(ours).graphs == 2 and stats(ours).hits >= 2


def test_an_error_below_both(compiled):
    """It leaves neither hook behind."""

    def fails(x):
        raise KeyError("no")

    inner, _ = compiled(lambda x: fails(x * 2))
    captured = capture(lambda x: inner(x + 1))
    for _ in range(2):
        with pytest.raises(KeyError):
            captured(torch.ones(2))
    theirs, graphs = compiled(lambda x: x * 5)
    ours = capture(lambda x: x * 7)
    assert theirs(torch.ones(1)).item() == 5 and ours(torch.ones(1)).item() == 7
    assert len(graphs) == 1 and stats(ours).graphs == 1


# ----------------------------------------------------------------------------------------------------------------------
# Captured and plain code call each other
# ----------------------------------------------------------------------------------------------------------------------


def test_captured_and_plain_functions_in_iterations():
    """captured, plain, captured, plain: each with its own effects, one of them an error that two frames hand on."""
    log = []

    def innermost(x, bad):
        log.append("innermost")
        if bad:
            raise ValueError("bad")
        return x + 1

    inner = capture(lambda x, bad: innermost(x * 2, bad) * 3)

    @disable
    def plain(x, bad):
        log.append("plain")
        try:
            return inner(x, bad)
        finally:
            log.append("plain is left")

    def step(x, bad):
        log.append("step")
        try:
            y = plain(x + 1, bad)
        except ValueError as error:
            log.append(str(error))
            y = x
        return y * 2

    captured = capture(step)
    for bad in (False, True, False, True):
        log.clear()
        want, expected = step(torch.ones(2), bad), list(log)
        log.clear()
        assert torch.equal(captured(torch.ones(2), bad), want) and log == expected


# ----------------------------------------------------------------------------------------------------------------------
# Generators and coroutines as captured functions
# ----------------------------------------------------------------------------------------------------------------------


def helper(x):
    return torch.relu(x) * 2 + 1


def test_the_report_of_a_generator_function_says_what_ran():
    @capture
    def batches(x, n):
        for i in range(n):
            yield helper(x + i)

    for _ in range(2):
        assert [t.tolist() for t in batches(torch.ones(1), 3)] == [[3], [5], [7]]
    assert stats(batches).graphs >= 1 and stats(batches).hits >= 1

    def plain(x):
        yield helper(x)
        yield helper(x) * 2

    report = explain(plain)(torch.ones(2))
    assert [t.tolist() for t in report.result] == [[3, 3], [6, 6]]
    assert "generator" in str(report)


def test_a_coroutine_that_waits_between_graphs():
    order = []

    @capture
    async def step(x, name):
        y = helper(x)
        order.append(name)
        await asyncio.sleep(0)
        y = helper(y)
        order.append(name)
        return y

    async def both():
        return await asyncio.gather(step(torch.ones(1), "a"), step(torch.zeros(1), "b"))

    for _ in range(2):
        order.clear()
        first, second = asyncio.run(both())
        assert order == ["a", "b", "a", "b"]
        assert first.item() == helper(helper(torch.ones(1))).item()
        assert second.item() == helper(helper(torch.zeros(1))).item()


def test_a_generator_in_a_captured_step_and_one_of_its_callers():
    """A captured step advances a generator that plain code made, and the other way round."""

    def numbers(x):
        total = x
        while True:
            total = total + 1
            yield total * 2

    def step(it, x):
        return next(it) + x

    captured = capture(step)
    plain, ours = numbers(torch.ones(1)), numbers(torch.ones(1))
    for _ in range(4):
        assert captured(ours, torch.ones(1)).item() == step(plain, torch.ones(1)).item()


def helped(x):
    sys.intern("broken")  # a function in C that nobody listed
    return x + 1


def with_frames_below(x):
    sys.intern("broken")
    return list(map(helped, [x * 2]))[0]


def test_torch_compile_around_a_captured_call_leaves_our_frames_alone(compiled, monkeypatch):
    """It would compile the code that asks which functions are captured, too, and get it wrong."""
    lost: list = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    captured = capture(with_frames_below)
    outer, _ = compiled(lambda x: captured(x) + 1)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        for count in (2, 2, 3, 2):
            x = torch.rand(count)
            assert torch.equal(outer(x), with_frames_below(x) + 1)
    assert not lost and not [str(one.message) for one in met if "moebius" in str(one.message)]
