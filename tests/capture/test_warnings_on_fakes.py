"""Warnings that operators give: as often as in plain Python, none while tracing, and what C++ says once is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from moebius import capture, stats

ROWS = torch.arange(6.0).view(3, 2)
GIVES: list[Callable[[], torch.Tensor]] = [
    lambda: F.mse_loss(ROWS, ROWS[:, :1]),
    lambda: F.softmax(ROWS),
    lambda: F.kl_div(ROWS, ROWS.softmax(-1)),
    lambda: torch.range(0, 4),
    lambda: ROWS[:1, :1].var(),
    lambda: F.binary_cross_entropy(ROWS / 9, ROWS / 9, reduce=True),
]


def calls(step, count=3):
    """How many warnings of each text each call gave."""
    found = []
    for _ in range(count):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            step()
        found.append(sorted(str(one.message) for one in given))
        assert not any("torch_fakes" in one.filename for one in given)
    return found


@pytest.mark.parametrize("step", GIVES)
def test_as_often_as_in_plain_python(step):
    captured = capture(step)
    given = calls(captured)
    assert given[1:] == calls(step)[1:]
    assert len(given[0]) == len(given[1])
    assert stats(captured).hits


def test_what_is_said_once_in_a_process_is_left_to_the_real_operator():
    """A filter that makes an error of it stops the first call, as in plain Python."""
    before = torch.is_warn_always_enabled()
    captured = capture(lambda: torch.complex(ROWS, ROWS).to(torch.float32))
    torch.set_warn_always(True)  # (another test may have made it say so already)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with pytest.raises(UserWarning, match="imaginary"):
                    captured()
    finally:
        torch.set_warn_always(before)
    captured()
    assert torch.is_warn_always_enabled() == before


def test_filters_are_as_before():
    held = list(warnings.filters)
    captured = capture(lambda: F.softmax(ROWS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured()
    assert list(warnings.filters) == held
