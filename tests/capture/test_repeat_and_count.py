"""``itertools.repeat`` and ``count`` in a captured step: they give what they are given, and do not iterate over it."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius import capture, stats


def without_end(x):
    total = x
    for iteration, item in enumerate(itertools.repeat(x)):
        total = total + item
        if iteration > 3:
            break
    return total


def so_often(x):
    return [item + 1 for item in itertools.repeat(x, 3)], list(itertools.repeat(x, times=2))


def beside_others(x):
    return [a * b for a, b in zip(x.unbind(0), itertools.repeat(x.sum()))]  # noqa: B905 - one has no end


def mapped(x):
    return list(map(torch.add, x.unbind(0), itertools.repeat(x[0])))


def of_list(x):
    items = [x]
    held = next(itertools.repeat(items))
    held.append(x + 1)
    return items


def given_back(x):
    return x + 1, itertools.repeat(x, 2)


def counted(x):
    return [x * k for k, _ in zip(itertools.count(2, 3), range(3))]  # noqa: B905 - one has no end


@pytest.mark.parametrize(
    "step", [without_end, so_often, beside_others, mapped, of_list, given_back, counted], ids=lambda f: f.__name__
)
def test_items_stay_whole(step):
    x, captured = torch.arange(6.0).view(2, 3), capture(step, backend="eager")
    for _ in range(2):
        assert repr(captured(x)) == repr(step(x))
    assert stats(captured).graphs == 1 and not stats(captured).breaks
