"""Arrays that numpy's shared generator draws: replay buffers, minibatches and masks that are sampled in the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from answers import same

from moebius import capture, explain
from moebius.python.draws import Draws

TABLE = torch.arange(36.0).view(12, 3)
BUFFER = np.arange(36, dtype=np.float32).reshape(12, 3)
SHARES = np.arange(1.0, 13.0) / 78
PLAIN = np.array([4, 2, 9])

INDICES: dict[str, Callable[[int], Any]] = {
    "randint, size by name": lambda n: np.random.randint(0, 12, size=n),
    "randint, size by position": lambda n: np.random.randint(2, 12, n),
    "randint below": lambda n: np.random.randint(12, size=(n,)),
    "choice": lambda n: np.random.choice(12, n),
    "choice of different ones": lambda n: np.random.choice(12, size=n, replace=False),
    "choice with shares": lambda n: np.random.choice(len(SHARES), size=(n,), p=SHARES),
    "choice of an array": lambda n: np.random.choice(PLAIN, n),
    "permutation": lambda n: np.random.permutation(n),
    "part of a permutation": lambda n: np.random.permutation(12)[:3],
    "permutation of an array": lambda n: np.random.permutation(np.arange(n)),
}
NUMBERS: dict[str, Callable[[int], Any]] = {
    "rand": lambda n: np.random.rand(n, 3),
    "randn": lambda n: np.random.randn(n, 3),
    "random": lambda n: np.random.random((n, 3)),
    "random_sample": lambda n: np.random.random_sample(size=(n, 3)),
    "normal": lambda n: np.random.normal(0.5, 2.0, size=(n, 3)),
    "standard_normal": lambda n: np.random.standard_normal((n, 3)),
    "uniform": lambda n: np.random.uniform(-1, 1, (n, 3)),
    "uniform by names": lambda n: np.random.uniform(high=2.0, low=1.0, size=(n, 3)),
    "beta": lambda n: np.random.beta(1.0, 2.0, [n, 3]),
    "binomial": lambda n: np.random.binomial(9, 0.4, (n, 3)),
    "exponential": lambda n: np.random.exponential(size=(n, 3)),
}
USES_OF_INDICES: dict[str, Callable[[Any], Any]] = {
    "indexes a tensor": lambda drawn: TABLE[drawn] * 2,
    "indexes an array": lambda drawn: torch.from_numpy(BUFFER[drawn]) * 2,
    "becomes a tensor": lambda drawn: torch.as_tensor(drawn) * 2,
}
USES_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "from_numpy": lambda drawn: torch.from_numpy(drawn) * 2,
    "tensor": lambda drawn: torch.tensor(drawn, dtype=torch.float32) + 1,
    "as_tensor": lambda drawn: (torch.as_tensor(drawn).float(), torch.ones(2)),
    "kept": lambda drawn: (drawn, torch.ones(2)),
}
CASES = [
    *itertools.product(INDICES.items(), USES_OF_INDICES.items()),
    *itertools.product(NUMBERS.items(), USES_OF_NUMBERS.items()),
]


def outcomes(step: Callable[[int], Any], sizes: tuple[int, ...] = (3, 3, 5, 4, 3)) -> list:
    """What calls gave, or raised, and what is drawn then."""
    np.random.seed(3)
    found = []
    for n in sizes:
        try:
            found.append(step(n))
        except ValueError as error:
            found.append(str(error))
        except IndexError:
            found.append("IndexError")
    return [*found, np.random.rand()]


@pytest.mark.share(6)
@pytest.mark.parametrize("draw, use", CASES, ids=lambda one: one[0].replace(" ", "_"))
def test_a_drawn_array_is_of_the_graph(draw, use):
    def step(n):
        return use[1](draw[1](n))

    assert same(outcomes(capture(step, backend="eager")), outcomes(step))
    assert not explain(step, backend="eager")(4).breaks


def shuffled_minibatches(n):
    order, means = np.arange(2 * n), []
    for epoch in range(2):
        np.random.shuffle(order)
        for start in range(0, 6, 3):
            means.append(TABLE[order[start : start + 3]].mean(0) + epoch)
    return torch.stack(means)


def shuffled_and_kept(n):
    order = np.arange(n)
    part = order[:2]
    np.random.shuffle(order)
    return TABLE[part] + 1, order.copy(), np.random.rand(2)


def drawn_in_turn(n):
    x = torch.from_numpy(np.random.rand(n))
    w = torch.ones(12, 3, requires_grad=True)
    (w[np.random.randint(0, 12, n)] * np.random.rand()).sum().backward()
    return x + np.random.random(), w.grad, torch.from_numpy(np.random.permutation(n))


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("step", [shuffled_minibatches, shuffled_and_kept, drawn_in_turn])
def test_draws_and_shuffles_come_in_their_order(step, backend):
    assert same(outcomes(capture(step, backend=backend)), outcomes(step))
    assert not explain(step, backend=backend)(4).breaks


def test_in_inference_mode_and_with_another_default_device_it_is_as_plain():
    def step(n):
        with torch.inference_mode():
            first = TABLE[np.random.randint(0, 12, n)]
        with torch.device("meta"):
            return first, torch.from_numpy(np.random.rand(n)), np.arange(n), torch.empty(n).device

    assert same(outcomes(capture(step, backend="eager")), outcomes(step))


def too_many(n):
    try:
        return TABLE[np.random.choice(4, n, replace=False)]
    except ValueError as error:
        return str(error), np.random.rand()


def too_many_in_a_function(n):
    def drawn():
        found.append(n)
        return np.random.choice(4, n, replace=False)

    found: list[int] = []
    try:
        x = TABLE[drawn()]
    except ValueError as error:
        x = str(error)
    return x, found, np.random.rand()


def shares_that_are_none(n):
    try:
        return TABLE[np.random.choice(2, size=n, p=np.array([0.5, 0.1 * n]))]
    except ValueError as error:
        return str(error), np.random.rand()


def own_generator(n):
    return TABLE[np.random.RandomState(n).randint(0, 12, size=n)], np.random.rand(n)


def size_that_the_data_decide(n):
    return TABLE[np.random.randint(0, 12, size=int((TABLE > n).sum()))]


def of_objects(n):
    return np.random.choice(["a", "b"], n).tolist(), TABLE[np.random.randint(0, 12, n)]


def from_outside(n):
    np.random.shuffle(ORDER)
    return TABLE[ORDER[:n]] + 1


def rows_outside(n):
    return TABLE[np.random.randint(0, 14, size=n)]


ORDER = np.arange(12)
NOT_FOLLOWED = [
    too_many, too_many_in_a_function, shares_that_are_none, own_generator, size_that_the_data_decide, of_objects,
    from_outside, rows_outside,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("step", NOT_FOLLOWED)
def test_what_is_not_followed_is_as_plain(step, backend):
    ORDER.sort()
    want = outcomes(step, (3, 4, 5, 3))
    ORDER.sort()
    assert same(outcomes(capture(step, backend=backend), (3, 4, 5, 3)), want)


def test_without_the_mechanism_there_are_breaks(monkeypatch):
    monkeypatch.setattr(Draws, "in_order", lambda *_: None)

    def step(n):
        return TABLE[np.random.randint(0, 12, size=n)]

    assert explain(step, backend="eager")(3).breaks
