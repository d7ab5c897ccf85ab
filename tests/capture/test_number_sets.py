"""``for e in set(tensor.tolist())``: the loop's iterations are those of Python's set, in its order, and no graph
breaks; a set that is used otherwise is Python's own."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of


def in_order(x, index):
    for e in sorted(set(index.flatten().tolist())):
        x = x * 0.5 + e
    return x


def as_it_comes(x, index):
    for e in set(index.flatten().tolist()):
        x = x * 0.5 + e
    return x


def of_a_vector(x, index):
    for e in set(index[:, 0].tolist()):
        x = x * 0.5 + e
    return x


def kept(x, index):
    numbers = set(index.flatten().tolist())
    for e in numbers:
        x = x * 0.5 + e
    return x * len(numbers)


def of_a_set(x, index):
    for e in set(e + 1 for e in set(index.flatten().tolist())):  # noqa: C401
        x = x * 0.5 + e
    return x


def frozen(x, index):
    for e in frozenset(index.flatten().tolist()):
        x = x * 0.5 + e
    return x


def backwards(x, index):
    for e in sorted(set(index.flatten().tolist()), reverse=True):
        x = x * 0.5 + e
    return x


def in_a_call_of_set(x, index):
    """``set`` lies on the stack, and another function gets the list."""

    def plus_one(values):
        return [v + 1 for v in values]

    for e in set(v * 2 for v in plus_one(index.flatten().tolist())):  # noqa: C401
        x = x * 0.5 + e
    return x


def shadowed(x, index):
    def sorted(values):
        return list(values)[::-1]

    for e in sorted(set(index.flatten().tolist())):
        x = x * 0.5 + e
    return x


EVERY = (in_order, as_it_comes, of_a_vector, kept, of_a_set, frozen, backwards, in_a_call_of_set, shadowed)
# in a table of eight places 64, 16, 8, 24 and 0 collide: the order of the set is that of insertion
BATCHES = ([[1, 2], [2, 0]], [[64, 1], [1, 0]], [[16, 8], [0, 24]], [[8, 16], [24, 0]], [[3, 3], [3, 3]])


@pytest.mark.parametrize("function", EVERY, ids=lambda f: f.__name__)
def test_iterations_are_those_of_the_set(function):
    captured = capture(function)
    for batch in BATCHES:
        x, index = torch.randn(3, dtype=torch.float64), torch.tensor(batch)
        assert torch.equal(captured(x, index), function(x, index))


@pytest.mark.parametrize("function", [in_order, as_it_comes, of_a_vector], ids=lambda f: f.__name__)
def test_one_graph(function):
    captured = capture(function)
    captured(torch.randn(3), torch.tensor(BATCHES[0]))
    assert stats(captured).graphs == 1 and not report_of(captured_of(captured)).breaks


def test_the_numbers_are_those_from_before_the_iterations():
    def writes(x, index):
        for e in set(index.flatten().tolist()):
            index.fill_(e + 1)
            x = x * 0.5 + e
        return x

    captured = capture(writes)
    for batch in BATCHES[:2]:
        x = torch.randn(3)
        assert torch.equal(captured(x, torch.tensor(batch)), writes(x, torch.tensor(batch)))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_equal_sets_that_were_made_in_another_order(kind):
    def iterations(x, numbers):
        for e in numbers:
            x = x * 0.5 + e
        return x

    captured = capture(iterations)
    for numbers in ([16, 8, 0, 24], [8, 16, 24, 0], [16, 8, 0, 24]):
        x = torch.randn(3)
        assert torch.equal(captured(x, kind(numbers)), iterations(x, kind(numbers)))
