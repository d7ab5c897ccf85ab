"""Lines of logging under moebius.*, MOEBIUS_LOGS, and pytest's fixture."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from moebius import MoebiusWarning, capture
from moebius.cache import logs
from moebius.report.pytest_plugin import checked

X = torch.ones(3)
SCRIPT = """\
import torch
from moebius import capture

@capture
def step(x, n):
    y = x * n
    return y + (id(y) > 0)

step(torch.ones(3), 2)
step(torch.ones(3), 3)
"""


def step(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * n
    return y + (id(y) > 0)


BROKEN = step.__code__.co_firstlineno + 2


def test_each_kind_has_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    captured = capture(step)
    with caplog.at_level(logging.INFO, "moebius"):
        captured(X, 2)
        captured(X, 3)
    lines = {name: [r.getMessage() for r in caplog.records if r.name == f"moebius.{name}"] for name in logs.NAMES}
    assert all("[MB027]" in line and f"test_logs.py:{BROKEN}" in line for line in lines["breaks"]) and lines["breaks"]
    assert "n was 2, is 3" in lines["recompiles"][0]
    assert lines["graphs"] and lines["guards"] and not lines["experts"]


SHOWN: list[tuple[str, set[str]]] = [
    ("breaks", {"breaks"}), ("recompiles, graphs", {"recompiles", "graphs"}), ("", set()),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "shown"), SHOWN)
def test_the_variable_shows_them(tmp_path: Path, wanted: str, shown: set[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "MOEBIUS_LOGS": wanted}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {line.split(":")[0].removeprefix("moebius.") for line in done.stderr.splitlines()} == shown, done.stderr


def test_a_name_that_is_none_is_told() -> None:
    with pytest.warns(MoebiusWarning, match="there is no recompile; there are breaks"):
        logs.switch_on("recompile")


def test_the_fixture() -> None:
    assert torch.equal(checked(lambda x: x * 2)(X), X * 2)
    with pytest.raises(AssertionError, match=rf"\[MB027\] graph break at .*test_logs.py:{BROKEN}"):
        checked(step)(X, 2)
    calls: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * float("1" * len(calls))

    with pytest.raises(AssertionError, match="no hit"):
        checked(counts)(X)


def test_pytest_finds_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"moebius": "moebius.report.pytest_plugin"}
