"""Lists and dicts that are written to at a number which differs from call to call: the last hundred losses, by
iterations.

Eight calls of each beside plain Python; results, errors and what the containers hold.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from plain_python import compare

from moebius import capture, stats
from moebius.codegen.effect_replay import EffectReplay
from moebius.guards.recorder import GuardRecorder
from moebius.heap import conditional_writes

ROWS = (3, 3, 3, 4, 4, 5, 5, 5, 5, 5)


def state(buf: list[Any], **more: Any) -> Any:
    return types.SimpleNamespace(buf=buf, i=0, **more)


def ring():
    s = state([0.0] * 4)

    def step(x):
        s.buf[s.i % 4] = x.sum().item()
        s.i += 1
        return x * 2

    return step, [s]


def ring_of_tensors():
    s = state([torch.zeros(()) for _ in range(4)])

    def step(x):
        s.buf[s.i % len(s.buf)] = x.detach().sum()
        s.i += 1
        return x * 2

    return step, [s]


def by_an_argument():
    buf = [0.0] * 8

    def step(x):
        put(buf, x.shape[0] - 2, x.sum().item())
        return x * 2

    def put(where, i, value):
        where[i] = value

    return step, [buf]


def two_writes():
    """A known place and an open one, in the order that the program has: the later write stays."""
    s = state([0.0] * 3)

    def step(x):
        s.buf[s.i % 3] = x.sum().item()
        s.buf[1] = -1.0
        s.buf[(s.i + 1) % 3] = 0.5
        s.i += 1
        return x * 2

    return step, [s]


def known_place_first():
    s = state([0.0] * 3)

    def step(x):
        s.buf[1] = -1.0
        s.buf[s.i % 3] = x.sum().item()
        s.i += 1
        return x * 2

    return step, [s]


def appended_too():
    s = state([0.0] * 3)

    def step(x):
        s.buf[s.i % 3] = x.sum().item()
        s.buf.append(s.i)
        s.i += 1
        return x * 2

    return step, [s]


def aliases():
    s = state([0.0] * 3)
    other = s.buf

    def step(x):
        s.buf[s.i % 3] = x.sum().item()
        other[0] = 7.0
        s.i += 1
        return x * 2

    return step, [s, other]


def on_the_way_of_data():
    s = state([0.0] * 3)

    def step(x):
        s.buf[s.i % 3] = 1.0
        if x.sum() > -1:
            s.buf[(s.i + 1) % 3] = x.sum().item()
        s.i += 1
        return x * 2

    return step, [s]


def fails_behind_it():
    s = state([0.0] * 3)

    def step(x):
        s.buf[s.i % 3] = x.detach().sum()
        s.i += 1
        return x * torch.ones(4)[(x.detach() * 0).long() + x.shape[0] - 1].sum()

    return step, [s]


@pytest.mark.parametrize(
    "recipe",
    [
        ring,
        ring_of_tensors,
        by_an_argument,
        two_writes,
        known_place_first,
        aliases,
        on_the_way_of_data,
        fails_behind_it,
    ],
    ids=lambda r: r.__name__,
)
def test_one_graph(recipe: Any) -> None:
    assert compare(recipe, "moebius", ROWS).breaks == 0


@pytest.mark.parametrize("recipe", [ring, ring_of_tensors, two_writes], ids=lambda r: r.__name__)
def test_captured_no_more_than_three_times(recipe: Any) -> None:
    """For the first call, and where a number became an input, and where two sizes did."""
    found = compare(recipe, "moebius", (3,) * 12)
    assert found.entries <= 3 and found.hits >= 9


# ----------------------------------------------------------------------------------------------------------------------
# What must not be taken for one of these
# ----------------------------------------------------------------------------------------------------------------------


def from_the_end():
    s = state([0.0] * 4)

    def step(x):
        s.buf[-1 - s.i % 4] = x.sum().item()
        s.i += 1
        return x * 2

    return step, [s]


def out_of_range():
    s = state([0.0] * 4)

    def step(x):
        try:
            s.buf[s.i] = x.sum().item()
        except IndexError as error:
            s.buf[0] = str(error)
        s.i += 1
        return x * 2

    return step, [s]


def raises_out_of_range():
    s = state([0.0] * 4)

    def step(x):
        s.i += 1
        s.before = s.i
        s.buf[s.i] = 1.0
        s.after = s.i
        return x * 2

    return step, [s]


def read_afterwards():
    s = state([0.0] * 4)

    def step(x):
        s.buf[s.i % 4] = x.shape[0] * 1.5
        s.i += 1
        return x * (sum(s.buf) / len(s.buf)), s.buf[0], s.buf[s.i % 4]

    return step, [s]


def of_a_class_with_a_say():
    class Loud(list):
        def __setitem__(self, key, value):
            super().__setitem__(key, value + 1)

    s = state(Loud([0.0] * 4))

    def step(x):
        s.buf[s.i % 4] = x.sum().item()
        s.i += 1
        return x * 2

    return step, [s]


def gone_through():
    """Somebody holds an iterator of the list."""
    s = state([1.0, 2.0, 3.0])

    def step(x):
        items = iter(s.buf)
        first = next(items)
        s.buf[s.i % 3] = 10.0 + s.i
        s.i += 1
        return x * first, list(items)

    return step, [s]


def view_of_a_dict():
    s = state([], log={0: 0.5, -1: 1.0})

    def step(x):
        values, n = s.log.values(), len(s.log)
        items = iter(s.log)
        first = next(items)
        s.i += 1
        s.log[s.i] = 3.0
        total = 0.0
        for value in values:
            total += value
        s.log.clear()
        s.log.update({0: 0.5, -1: 1.0})
        return x * total, n, first

    return step, [s]


def slices():
    s = state([0.0] * 4)

    def step(x):
        s.buf[s.i % 4 : s.i % 4 + 1] = [x.sum().item()]
        s.i += 1
        return x * 2

    return step, [s]


def popped_and_sorted():
    s = state([5.0, 3.0, 4.0, 1.0])

    def step(x):
        s.buf[s.i % 4] = 2.0 + s.i
        s.buf.sort()
        s.buf.append(s.buf.pop(0))
        s.i += 1
        return x * s.buf[-1]

    return step, [s]


def number_of_the_data():
    s = state([0.0] * 8)

    def step(x):
        s.buf[int(x.detach().ceil().sum()) % 8] = x.shape[0]
        return x * 2

    return step, [s]


OTHERS = [
    from_the_end, out_of_range, raises_out_of_range, read_afterwards, of_a_class_with_a_say, gone_through,
    view_of_a_dict, slices, popped_and_sorted, number_of_the_data, appended_too,
]  # fmt: skip


@pytest.mark.parametrize("recipe", OTHERS, ids=lambda r: r.__name__)
def test_as_in_plain_python(recipe: Any) -> None:
    compare(recipe, "moebius", ROWS)


def test_another_length_between_calls() -> None:
    found = []
    for is_captured in (False, True):
        step, (s,) = ring()
        run = capture(step) if is_captured else step
        for n in range(9):
            if n == 5:
                del s.buf[1:]
            try:
                run(torch.ones(2) * n)
            except IndexError as error:
                s.i += 1
                s.buf.append(str(error))
        found.append(s.buf)
    assert found[0] == found[1]


def shrunk() -> Any:
    """A ring that was full, of which somebody took two: what the step does then."""
    step, (s,) = ring()
    run = capture(step)
    for n in range(3):
        run(torch.ones(2) * n)
    del s.buf[2:]
    run(torch.ones(2))


def test_without_the_guard_on_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IndexError, match="list assignment index"):
        shrunk()
    real = GuardRecorder.check
    monkeypatch.setattr(
        GuardRecorder, "check", lambda self, kind, *rest, **more: kind == "length" or real(self, kind, *rest, **more)
    )
    with pytest.raises(IndexError) as found:
        shrunk()
    assert all(
        entry.name != "step" or "residual" in str(entry.path) for entry in found.traceback
    )  # not the user's line


@pytest.mark.parametrize("recipe", [ring, two_writes], ids=lambda r: r.__name__)
def test_without_the_effect(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EffectReplay.replay
    monkeypatch.setattr(EffectReplay, "replay", lambda self, r, name: None if r.late else real(self, r, name))
    with pytest.raises(AssertionError, match="call "):
        compare(recipe, "moebius", ROWS)


def test_without_looking_for_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditional_writes, "UNSHARED", 1 << 30)
    with pytest.raises(AssertionError, match="call "):
        compare(view_of_a_dict, "moebius", ROWS)


# ----------------------------------------------------------------------------------------------------------------------
# The last ones, one in and one out
# ----------------------------------------------------------------------------------------------------------------------


def shifted():
    buf = [0.0] * 6

    def step(x):
        buf.pop(0)
        buf.append(x.sum().item())
        return x * (sum(buf) / len(buf))

    return step, [buf]


def running_mean():
    s = state([0.0] * 6)

    def step(x):
        s.buf[1:] = s.buf[:-1]
        s.buf[0] = x.mean().item()
        return x * max(s.buf), min(s.buf)

    return step, [s]


@pytest.mark.parametrize("recipe", [shifted, running_mean], ids=lambda r: r.__name__)
def test_all_places_become_inputs_at_once(recipe: Any) -> None:
    found = compare(recipe, "moebius", (3,) * 10)
    assert found.breaks == 0 and found.entries == 2 and found.hits == 8


def test_the_length_of_a_list_that_changes_is_all_that_is_guarded() -> None:
    s = state([1.0, 2.0, 3.0])

    @capture(backend="eager")
    def step(x):
        return x * len(s.buf)

    for n in range(6):
        s.buf[n % 3] = [n]  # another object
        assert step(torch.ones(1)).item() == 3
    assert stats(step).entries == 2
    s.buf.append(0)
    assert step(torch.ones(1)).item() == 4
