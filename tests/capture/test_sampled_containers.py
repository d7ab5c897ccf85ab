"""Containers of which each call holds other items: a batch of indices, transitions out of a replay memory, tensors one
of which stands at two places by chance. Items are one place: what a few captures met of one is known of all."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.cache import varying
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


def transition(i: int) -> Transition:
    return Transition(ROWS[i], None if i % 5 == 4 else ROWS[i + 1], i % 5 == 4, float(i))


# What is done with the sample: what it is of, the step.
USES: dict[str, tuple[Callable[[int], Any], Callable[..., torch.Tensor]]] = {
    "an index of a list": (lambda i: i, by_index),
    "labels": (lambda i: i, labels),
    "pairs of tensors": (lambda i: (ROWS[i], ROWS[i * 7 % 29]), pairs),
    "transitions": (transition, transitions),
    "yes or no": (lambda i: i % 2 == 0, decided),
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


SWITCHED_OFF = [(varying, "containers_of", "a list"), (VaryingPlaces, "refuse_walk", "a tuple")]


@pytest.mark.parametrize("owner, name, use", SWITCHED_OFF)
def test_without_what_is_tested_it_does_not_settle(
    owner: Any, name: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [i for i in misses("transitions", use, "an argument") if i > SETTLED]


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
