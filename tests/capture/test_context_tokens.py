"""Tokens of context variables: what ``reset`` gives back, across graph breaks and failures, as in plain Python.

Whether the variable had a value × how deep it is set, and which one × what ends the graph in there × how it is reset.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moebius import capture, stats

FIRST: contextvars.ContextVar[Any] = contextvars.ContextVar("FIRST")
SECOND: contextvars.ContextVar[Any] = contextvars.ContextVar("SECOND", default=1)
VARIABLES = {"first": [FIRST], "second": [SECOND], "one twice": [FIRST, FIRST], "two": [FIRST, SECOND],
             "three": [SECOND, FIRST, SECOND]}  # fmt: skip


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def now() -> list[Any]:
    return [FIRST.get("unset"), SECOND.get()]


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def native(x: torch.Tensor) -> torch.Tensor:
    return x * len([*iter(open(__file__, "rb").readline, b"")][:1])  # files are no part of a graph


def failing(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(7)


def by_context(x: torch.Tensor, variables: list, end: Callable, log: list) -> torch.Tensor:
    with contextlib.ExitStack() as stack:
        for i, variable in enumerate(variables):
            stack.enter_context(setting(variable, 10 * i))
        x = end(x * 2)
        log.append(now())
    log.append(now())
    return x


def nested(x: torch.Tensor, variables: list, end: Callable, log: list) -> torch.Tensor:
    if not variables:
        x = end(x * 2)
        log.append(now())
        return x
    with setting(variables[0], len(variables)):
        x = nested(x, variables[1:], end, log)
    log.append(now())
    return x


def by_hand(x: torch.Tensor, variables: list, end: Callable, log: list) -> torch.Tensor:
    tokens = [(variable, variable.set(i + 5)) for i, variable in enumerate(variables)]
    x = end(x * 2)
    log.append(now())
    for variable, token in reversed(tokens):
        variable.reset(token)
        log.append(now())
    return x


def never(x: torch.Tensor, variables: list, end: Callable, log: list) -> torch.Tensor:
    for variable in variables:
        variable.set(variable.get(3) + 1)
    x = end(x * 2)
    log.append(now())
    return x


def twice(x: torch.Tensor, variables: list, end: Callable, log: list) -> torch.Tensor:
    """A token that is used, by a variable's own ``reset`` and by another's: errors."""
    token = variables[0].set(5)
    variables[0].reset(token)
    x = end(x * 2)
    for variable in (variables[0], SECOND, FIRST):
        try:
            variable.reset(token)
        except (RuntimeError, ValueError) as error:
            log.append(type(error).__name__)
    log.append(now())
    return x


def outcome(step: Callable, way: Callable, before: bool, variables: list, end: Callable) -> Any:
    def run() -> Any:
        if before:
            FIRST.set("before")
            SECOND.set("before too") if way is not never else SECOND.set(2)
            FIRST.set(7)
        log: list[Any] = []
        for _ in range(2):
            try:
                log.append(step(torch.ones(2), variables, end, log).tolist())
            except RuntimeError as error:
                log.append(str(error)[:20])
            log.append(now())
        return log

    return contextvars.Context().run(run)


WAYS = (by_context, nested, by_hand, never, twice)
ENDS = (nothing, native, failing)
CASES = [*itertools.product(WAYS, (False, True), VARIABLES, ENDS)]


@pytest.mark.share(25)
@pytest.mark.parametrize(("way", "before", "which", "end"), CASES)
def test_what_is_given_back(way: Callable, before: bool, which: str, end: Callable) -> None:
    variables = VARIABLES[which]
    captured = capture(way, backend="eager")
    assert outcome(captured, way, before, variables, end) == outcome(way, way, before, variables, end)


@pytest.mark.parametrize("way", [by_context, by_hand])
def test_a_token_goes_on_over_a_graph_break(way: Callable) -> None:
    """The frames in which it lives are captured before it and behind it, and do not run natively."""
    captured = capture(way, backend="eager")
    outcome(captured, way, False, VARIABLES["two"], native)
    assert stats(captured).graphs and stats(captured).breaks
