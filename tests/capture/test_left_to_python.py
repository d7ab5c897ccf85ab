"""Functions below native code that have more pieces than operators: left to Python after some calls, and only these."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moebius
from moebius import capture, explain, stats
from moebius.api import captured_of
from moebius.cache.patience import TRIAL

Log = list[Any]
Given = tuple[torch.Tensor, Log]


def asks(given: Given) -> Any:
    x, log = given
    return x.dim() > 0 and not log


def asks_below(given: Given) -> Any:
    x, log = given
    return asks(given) or len(log) > 3


def breaks(given: Given) -> Any:
    x, log = given
    return inspect.currentframe() is not None and x.dim()


def writes(given: Given) -> Any:
    x, log = given
    log.append(inspect.currentframe() is None)
    return len(log)


def breaks_and_multiplies(given: Given) -> Any:
    x, log = given
    return inspect.currentframe() is not None and inspect.currentframe() is not None and x * 2


def multiplies(given: Given) -> Any:
    x, log = given
    return (x * 2 + 1).relu()


def multiplies_now_and_then(given: Given) -> Any:
    x, log = given
    return (x * 2 + 1).relu() if len(x) > 2 else x


def multiplies_below(given: Given) -> Any:
    x, log = given
    return inspect.currentframe() is not None and multiplies(given)


natively = ctypes.pythonapi.PyObject_CallOneArg  # code in C that calls Python's, and that nobody knows
natively.restype, natively.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.py_object]
IDLE = (asks, asks_below, breaks, writes, breaks_and_multiplies)
OTHERS = (multiplies, multiplies_now_and_then, multiplies_below)


def step_of(function: Callable[..., Any]) -> Callable[[torch.Tensor, Log], Any]:
    def step(x: torch.Tensor, log: Log) -> Any:
        y = x + 1
        return natively(function, (y, log)), y * 2

    return step


def results(step: Callable[..., Any], calls: int, log: Log) -> Log:
    return [step(torch.ones(2 + i % 2), log) for i in range(calls)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


@pytest.mark.parametrize("function", IDLE + OTHERS, ids=lambda f: f.__name__)
def test_what_is_left(function: Callable[..., Any]) -> None:
    step, logs = step_of(function), ([], [])
    captured = capture(step, backend="eager")
    for _ in range(2):  # (what is forgotten is weighed anew)
        assert same(results(captured, 4 * TRIAL, logs[0]), results(step, 4 * TRIAL, logs[1])) and logs[0] == logs[1]
        met = [one for one in captured_of(captured).family() if one.met_as is function.__code__]
        assert [bool(one.given_up) for one in met] == [function in IDLE]
        report, plain = explain(captured)(torch.ones(3), logs[0]), step(torch.ones(3), logs[1])
        assert same(report.result, plain) and report.coverage["native"] >= 3 * (function in IDLE)
        before = stats(captured).misses
        assert same(results(captured, 4, logs[0]), results(step, 4, logs[1])) and stats(captured).misses == before
        moebius.reset()


@pytest.mark.parametrize("function", IDLE, ids=lambda f: f.__name__)
def test_what_it_calls_is_captured_as_before(function: Callable[..., Any]) -> None:
    """Of one that is left for its breaks, functions below are still met."""

    def calls(given: Given) -> Any:
        return function(given), natively(multiplies, given)

    step, logs = step_of(calls), ([], [])
    captured = capture(step, backend="eager")
    assert same(results(captured, 4 * TRIAL, logs[0]), results(step, 4 * TRIAL, logs[1])) and logs[0] == logs[1]
    (below,) = [one for one in captured_of(captured).family() if one.function.__name__ == "multiplies"]
    assert not below.given_up and below.entry.hits >= 3 * TRIAL
    moebius.reset()
