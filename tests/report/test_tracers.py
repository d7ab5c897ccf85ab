"""Under a trace function captured functions run as Python: a debugger stops, and a coverage tool sees every line."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius import capture, explain

SCRIPT = """\
import sys
import torch
from moebius import capture

@capture
def step(x):
    y = x * 2
    z = y + 1
    return z.sum()

for _ in range(3):
    step(torch.ones(3))
"""


def test_a_breakpoint_stops_in_a_warm_step(tmp_path: Path) -> None:
    """As it is set from pdb's prompt: at the third call, which is warm by then."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    commands = "b 8\nc\nc\nc\np z, y.tolist()\nn\np z.tolist()\nw\nq\n"
    done = subprocess.run(
        [sys.executable, "-m", "pdb", str(path)], input=commands, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("z = y + 1") >= 3, done.stdout + done.stderr
    assert "name 'z' is not defined" in done.stdout and "[3.0, 3.0, 3.0]" in done.stdout
    assert done.stderr.count("runs as Python") == 1




ENTERED = """\
import torch
from moebius import capture

def helper(x):
    q = x * 3
    breakpoint()
    r = q + 1
    return r

@capture
def step(x):
    y = x * 2
    return helper(y).sum()

step(torch.ones(3))
step(torch.ones(3))
"""


STOPS_AT_THE_CALL = sys.version_info >= (3, 13)  # of breakpoint(): pdb's first line; before, the one behind it


def test_breakpoint_finds_the_locals_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ENTERED)
    on = "n\n" * STOPS_AT_THE_CALL
    commands = f"p q.tolist()\n{on}n\np r.tolist()\nn\nw\nc\np x.tolist()\nc\n"
    done = subprocess.run([sys.executable, str(path)], input=commands, capture_output=True, text=True, timeout=120)
    assert "[6.0, 6.0, 6.0]" in done.stdout and "[7.0, 7.0, 7.0]" in done.stdout, done.stdout + done.stderr
    assert "[2.0, 2.0, 2.0]" in done.stdout and "NameError" not in done.stdout


def lines_of(function: Any, x: torch.Tensor) -> list[int]:
    seen: list[int] = []

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            seen.append(frame.f_lineno)
        return local

    def enter(frame: Any, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename == __file__ else None

    sys.settrace(enter)
    try:
        function(x)
    finally:
        sys.settrace(None)
    return seen


def step(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum().item() > 0:
        y = y + 1
    return y


def test_every_line_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    captured, x = capture(step), torch.ones(3)
    captured(x)
    with caplog.at_level(logging.WARNING, "moebius"):
        assert lines_of(captured, x) == lines_of(step, x)
    assert explain(captured)(x).status == "hit"


def test_a_report_under_a_trace_function_says_that_it_ran_natively() -> None:
    captured, x = capture(step), torch.ones(3)
    captured(x)
    sys.settrace(lambda *_: None)
    try:
        report = explain(captured)(x)
    finally:
        sys.settrace(None)
    assert report.status == "native" and "a trace function is set" in report.verdict
