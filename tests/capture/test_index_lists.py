"""``token.tolist()`` that indexes: the tensor in its place, the list where anything else is done with it."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats


def read_and_written(x, log):
    token = torch.where(x[:, 0] > 0)[0]
    rows = token.tolist()
    token.add_(1)  # the list stays as it was
    return x[rows] * 2, x[None, rows, 0], len(rows), x[rows, rows]


def set_through_it(x, log):
    token = torch.where(x[:, 0] > 0)[0]
    rows = token.tolist()
    log.append(rows)
    y = x.clone()
    y[rows] = 1
    y[rows, 0] += 2
    token.zero_()
    return y, rows


def summed(x, log):
    rows = torch.where(x[:, 0] > 0)[0].tolist()
    total = 0
    for row in rows:
        total += row
    return x[rows], total, [*rows, 1], isinstance(rows, list), rows == [0]


def changed(x, log):
    rows = torch.where(x[:, 0] > 0)[0].tolist()
    y = x[rows]
    rows.append(0)
    log.append(rows)
    return y, x[rows], sorted(rows), set(rows)


def small_numbers(x, log):
    """A list of these is no mask, as a tensor of uint8 is."""
    rows = torch.where(x[:, 0] > 0)[0].to(torch.uint8).tolist()
    return x[rows]


def cut_by_it(x, log):
    """An operator that takes a list of ints, as sizes."""
    sizes = torch.where(x[:, 0] > -9)[0].bincount().tolist()
    try:
        return [part.sum() for part in x.split(sizes)]
    except TypeError as error:  # which plain Python does not raise
        return str(error)


@pytest.mark.share(5)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize(
    ("function", "broken"),
    [
        (read_and_written, False),
        (set_through_it, False),
        (summed, True),
        (changed, True),
        (small_numbers, True),
        (cut_by_it, True),
    ],
)
def test_listed_rows(function, broken, backend):
    captured = capture(function, backend=backend)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(5 + seed % 3, 8) if seed != 3 else -torch.ones(6, 8)
        found, expected = [], []
        results = captured(x, found), function(x, expected)
        assert str(results[0]) == str(results[1]), seed
        assert found == expected, seed
    assert bool(stats(captured).breaks) == broken
