"""What steps keep of their numbers: dicts keyed by the step's number, lists and deques of losses, meters.

Calls beside plain Python (``tests/support/tables.py``), and how many of them had to be captured.
"""

# ruff: noqa: B006, B007, B008, B018, B023, B028, B904, B905, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import collections

import plain_python
import pytest
import torch
from tables import net

from moebius import capture, stats
from moebius.api import captured_of
from moebius.heap.late_writes import LateWrites
from moebius.heap.varying import VaryingPlaces

CALLS = (3,) * 15


def by_number():
    class Trainer:
        def __init__(self):
            self.step_number, self.log, self.model = 0, {}, net()

    t = Trainer()

    def step(x):
        loss = t.model(x).sum()
        t.log[t.step_number] = loss.item()
        t.step_number += 1
        return loss

    return step, [t.model, t]


def by_text():
    log, st, m = {}, {"n": 0}, net()

    def step(x):
        loss = m(x).sum()
        log[f"loss/{st['n']}"] = loss.item()
        log["last"] = loss.item()
        st["n"] += 1
        return loss

    return step, [m, log, st]


def by_size():
    log = {}

    def step(x):
        log[x.shape[0]] = x.sum().item()
        return x + 1

    return step, [log]


def known_and_unknown_keys():
    log, st = {}, {"n": 0}

    def step(x):
        log["first"] = st["n"]
        log[st["n"]] = x.sum().item()
        log[1] = "one"
        log[st["n"] + 1] = "next"
        st["n"] += 1
        return x * 2

    return step, [log, st]


def modulo():
    log, st = collections.OrderedDict(), {"n": 0}

    def step(x):
        log[st["n"] % 3] = x.shape[0]
        st["n"] += 1
        return x + 1

    return step, [log, st]


def nested():
    log, st = {"a": {}}, {"n": 0}

    def step(x):
        log["a"][st["n"]] = {"loss": x.sum().item(), "rows": x.shape[0]}
        st["n"] += 1
        return x + 1

    return step, [log, st]


def read_after():
    log, st = {}, {"n": 0}
    other = log

    def step(x):
        log[st["n"]] = x.sum().item()
        other["k"] = 2
        st["n"] += 1
        return x * len(other)

    return step, [log, st]


def looked_up_after():
    log, st = {7: 5.0}, {"n": 0}

    def step(x):
        log[st["n"]] = 2.0
        y = x * log.get(7, 1)
        st["n"] += 1
        return y

    return step, [log, st]


def break_after():
    log, st = {}, {"n": 0}

    def step(x):
        log[st["n"]] = x.shape[0]
        st["n"] += 1
        y = x.tolist()
        log[st["n"]] = "more"
        return x + y[0][0]

    return step, [log, st]


def last_hundred():
    d, m = collections.deque(maxlen=3), net()

    def step(x):
        loss = m(x).sum()
        d.append(loss.item())
        d.extend([1, 2])
        return loss

    return step, [m, d]


def own_extend():
    class Losses(list):
        n = 0

        def extend(self, it):
            self.n += 1
            super().extend(it)

    losses = Losses()

    def step(x):
        losses.append(x.sum().item())
        return x

    return step, [losses]


def both_ends():
    d = collections.deque([1.0, 2.0], maxlen=3)

    def step(x):
        d.append(3.0)
        d.appendleft(4.0)
        d.append(d[0])
        return x * d[-1] + len(d)

    return step, [d]


def mean_of_all():
    losses, m = [], net()

    def step(x):
        loss = m(x).sum()
        losses.append(loss.item())
        return loss, sum(losses) / len(losses)

    return step, [m, losses]


def mean_of_last():
    d, m = collections.deque(maxlen=3), net()

    def step(x):
        loss = m(x).sum()
        d.append(loss.item())
        return loss, sum(d) / len(d)

    return step, [m, d]


def stacked():
    d, m = collections.deque(maxlen=3), net()

    def step(x):
        loss = m(x).sum()
        d.append(loss.detach())
        return loss + torch.stack(list(d)).mean()

    return step, [m, d]


def one_out_at_the_head():
    losses, m = [], net()

    def step(x):
        loss = m(x).sum()
        losses.append(loss.item())
        if len(losses) > 5:
            losses.pop(0)
        return loss

    return step, [m, losses]


def longer_dict():
    log = {}

    def step(x):
        known = len(log)
        log[known] = x.sum().item()
        return x + known

    return step, [log]


def looped_over():
    losses = []

    def step(x):
        losses.append(x.sum().item())
        total = 0
        for v in losses:
            total += v
        return x * total

    return step, [losses]


def looped_over_in_a_helper():
    losses, m = [], net()

    def smooth(values):
        total = 0.0
        for i, v in enumerate(values):
            total += v * i
        return total

    def step(x):
        loss = m(x).sum()
        losses.append(loss.item())
        return loss * 2 + smooth(losses)

    return step, [m, losses]


def summed_by_a_generator():
    losses = []

    def step(x):
        losses.append(x.sum().item())
        return x * sum(v * v for v in losses), [v + 1 for v in losses][-1]

    return step, [losses]


def best_of_all():
    log, count = {}, [0]

    def step(x):
        log[f"loss/{count[0]}"] = x.sum().item()
        count[0] += 1
        return x * 2, max(log.values())

    return step, [log, count]


def over_items():
    log, count, m = {}, [0], net()

    def step(x):
        loss = m(x).sum()
        log[count[0]] = loss.item()
        count[0] += 1
        best = None
        for key, value in log.items():
            if best is None or value < best[1]:
                best = key, value
        return loss + best[0]

    return step, [m, log, count]


def views_that_are_kept():
    log, count = collections.OrderedDict(), [0]
    seen = log.keys()

    def step(x):
        log[count[0]] = x.shape[0]
        count[0] += 1
        log.last = log.values()
        same = seen is log.keys()
        return x * len(seen), same, list(log.last)[-1], 3 in seen

    return step, [log, count]


# how many of 15 calls may be captured, those of graph breaks' second halves among them
CAPTURED = {
    by_number: 3,
    by_text: 1,
    by_size: 1,
    known_and_unknown_keys: 3,
    modulo: 3,
    nested: 3,
    last_hundred: 1,
    own_extend: 1,
    both_ends: 5,
    one_out_at_the_head: 5,
    mean_of_all: 2,
    mean_of_last: 2,
    stacked: 6,
    looped_over: 5,
    summed_by_a_generator: 5,
    looped_over_in_a_helper: 13,
    best_of_all: 10,
    over_items: 7,
}
BREAKS = {
    read_after: "dict read after a write at a number",
    looked_up_after: "dict read after a write at a number",
    break_after: "tensor read as a number",
    stacked: "container that changes from call to call",
    longer_dict: "container that changes from call to call",
    looped_over: "container that changes from call to call",
    looped_over_in_a_helper: "container that changes from call to call",
    summed_by_a_generator: "container that changes from call to call",
    best_of_all: "view that is not known",
    over_items: "view that is not known",
    views_that_are_kept: "view that is not known",
}


@pytest.mark.parametrize("recipe", CAPTURED, ids=lambda r: r.__name__)
def test_warm_although_it_keeps_its_numbers(recipe):
    assert stats(plain_python.compared(recipe, "moebius", CALLS)).misses <= CAPTURED[recipe]


@pytest.mark.parametrize("recipe", BREAKS, ids=lambda r: r.__name__)
def test_breaks_where_it_reads_what_it_keeps(recipe):
    assert BREAKS[recipe] in {b.reason for b in plain_python.breaks_of(recipe, CALLS)}


def test_a_frame_with_such_a_loop_runs_natively_and_is_not_captured_below_itself():
    captured = plain_python.compared(looped_over, "moebius", CALLS)
    assert [m.function.__name__ for m in captured_of(captured).family()] == ["step"]
    (broken,) = plain_python.graph_breaks(captured)
    assert "gone through" in broken.detail and "the whole frame runs natively" in broken.detail


def test_views_are_not_compared_by_what_stands_for_them():
    """Two places hold one view, or two."""
    log = {"a": 1}
    first, second = log.keys(), log.keys()

    @capture
    def step(a, b):
        return a is b, a is None, isinstance(a, dict), len(a)

    for a, b in ((first, first), (first, second), (second, second), (first, first)):
        assert step(a, b) == (a is b, False, False, 1)


def test_what_an_entry_is_called_may_not_be_guessed(monkeypatch):
    """Switched off, the step takes what the dict held before for what it holds after the write."""
    monkeypatch.setattr(LateWrites, "refuse_late", lambda self, record, key=None: None)
    with pytest.raises(AssertionError, match="result"):
        plain_python.compare(read_after, sizes=CALLS)


def test_without_growing_containers_each_call_is_captured(monkeypatch):
    monkeypatch.setattr(VaryingPlaces, "is_growing", lambda self, record: False)
    assert stats(plain_python.compared(looped_over, "moebius", CALLS)).misses == len(CALLS)
