"""A capture that takes long says so on the terminal, in one line that goes when it is done."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

from moebius import capture
from moebius.bytecode import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(x: torch.Tensor) -> torch.Tensor:
    for i in range(5):
        x = x * i + 1
    return x


def shown(monkeypatch: pytest.MonkeyPatch, stream: Any, long: float, function: Any = step) -> str:
    """What stands on stderr after a first call and a second one."""
    monkeypatch.setattr(progress, "LONG", long)
    monkeypatch.setattr(progress, "AGAIN", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    captured = capture(function)
    for _ in range(2):
        captured(torch.ones(3))
    assert progress.OPEN.line is None
    return stream.getvalue()


def test_the_line_of_a_long_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), 0.0)
    lines = [line.rstrip() for line in text.split("\r") if line.strip()]
    assert lines[0].startswith("moebius: capturing step: 1 operators, ")
    assert any(line.startswith("moebius: capturing step: 10 operators") for line in lines)
    assert any(line.startswith("moebius: lowering step: ") for line in lines)
    assert "\n" not in text and text.endswith("\r") and not text.rstrip("\r").split("\r")[-1].strip()


def test_nothing_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), 1e9) == ""


def test_nothing_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""


def test_it_goes_where_the_capture_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        raise KeyError(y.shape)

    with pytest.raises(KeyError):
        shown(monkeypatch, stream := Terminal(), 0.0, fails)
    assert progress.OPEN.line is None and stream.getvalue().endswith("\r")
