"""Iterators of itertools over a graph break go on where they stood, and the program sees no warning but its own."""

import itertools
import sys
import warnings

import pytest
import torch
from answers import broken, same, told

from moebius import capture
from moebius.heap import iterator_states
from moebius.torch_facts import torch_private

X = torch.arange(4.0)


def sliced():
    part = itertools.islice(iter([X, X + 1, X + 2]), 2)
    first = next(part)
    broken(X)
    return first, list(part)


def chained():
    both = itertools.chain([X], [X + 1, X + 2])
    first = next(both)
    broken(X)
    return first, list(both)


def in_iteration():
    iterations = itertools.cycle([X, X + 1])
    first = next(iterations)
    broken(X)
    return first, [next(iterations) for _ in range(3)]


def repeated():
    ones, endless = itertools.repeat(X, 3), itertools.repeat(X)
    first = next(ones), next(endless)
    broken(X)
    return first, list(ones), next(endless), list(ones)


def counted():
    down = itertools.count(3, -2)
    first = next(down)
    broken(X)
    return X + first, X + next(down), next(down)


def chained_of_an_iterator():
    left = iter([[X], (X + 1, X + 2), [X]])
    both = itertools.chain.from_iterable(left)
    first = [next(both), next(both)]
    broken(X)
    return first, next(left), list(both), list(both)


@pytest.mark.parametrize(
    "function", [sliced, chained, in_iteration, repeated, counted, chained_of_an_iterator], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("action", ["default", "error", "ignore"])
def test_no_warning_of_ours(function, action):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)
        assert same(told(capture(function)), told(function))
    assert seen == []


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 12), (3, 13)), reason="nothing warns")
@pytest.mark.parametrize("ignored", [False, True], ids=["shown", "ignored"])
def test_filters_that_ignore_it_are_left_alone(monkeypatch, ignored):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if ignored:
            warnings.filterwarnings("ignore", "Pickle, copy", DeprecationWarning, r"moebius\.")
        assert iterator_states.is_ignored() == ignored
        monkeypatch.setattr(iterator_states, "is_ignored", lambda: True)  # switched off: nothing is silenced by us
        iterator_states.state_of(itertools.chain([1]))
    assert bool(seen) != ignored


def test_a_filter_for_other_warnings_does_not_ignore_it():
    """One whose pattern answers with a truth, as that for operators on fakes does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with torch_private.fakes_without_warning():
            assert not iterator_states.is_ignored()
