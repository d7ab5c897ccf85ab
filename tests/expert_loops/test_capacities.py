"""Capacities that data decide: ``max`` and ``min`` of tensors, as DeepSpeed's gates have them."""

from __future__ import annotations

import pytest
import torch
from beside_eager import compare
from spellings import E

import moebius
from moebius import capture, stats


def up_to_the_fullest(x, moe):
    """As many places as the fullest expert needs, and no more than there are tokens."""
    weight, index = moe.gate(x).softmax(-1).max(-1)
    mask = torch.nn.functional.one_hot(index, E)
    capacity = min(mask.sum(0).max(), torch.tensor(len(x)))
    place = (mask.cumsum(0) * mask).sum(-1) - 1
    kept = place < capacity
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        (token,) = torch.where((index == e) & kept)
        out.index_add_(0, token, expert(x[token]) * weight[token, None])
    return out


def at_least(x, moe):
    weight, index = moe.gate(x).softmax(-1).max(-1)
    mask = torch.nn.functional.one_hot(index, E)
    place = (mask.cumsum(0) * mask).sum(-1) - 1
    kept = place < max(torch.tensor(2), mask.sum(0).min(), mask[0].sum())
    out = torch.zeros_like(x)
    for e, expert in enumerate(moe.experts):
        (token,) = torch.where((index == e) & kept)
        out.index_add_(0, token, expert(x[token]) * weight[token, None])
    return out


@pytest.mark.parametrize("function", [up_to_the_fullest, at_least])
def test_of_tensors(function):
    assert compare(function) == (1, True)


def with_a_number(x, count):
    capacity = max(count, 4)
    return x * capacity, isinstance(capacity, int)


def of_numbers_that_are_none(x, count):
    return x * max(torch.tensor(float("nan")), count), min([count, torch.tensor(3), torch.tensor(3.0)])


def of_none(x, count):
    return min(x, x + 1)


@pytest.mark.parametrize("function", [with_a_number, of_numbers_that_are_none, of_none])
def test_as_python_answers(function):
    """Which of them it is, a tensor or a number, of which dtype; or the error."""
    moebius.reset()
    captured = capture(function)
    for count in (2, 7, 3, 4, 9, 1):
        found = []
        for run in (captured, function):
            try:
                found.append(run(torch.arange(3.0), torch.tensor(count)))
            except RuntimeError as error:
                found.append(str(error))
        if isinstance(found[1], str):
            assert found[0] == found[1]
            continue
        for ours, plain in zip(*found, strict=True):
            assert type(ours) is type(plain)
            if isinstance(plain, torch.Tensor):
                torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
            else:
                assert ours == plain
    assert stats(captured).graphs
