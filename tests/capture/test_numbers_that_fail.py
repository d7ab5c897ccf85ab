"""Arithmetic that fails on a number that values decide: a handler of the step's sees the error as in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from moebius import capture, explain

NUMBERS = {
    "a counted integer": lambda x: (x > 2).nonzero().shape[0],
    "an integer of a tensor": lambda x: x[0].long().clamp(0, 2).item(),
    "its negative": lambda x: -x[0].long().item(),
    "an integer that a branch chooses": lambda x: 0 if x.sum() > 4 else 2,
    "a float of a tensor": lambda x: x[0].item(),
    "a float that a branch chooses": lambda x: 0.0 if x.sum() > 4 else 2.0,
}
FAILING = {
    "10 / k": lambda k: 10 / k,
    "10 // k": lambda k: 10 // k,
    "10 % k": lambda k: 10 % k,
    "7.5 // k": lambda k: 7.5 // k,
    "divmod": lambda k: divmod(10, k),
    "k / (k - 1)": lambda k: k / (k - 1),
    "(k + 3) % (k - 1)": lambda k: (k + 3) % (k - 1),
    "1 / (k * 0.5)": lambda k: 1 / (k * 0.5),
    "k ** -1": lambda k: k**-1,
    "0 ** -k": lambda k: 0**-k,
    "shift": lambda k: 1 << int(k),
    "sqrt": lambda k: math.sqrt(k - 1),
    "log": math.log,
    "item": lambda k: [1, 2][int(k)],
    "int of a quotient": lambda k: int(5 / k),
    "round of a quotient": lambda k: round(7 / k),
    "range": lambda k: list(range(0, 5, int(k))),
    "chr": lambda k: chr(int(k)),
}


@pytest.mark.share(20)
@pytest.mark.parametrize("failing", FAILING)
@pytest.mark.parametrize("number", NUMBERS)
def test_the_handler_sees_the_error(number, failing):
    def step(x):
        k = NUMBERS[number](x)
        try:
            y = FAILING[failing](k)
        except (ZeroDivisionError, ValueError, OverflowError, IndexError) as error:
            y = str(error)
        return x * 2, y

    captured = capture(step, backend="eager")
    for start in (-1, 0, 1, 2, 0, 1, -1, 3):
        x = torch.arange(4.0) + start
        assert repr(captured(x)) == repr(step(x))


def test_a_with_block_that_handles_nothing_is_no_handler():
    def step(x):
        with torch.no_grad(), torch.autocast("cpu"):
            return x * 2 / (x > 2).sum().item()

    x = torch.arange(4.0) + 1
    report = explain(step, backend="eager")(x)
    assert torch.equal(report.result, step(x)) and report.breaks == []


def test_nobody_else_divides_in_parts():
    def step(x):
        return x + 10 / (x > 2).nonzero().shape[0]

    x = torch.arange(4.0) + 1
    report = explain(step, backend="eager")(x)
    assert torch.equal(report.result, step(x)) and report.breaks == []
    captured = capture(step, backend="eager")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            captured(-x)


BESIDE = {
    "v / k": lambda v, k: v / k,
    "v // k": lambda v, k: v // k,
    "v % k": lambda v, k: v % k,
    "v / (k * 0.5)": lambda v, k: v / (k * 0.5),
    "(v > 0) / k": lambda v, k: (v > 0) / k,
    "fmod": math.fmod,
    "twice": lambda v, k: v // 1 // k,
}


@pytest.mark.parametrize("operation", BESIDE)
def test_what_was_done_before_a_number_of_the_call_makes_it_fail_is_done(operation):
    def run(step):
        log = []
        for i in range(8):
            try:
                step(torch.ones(3) * i, i, log)
            except (ZeroDivisionError, ValueError) as error:
                log.append((str(error), getattr(error, "__notes__", None)))
        return repr(log)

    def step(x, i, log):
        log.append(i)
        log.append(BESIDE[operation](x.sum().item(), i % 4 - 2))

    assert run(capture(step, backend="eager")) == run(step)


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (5, 1, 0, 4, 1), (4, 3, 2, 1, 0)], ids=str)
def test_a_size_that_fails_is_found_again_as_it_was_captured(numbers, handled):
    def run(step):
        log = []
        for n in numbers:
            try:
                log.append(step(torch.ones(2), n, log).tolist())
            except RuntimeError as error:
                log.append((str(error), getattr(error, "__notes__", None)))
        return log

    def step(x, n, log):
        log.append(n)
        try:
            return x * torch.nn.functional.one_hot(torch.tensor([2]), n).sum()
        except RuntimeError:
            if not handled:
                raise
            log.append("handled")
        return x

    assert run(capture(step, backend="eager")) == run(step)
