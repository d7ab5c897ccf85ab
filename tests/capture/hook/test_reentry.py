"""The interpreter's re-entry hook among other frame hooks: capture's, torch.compile's. Each gets its frames back."""
from __future__ import annotations

import pytest
import torch

from moebius import capture
from moebius.hook import attach, call_hooked, detach, evaluator, set_frame_callback
from moebius.interpreter import count_native_frames, interpret, natives


@pytest.fixture
def no_callback():
    before = set_frame_callback(None)  # capture's own
    yield
    set_frame_callback(before)


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


def attached_target(x):
    return ("plain", x)


@pytest.mark.parametrize("fails", [False, True])
def test_beneath_captures_hook(fails, no_callback):
    """What is not interpreted still goes to the hook that was there before; it is there again afterwards."""
    attach(attached_target, lambda x: ("attached", x))
    try:

        def native_generator():
            yield attached_target(1)

        def program(generator):
            found = list(generator)  # its own frame is native, what it calls is taken by the machine
            if fails:
                raise ValueError
            return found

        def hooked():
            before = evaluator()
            try:
                return interpret(program)(native_generator()), attached_target(2)
            except ValueError:
                return None, attached_target(2)
            finally:
                assert before == evaluator() == "moebius"

        found, after = call_hooked(hooked)
        assert after == ("attached", 2)
        assert found == (None if fails else [("plain", 1)])
        assert evaluator() == "default"
    finally:
        detach(attached_target)


def test_over_and_beneath_torch_compile():
    compiled = torch.compile(lambda x: (x * 3).sum(), backend="eager")

    def program():
        return [float(v) for v in map(compiled, [torch.ones(2), torch.zeros(2)])]

    assert program() == [6.0, 0.0]
    before = evaluator()
    assert interpret(program)() == [6.0, 0.0]
    assert evaluator() == before and not natives.reentry.is_on()
    assert program() == [6.0, 0.0]
