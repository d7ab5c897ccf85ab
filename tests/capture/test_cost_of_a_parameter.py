"""What capture does for each parameter that a step updates, counted in calls of Python functions.

An optimizer's loop runs the same operators for each of them, so that a first step takes as long as its parameters are
many. Most calls ask nothing that is the function's own: where an operator is in C, and is given tensors and plain
numbers alone, what only some operators are asked is not asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.cache import captured
from moebius.regions.iteration_reuse import IterationReuse
from moebius.tensors import plain_calls, tensors

# Calls of Python functions for each parameter of AdamW's (torch 2.13; 9,200 before they were counted): where most are
# written as one before was, and where each is interpreted.
MOST, MOST_INTERPRETED = 4500, 7000


def calls_of(run: Callable[[], Any]) -> int:
    """How many Python functions are called while capture works."""
    found = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    inner = captured.Captured.capture

    def capturing(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(note)
        try:
            return inner(*args, **kwargs)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured.Captured, "capture", capturing)
        run()
    return found


def first_step(count: int) -> int:
    parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    step = capture(lambda: optimizer.step(), backend="eager")
    found = calls_of(step)
    assert stats(step).graphs == 1 and not stats(step).breaks
    return found


def each_parameter() -> float:
    first_step(5)  # (what is found out once in a process)
    return (first_step(40) - first_step(10)) / 30


def test_a_parameter_costs_few_calls(monkeypatch):
    assert each_parameter() < MOST
    monkeypatch.setattr(IterationReuse, "may_begin", lambda _: False)
    each = each_parameter()
    assert each < MOST_INTERPRETED
    monkeypatch.setattr(tensors, "fakes_of", lambda *_: None)
    monkeypatch.setattr(plain_calls, "KINDS", frozenset())
    assert each_parameter() > each + 200  # where each call of an operator is asked all that some are asked


@pytest.mark.parametrize("call", [
    lambda x: x.mul_(2), lambda x: x + 1.5, lambda x: x.add(x, alpha=2), lambda x: torch.lerp(x, x, 0.5),
    lambda x: x.view(8, 2), lambda x: x.clamp(min=0.0), lambda x: torch.is_complex(x), lambda x: x.sum(0, keepdim=True),
])  # fmt: skip
def test_plain_calls_give_what_others_give(call, monkeypatch):
    """The graph of a call is the same whichever way it goes."""

    def graph() -> tuple[str, Any]:
        step = capture(lambda x: (call(x), x + 1), backend=keep)
        step(torch.arange(16.0).view(4, 4))
        return graphs.pop()

    graphs: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        shapes = [str(getattr(node.meta.get("val"), "shape", None)) for node in gm.graph.nodes]
        graphs.append((gm.code, shapes))
        return gm.forward

    plainly = graph()
    monkeypatch.setattr(tensors, "fakes_of", lambda *_: None)
    assert graph() == plainly


@pytest.mark.parametrize("name", sorted(plain_calls.ASKED_BY_NAME))
def test_what_is_asked_of_some_is_asked_of_them(name):
    method = getattr(torch.Tensor, name, None)
    proxy = object.__new__(plain_calls.TensorProxy)
    proxy.fake = None
    assert plain_calls.fakes_of(method, (proxy,), {}) is None
