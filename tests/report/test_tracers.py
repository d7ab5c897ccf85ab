"""Under a trace function captured functions run as Python: a debugger stops, and a coverage tool sees every line."""

from __future__ import annotations

import cProfile
import json
import logging
import os
import subprocess
import sys
from functools import partial
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


COVERED = """\
import sys
import torch
from moebius import capture

def scaled(x, flag):
    if flag:
        x = x * 2
    else:
        x = x * 3
    return x

def step(x):
    for i in range(3):
        if i == 5:
            x = x - 1
        x = x + i
    print(x.sum().item())
    return scaled(x, True)

step = capture(step) if sys.argv[1] == "captured" else step
for _ in range(3):
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


def monitored_lines_of(function: Any, x: torch.Tensor, tool: int, everywhere: bool) -> list[int]:
    """everywhere: lines of all code are asked for; else, as coverage.py does it, those of code that begins to run."""
    seen: list[int] = []
    monitoring = sys.monitoring
    events = monitoring.events

    def line(code: Any, number: int) -> Any:
        if code.co_filename != __file__:
            return monitoring.DISABLE
        seen.append(number)
        return None

    def start(code: Any, offset: int) -> Any:
        if code.co_filename == __file__:
            monitoring.set_local_events(tool, code, events.LINE)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "test")
    monitoring.register_callback(tool, events.LINE, line)
    monitoring.register_callback(tool, events.PY_START, start)
    monitoring.restart_events()
    monitoring.set_events(tool, events.LINE if everywhere else events.PY_START)
    try:
        function(x)
    finally:
        monitoring.set_events(tool, 0)
        for event in (events.LINE, events.PY_START):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
    return seen


def step(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if y.sum().item() > 0:
        y = y + 1
    return y


HAS_MONITORING = sys.version_info >= (3, 12)
WAYS = {"settrace": lines_of} | {
    f"monitoring, tool {tool}, {'lines' if everywhere else 'starts'}": partial(
        monitored_lines_of, tool=tool, everywhere=everywhere
    )
    for tool in range(6 * HAS_MONITORING)
    for everywhere in (True, False)
    if everywhere or tool != 2  # a profiler that asks for no lines: see below
}


@pytest.mark.parametrize("way", WAYS)
def test_every_line_is_seen(way: str, caplog: pytest.LogCaptureFixture) -> None:
    captured, x = capture(step), torch.ones(3)
    captured(x)
    with caplog.at_level(logging.WARNING, "moebius"):
        assert WAYS[way](captured, x) == WAYS[way](step, x) != []
    assert explain(captured)(x).status == "hit"


@pytest.mark.skipif(not HAS_MONITORING, reason="Python has no sys.monitoring")
def test_a_profiler_measures_what_is_captured() -> None:
    """Of a step that it follows it would measure another one."""
    captured, x = capture(step), torch.ones(3)
    captured(x)
    profile = cProfile.Profile()
    with profile:
        report = explain(captured)(x)
    assert report.status == "hit"


def test_coverage_sees_every_line(tmp_path: Path) -> None:
    """coverage.py itself, with each of its ways of following that this Python has."""
    path = tmp_path / "train.py"
    path.write_text(COVERED)
    seen = {}
    for core in ("ctrace", "sysmon")[: 1 + HAS_MONITORING]:
        for how in ("captured", "plain"):
            environment = {**os.environ, "COVERAGE_CORE": core, "COVERAGE_FILE": str(tmp_path / f"{core}-{how}")}
            run = partial(subprocess.run, env=environment, check=True, timeout=120, capture_output=True, cwd=tmp_path)
            command = [sys.executable, "-m", "coverage"]
            run([*command, "run", f"--include={path}", str(path), how])
            told = run([*command, "json", "-q", "-o", "-"])
            (file,) = json.loads(told.stdout)["files"].values()
            seen[core, how] = file["executed_lines"], file["missing_lines"]
    assert len(set(map(str, seen.values()))) == 1, seen
    assert COVERED.splitlines().index("        x = x * 3") + 1 in seen["ctrace", "plain"][1]


def test_a_report_under_a_trace_function_says_that_it_ran_natively() -> None:
    captured, x = capture(step), torch.ones(3)
    captured(x)
    sys.settrace(lambda *_: None)
    try:
        report = explain(captured)(x)
    finally:
        sys.settrace(None)
    assert report.status == "native" and "a trace function or sys.monitoring is in use" in report.verdict
