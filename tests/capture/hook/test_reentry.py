"""The interpreter's re-entry hook among other frame hooks: capture's gets its frames back. Needs no torch."""

from __future__ import annotations

import pytest

from moebius.hook import attach, call_hooked, detach, evaluator, set_frame_callback
from moebius.interpreter import interpret, natives


@pytest.fixture
def no_callback():
    before = set_frame_callback(None)  # capture's own
    yield
    set_frame_callback(before)


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
        assert evaluator() == "default" and not natives.reentry.is_on()
    finally:
        detach(attached_target)
