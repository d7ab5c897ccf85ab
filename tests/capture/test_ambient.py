"""What a step may ask about its surroundings: the exception that is handled, texts that it parses."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest
import torch

from moebius import capture, stats


@capture
def asks(x):
    return x + 1, sys.exception(), sys.exc_info()


def test_no_exception_is_handled():
    for _ in range(3):
        assert asks(torch.zeros(1))[1:] == (None, (None, None, None))
    seen = stats(asks)
    assert (seen.graphs, seen.breaks, seen.misses) == (1, 0, 1)


def test_the_callers_exception_is_seen():
    asks(torch.zeros(1))
    error = ValueError("the caller's")
    try:
        raise error
    except ValueError:
        _, now, (kind, value, traceback) = asks(torch.zeros(1))
    assert now is error and (kind, value) == (ValueError, error) and traceback is error.__traceback__
    assert asks(torch.zeros(1))[1] is None


def test_the_steps_own_exception_is_seen():
    @capture
    def step(x):
        try:
            raise KeyError("own")
        except KeyError:
            found = type(sys.exception()).__name__, sys.exc_info()[0]
        return x * 2, found, sys.exception()

    for _ in range(3):
        assert step(torch.ones(1)) == (torch.full((1,), 2.0), ("KeyError", KeyError), None)


def test_an_exit_stack_is_in_the_graph():
    @capture(fullgraph=True)
    def step(x):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            y = x * 2
        return y + x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        step(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_texts_are_parsed_once_and_give_new_objects():
    @capture(fullgraph=True)
    def step(x, text):
        settings = json.loads(text)
        settings["seen"] = True
        return x * settings["scale"], settings

    first, second = (step(torch.ones(1), '{"scale": 3, "deep": {"a": [1]}}') for _ in range(2))
    assert first[0].item() == second[0].item() == 3
    assert first[1] == second[1] == {"scale": 3, "deep": {"a": [1]}, "seen": True}
    first[1]["deep"]["a"].append(2)
    assert second[1]["deep"] == {"a": [1]} == step(torch.ones(1), '{"scale": 3, "deep": {"a": [1]}}')[1]["deep"]
    assert step(torch.ones(1), '{"scale": 4}')[0].item() == 4
    with pytest.raises(json.JSONDecodeError):
        capture(lambda x, text: (x, json.loads(text)))(torch.ones(1), "{")
