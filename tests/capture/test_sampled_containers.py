"""Containers of which each call holds other items: a batch of indices, transitions out of a replay memory, tensors one
of which stands at two places by chance. Items are one place: what a few captures met of one is known of all."""

from __future__ import annotations

import collections
import itertools
import operator
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.cache import varying
from moebius.guards import sources
from moebius.heap import objects
from moebius.heap.varying import VaryingPlaces

ROWS = [torch.full((3,), float(i)) for i in range(30)]
LABELS = [i % 3 for i in range(30)]
CALLS, SETTLED = 45, 24
Transition = namedtuple("Transition", "state following done reward")


def by_index(sample: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return torch.stack([ROWS[i] for i in sample]) * x


def labels(sample: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([LABELS[i] for i in sample])[:3]


def pairs(sample: Sequence[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    first, second = zip(*sample, strict=True)
    return torch.stack(first) * x + torch.stack(second)


def transitions(sample: Sequence[Transition], x: torch.Tensor) -> torch.Tensor:
    """As in the tutorial of DQN."""
    batch = Transition(*zip(*sample, strict=True))
    there = torch.tensor(tuple(f is not None for f in batch.following))
    value = torch.zeros(len(sample), 3)
    value[there] = torch.stack([f for f in batch.following if f is not None])
    return torch.stack(batch.state) * x + value * torch.tensor(batch.reward)[:, None]


def decided(sample: Sequence[bool], x: torch.Tensor) -> torch.Tensor:
    for yes in sample:
        x = x * 2 if yes else x + 1
    return x


def flags(sample: Sequence[bool], x: torch.Tensor) -> torch.Tensor:
    """Which episodes have ended: into a tensor, and into arithmetic; no way is taken by them."""
    return x * torch.tensor(sample, dtype=torch.float)[:3] + sum(1 - yes for yes in sample)


def transition(i: int) -> Transition:
    return Transition(ROWS[i], None if i % 5 == 4 else ROWS[i + 1], i % 5 == 4, float(i))


# What is done with the sample: what it is of, the step.
USES: dict[str, tuple[Callable[[int], Any], Callable[..., torch.Tensor]]] = {
    "an index of a list": (lambda i: i, by_index),
    "labels": (lambda i: i, labels),
    "pairs of tensors": (lambda i: (ROWS[i], ROWS[i * 7 % 29]), pairs),
    "transitions": (transition, transitions),
    "yes or no": (lambda i: i % 2 == 0, decided),
    "flags": (lambda i: i % 3 == 0, flags),
}
HELD: dict[str, Callable[[list], Sequence]] = {"a list": list, "a tuple": tuple}
DRAWN = {"an argument": False, "drawn in the step": True}


def misses(use: str, held: str, drawn: str) -> list[int]:
    """The calls that captured; each is compared with plain Python."""
    item, used = USES[use]
    every = [item(i) for i in range(29)]

    def step(sample: Sequence, x: torch.Tensor) -> torch.Tensor:
        return used(HELD[held](random.sample(every, 6)) if DRAWN[drawn] else sample, x)

    captured, found, rng = capture(step, backend="eager"), [], random.Random(3)
    for i in range(CALLS):
        sample, x = HELD[held](rng.sample(every, 6)), torch.full((3,), 1.0 + i)
        before = stats(captured).misses
        random.seed(i)
        got = captured(sample, x)
        random.seed(i)
        assert torch.equal(got, step(sample, x))
        found += [i] * (stats(captured).misses > before)
    return found


@pytest.mark.share(6)
@pytest.mark.parametrize("use, held, drawn", [*itertools.product(USES, HELD, DRAWN)])
def test_it_settles_and_never_runs_natively(use: str, held: str, drawn: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = misses(use, held, drawn)
    assert not [w for w in told if "natively now" in str(w.message)]
    assert not [i for i in found if i > SETTLED], found


def collated(batch: list[list[int]], x: torch.Tensor) -> torch.Tensor:
    batch = sorted(batch, key=len, reverse=True)
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True) * x.sum()


def unsorted(batch: list[list[int]], x: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], padding_value=0.5) + x.sum()


@pytest.mark.parametrize("used", [collated, unsorted])
def test_batches_of_lists_of_several_lengths_settle(used: Callable[..., torch.Tensor]) -> None:
    captured, found, rng = capture(used, backend="eager"), [], random.Random(4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(CALLS):
            batch = [[rng.randrange(9) for _ in range(rng.randint(2, 9))] for _ in range(4)]
            before, x = stats(captured).misses, torch.full((2,), 1.0 + i)
            assert torch.equal(captured([*batch], x), used([*batch], x))
            found += [i] * (stats(captured).misses > before)
    assert not [w for w in told if "natively now" in str(w.message)]
    assert not [i for i in found if i > SETTLED], found


@pytest.mark.parametrize("first", [True, False])
def test_rows_of_several_lengths_are_padded_to_the_longest_in_one_graph(first: bool) -> None:
    """Which of them is the longest is no guard; gradients go to each."""

    def step(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.utils.rnn.pad_sequence([row * 2 for row in rows], batch_first=first, padding_value=3.0)
        (padded**2).sum().backward()
        return padded * padded.shape[1 if first else 0], *(row.grad for row in rows)

    captured = capture(step, backend="eager")
    for lengths in ((4, 3, 2), (2, 5, 3), (3, 2, 7), (5, 4, 6), (6, 8, 2), (7, 7, 7)):
        given = [torch.randn(n, 3) for n in lengths]
        found = captured(*(g.clone().requires_grad_() for g in given))
        wanted = step(*(g.clone().requires_grad_() for g in given))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True))
    assert stats(captured).misses <= 3 and stats(captured).breaks == 0


def test_a_ring_that_fills_is_a_log() -> None:
    """As a list that holds what it held and more: after two captures its contents are no constants."""
    ring: collections.deque = collections.deque(maxlen=20)

    def step(x: torch.Tensor) -> float:
        ring.append(x.sum().item())
        return sum(ring) / len(ring)

    captured, calls = capture(step, backend="eager"), []
    for i in range(25):
        before = stats(captured).misses
        found = captured(torch.full((2,), 1.0 + i))
        assert found == sum(ring) / len(ring)
        calls += [i] * (stats(captured).misses > before)
    assert max(calls) <= 6, calls


SWITCHED_OFF = [(varying, "containers_of", "a list"), (VaryingPlaces, "refuse_walk", "a tuple")]


@pytest.mark.parametrize("owner, name, use", SWITCHED_OFF)
def test_without_what_is_tested_it_does_not_settle(
    owner: Any, name: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [i for i in misses("transitions", use, "an argument") if i > SETTLED]


OFF: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "flags as numbers": (objects, "is_item", lambda source: False),
    "families": (sources.OpenPlaces, "__contains__", frozenset.__contains__),
}


@pytest.mark.parametrize("off", [*OFF, ""])
def test_flags_are_numbers_of_the_graph(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few calls: no container is left open for them, and no graph breaks. Some are the same by chance, for
    longer than a few calls."""
    if off:
        monkeypatch.setattr(*OFF[off])
    captured, rng, missed = capture(flags, backend="eager"), random.Random(5), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(30):
            sample, x = [rng.random() < 0.5 / (j + 1) for j in range(6)], torch.ones(3) + i
            before = stats(captured).misses
            assert torch.equal(captured(sample, x), flags(sample, x))
            missed += [i] * (stats(captured).misses > before)
    assert (stats(captured).breaks == 0 and len(missed) <= 4) is not bool(off), missed


QUESTIONS: dict[str, Callable[[bool, bool, torch.Tensor], Any]] = {
    "text": lambda a, b, x: (f"{a} {b!r:>6}", str(a), x * 2),
    "is": lambda a, b, x: x * (2 if a is True else 3) + (b is False),
    "type": lambda a, b, x: (type(a) is bool, isinstance(b, bool), isinstance(a, int), x + 1),
    "logic": lambda a, b, x: (a and b, a or b, not a, a & b, a | b, a ^ b, x),
    "chosen": lambda a, b, x: [x, x * 2][a] + (x if b else -x),
    "numbers": lambda a, b, x: (a + b, a - 1, -b, a * 2.5, int(a), float(b), a == 1, a < b, x * a),
    "key": lambda a, b, x: ({True: x, False: x + 1}[a], {a, b}, {a: 1}),
    "flag": lambda a, b, x: (x.sum(0, keepdim=a).shape, torch.sort(x, descending=b)[0]),
    "mask": lambda a, b, x: torch.where(torch.tensor([a, b, True]), x, 0),
    "full": lambda a, b, x: (torch.full((2,), a), x.new_tensor([a, b]), x.masked_fill(torch.tensor(b), 1.0)),
    "index": lambda a, b, x: (x[None, a], x[b]),
    "set_at": lambda a, b, x: (y := x.clone(), operator.setitem(y, a, 7.0), operator.setitem(y, (b, 0), 8.0))[0],
    "written": lambda a, b, x: x.clone().fill_(a),
    "kept": lambda a, b, x: [a, (b, a), {"b": b}, x],
    "many": lambda a, b, x: (any([a, b]), all([a, b]), sum([a, b]), max(a, b), sorted([a, b]), [a, b].count(True), x),
    "range": lambda a, b, x: ([*range(a + 1)], [0] * b, "ab"[a], x),
    "grad": lambda a, b, x: x.clone().requires_grad_(a).requires_grad,
    "set": lambda a, b, x: torch.is_grad_enabled() if not torch.set_grad_enabled(True) else (a, b),
}


@pytest.mark.share(16)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("question", QUESTIONS)
def test_flags_answer_as_they_do(question: str, held: str) -> None:
    def step(sample: Sequence[bool], x: torch.Tensor) -> Any:
        return QUESTIONS[question](sample[0], sample[1], x)

    captured, rng = capture(step, backend="eager"), random.Random(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(14):
            sample, x = HELD[held]([rng.random() < 0.5, rng.random() < 0.5]), torch.tensor([2.0, -1.0, 0.5]) + i
            assert str(captured(sample, x)) == str(step(sample, x)), (i, sample)


@pytest.mark.parametrize("together", [True, False])
def test_items_of_a_list_are_counted_as_one_place(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call meets another item that has changed: after as many captures as one place may take, none is constant."""
    if not together:
        monkeypatch.setattr(varying, "family", lambda place: place)

    def step(names: list[str], x: torch.Tensor) -> torch.Tensor:
        return x * sum(name.endswith("b") for name in names)

    captured = capture(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(40):
            names, x = [f"{i}b" if j == i % 7 else "a" for j in range(7)], torch.ones(2)
            assert torch.equal(captured(names, x), step(names, x))
    assert (stats(captured).misses <= 2 * varying.OFTEN) is together


def misses_of_a_ring_of_lists(calls: int = 40) -> list[int]:
    """As RAdam keeps its numbers: ten lists, each filled anew in the call of its turn."""
    buffer: list[list] = [[None, None] for _ in range(10)]
    count = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        held = buffer[count[0] % 10]
        if held[0] != count[0]:
            held[0], held[1] = count[0], 0.5**count[0]
        return x * held[1]

    captured, missed = capture(step, backend="eager"), []
    for i in range(calls):
        x, before = torch.ones(2) + i, stats(captured).misses
        assert torch.equal(captured(x), x * 0.5 ** (i + 1))
        missed += [i] * (stats(captured).misses > before)
    return missed


def test_what_two_items_hold_is_open_in_all() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        missed = misses_of_a_ring_of_lists()
    assert not [w for w in told if "natively now" in str(w.message)]
    assert max(missed) <= 21, missed
