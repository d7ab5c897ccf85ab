"""The interpreter's re-entry hook among capture's and torch.compile's. Each gets its frames back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from moebius import capture  # noqa: E402
from moebius.hook import evaluator  # noqa: E402
from moebius.interpreter import count_native_frames, interpret, natives  # noqa: E402


def numbers(function, count=3):
    return [float(function(torch.full((2,), float(i)))) for i in range(count)]


def test_captured_functions_called_by_interpreted_code():
    def body(x):
        return (x * 2).sum()

    captured = capture(body)

    def program():
        return numbers(captured), sorted([3.0, 1.0, 2.0], key=lambda v: float(captured(torch.tensor(-v))))

    expected = numbers(body), [3.0, 2.0, 1.0]
    assert interpret(program)() == expected  # cold: captures beneath the machine
    with count_native_frames() as seen:
        assert interpret(program)() == expected
    assert not [name for name in seen if "body" in name]
    assert evaluator() == "default" and not natives.reentry.is_on()


def test_capturing_a_function_that_interprets():
    def inner(values):
        return sorted(values, key=lambda v: -v)

    @capture
    def step(x):
        order = interpret(inner)([1, 3, 2])
        return x * order[0]

    assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert evaluator() == "default"


def test_over_and_beneath_torch_compile():
    compiled = torch.compile(lambda x: (x * 3).sum(), backend="eager")

    def program():
        return [float(v) for v in map(compiled, [torch.ones(2), torch.zeros(2)])]

    assert program() == [6.0, 0.0]
    before = evaluator()
    assert interpret(program)() == [6.0, 0.0]
    assert evaluator() == before and not natives.reentry.is_on()
    assert program() == [6.0, 0.0]
