"""Warnings that operators give: as often as in plain Python, none while tracing, and what C++ says once is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from moebius import capture, explain, stats
from moebius.torch_facts import torch_fakes, torch_private

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


def test_an_operator_that_torch_runs_on_zeros_is_one_on_fakes():
    """So torch does where one has no form for fakes: with its modes off."""

    def runs_on_zeros():
        with _disable_current_modes():
            warnings.warn("on zeros", stacklevel=1)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with torch_private.fakes_without_warning():
            torch_fakes.FakeWorld().call(runs_on_zeros, (), {})
            assert torch_private.ON_FAKES.last() == "on zeros" and not given
            runs_on_zeros()
    assert [str(one.message) for one in given] == ["on zeros"]


def test_filters_are_as_before():
    held = list(warnings.filters)
    captured = capture(lambda: F.softmax(ROWS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured()
    assert list(warnings.filters) == held

def places(step, count=3):
    """Text, line and file of the warnings of each call."""
    found = []
    for _ in range(count):
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            result = step()
        found.append(([(str(one.message), one.lineno, one.filename) for one in given], result))
    return found


LOSS, LAYER = torch.nn.SmoothL1Loss(), torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
HAVE_LINES: list[Callable[[], torch.Tensor]] = [
    *GIVES[:3],
    lambda: LOSS(ROWS, ROWS[:1]),
    lambda: F.log_softmax(ROWS),
    lambda: F.grid_sample(torch.ones(1, 1, 4, 4), torch.zeros(1, 2, 2, 2)),
    lambda: F.dropout2d(ROWS, 0.0),
    lambda: LAYER(torch.ones(2, 3, 4), torch.zeros(3, 3), torch.zeros(2, 3, dtype=torch.bool)).detach(),
]


@pytest.mark.parametrize("step", HAVE_LINES)
def test_what_torch_says_in_python_has_the_users_line(step):
    captured = capture(step)
    for mine, plain in zip(places(captured), places(step), strict=True):
        assert mine[0] == plain[0]
        torch.testing.assert_close(mine[1], plain[1])
    assert stats(captured).hits
    assert not stats(captured).breaks


def test_without_a_warning_it_is_one_node():
    report = explain(lambda: F.mse_loss(ROWS, ROWS + 1) + F.softmax(ROWS, 1).sum())()
    targets = [node.target for node in report.graphs[0].gm.graph.nodes]
    assert F.mse_loss in targets
    assert F.softmax in targets


def test_two_threads_that_capture_at_once_leave_the_switch_as_it_was():
    first, second = torch_private.fakes_without_warning(), torch_private.fakes_without_warning()
    before = torch.is_warn_always_enabled()
    try:
        torch.set_warn_always(False)
        first.__enter__()
        second.__enter__()
        assert torch.is_warn_always_enabled()
        first.__exit__(None, None, None)
        assert torch.is_warn_always_enabled()
        second.__exit__(None, None, None)
        assert not torch.is_warn_always_enabled()
    finally:
        torch.set_warn_always(before)
