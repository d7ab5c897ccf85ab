"""A call that raises: the error is the user's, and the report of what was captured until then is there."""

from __future__ import annotations

import json
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from json_schema import faults

from moebius import capture, explain
from moebius.report.schema import SCHEMA


def of_the_users(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    raise KeyError(len(y))


def behind_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    zlib.crc32(b"a")
    return checked(y)


def checked(y: torch.Tensor) -> torch.Tensor:
    y = y * 2
    if len(y) > 1:
        raise ValueError("too long")
    return y


def of_torchs(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return y.view(7)


def as_the_graph_runs(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return torch.cholesky_inverse(torch.linalg.cholesky(y))


def in_a_hook(x: torch.Tensor) -> torch.Tensor:
    p = x.clone().requires_grad_()
    y = p * 2
    y.register_hook(lambda g: g.view(5))
    y.sum().backward()
    return p.grad


STEPS = [of_the_users, behind_a_break, of_torchs, as_the_graph_runs, in_a_hook]


def last_line(error: BaseException, file: str) -> int:
    return [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file][-1]


@pytest.mark.parametrize("step", STEPS)
def test_the_report_is_there(step: Callable[..., Any]) -> None:
    with pytest.raises(Exception) as plain:
        step(-torch.eye(3))
    explained = explain(capture(step))
    assert explained.report is None
    for _ in range(2):
        with pytest.raises(type(plain.value)) as ours:
            explained(-torch.eye(3))
        assert str(ours.value) == str(plain.value)
        report = explained.report
        assert report is not None and report.result is None
        where = f"test_raised.py:{last_line(plain.value, __file__)}"
        assert report.raised.rpartition(" ")[2].endswith(where)
        assert report.raised.startswith(type(plain.value).__name__)
        assert report.verdict.startswith(f"Raised {report.raised}. Until then: ")
        assert report.functions and report.verdict in " ".join(str(report).split())
        assert not faults(json.loads(report.to_json()), SCHEMA)


def test_a_call_that_cannot_begin() -> None:
    """There is no frame of it."""
    explained = explain(capture(of_torchs))
    with pytest.raises(TypeError, match="positional argument"):
        explained()
    assert explained.report is not None and explained.report.raised.startswith("TypeError")


def test_the_next_call_has_its_own() -> None:
    explained = explain(capture(checked))
    with pytest.raises(ValueError, match="too long"):
        explained(torch.ones(3))
    report = explained(torch.ones(1))
    assert explained.report is report and not report.raised and report.verdict.startswith("Runs as one graph")
    assert report.result.tolist() == [2.0]
