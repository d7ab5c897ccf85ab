"""Slices that a step is given: as arguments, in containers, as attributes. A slice is known by its parts."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats

ROWS = [slice(0, 1), slice(1, 3), slice(None, None, 2), slice(0, torch.tensor(2)), slice(2), slice(-2, None)]


class Holder:
    def __init__(self, rows):
        self.rows = rows


def of_list(x, rows):
    return x * 2, [1, 2, 3, 4][rows]


def of_tensor(x, rows):
    return x[rows] * 2, x[:, rows] + 1


def in_tuple(x, rows):
    return x[(rows, rows)]


def parts(x, rows):
    return x + 1, rows.start, rows.stop, rows.step


def written(x, rows):
    return x + 1, f"{rows}", rows == slice(1, 3), rows is rows


def given_back(x, rows):
    return x + 1, rows, [rows]


@pytest.mark.share(12)
@pytest.mark.parametrize("place", ["argument", "in a list", "in a dict", "attribute"])
@pytest.mark.parametrize("use", [of_list, of_tensor, in_tuple, parts, written, given_back], ids=lambda f: f.__name__)
def test_each_slice_is_answered_by_its_own_parts(use, place):
    put, take = {
        "argument": (lambda rows: rows, lambda held: held),
        "in a list": (lambda rows: [rows], lambda held: held[0]),
        "in a dict": (lambda rows: {"rows": rows}, lambda held: held["rows"]),
        "attribute": (Holder, lambda held: held.rows),
    }[place]

    def step(x, held):
        return use(x, take(held))

    x, captured = torch.arange(24.0).view(4, 6), capture(step, backend="eager")
    for rows in (*ROWS, slice(1, 3)):
        assert repr(captured(x, put(rows))) == repr(step(x, put(rows))), rows
    if use is given_back:
        assert captured(x, put(ROWS[0]))[1] is ROWS[0]


def test_lengths_that_grow_are_one_graph():
    def step(x, rows):
        return x[rows].sum(0)

    x, captured = torch.arange(48.0).view(8, 6), capture(step, backend="eager")
    for stop in range(2, 9):
        assert torch.equal(captured(x, slice(0, stop)), x[:stop].sum(0))
    assert stats(captured).graphs == 2


def test_two_slices_or_one():
    def step(x, a, b):
        return x + 1, a is b, a == b

    captured, one = capture(step, backend="eager"), slice(0, 1)
    for a, b in [(one, one), (one, slice(0, 1)), (one, slice(0, 2)), (one, one)]:
        assert captured(torch.ones(1), a, b)[1:] == step(torch.ones(1), a, b)[1:]
