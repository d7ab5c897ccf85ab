"""count_native_frames sees what runs natively, and nothing else; what C code calls back is interpreted."""
from __future__ import annotations

import pytest

from moebius.interpreter import count_native_frames, interpret

pytestmark = pytest.mark.usefixtures("no_gc_callbacks")


def made_outside():
    yield 1
    yield 2


def walk(generator):
    return list(generator)


def test_a_native_generator_is_counted_by_name():
    with count_native_frames() as seen:
        assert interpret(walk)(made_outside()) == [1, 2]
    (name,) = seen
    assert name.startswith("made_outside (") and seen[name] == 3


def test_what_is_interpreted_is_not_counted():
    def plain(n):
        def inner():
            yield from range(n)

        return sorted(inner(), key=lambda x: -x)

    with count_native_frames() as seen:
        assert interpret(plain)(3) == [2, 1, 0]
    assert not seen


def test_what_runs_outside_of_interpret_is_not_counted():
    with count_native_frames() as seen:
        walk(made_outside())
    assert not seen


def test_counting_ends_with_the_block():
    with count_native_frames() as outer:
        with count_native_frames() as inner:
            interpret(walk)(made_outside())
        assert sum(inner.values()) == 3
    assert not outer
    interpret(walk)(made_outside())
    assert sum(inner.values()) == 3
