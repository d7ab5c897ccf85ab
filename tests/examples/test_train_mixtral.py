"""The main job, shortened: it runs as a user runs it, and what it claims is read back from what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_mixtral.py"
FORWARD_LINE = next(
    number
    for number, text in enumerate(EXAMPLE.read_text().splitlines(), 1)
    if text.strip().startswith("loss = model(")
)


def run(out: Path, *words: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    printed = run(tmp_path, "--steps", "6")
    assert "losses agree step for step" in printed
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()

    plain, captured = json.loads((tmp_path / "figures.json").read_text())
    assert len(plain["losses"]) == len(captured["losses"]) == 6
    assert max(abs(a - b) / abs(a) for a, b in zip(plain["losses"], captured["losses"], strict=True)) <= 1e-4
    assert captured["saved_bytes"] < 0.8 * plain["saved_bytes"]

    report = json.loads((tmp_path / "report.json").read_text())
    assert [region["lowered"] for region in report["expert_regions"]] == [True] * 4
    assert {(region["num_experts"], region["top_k"]) for region in report["expert_regions"]} == {(8, 2)}
    in_forward = [
        found
        for found in report["breaks"]
        if [str(EXAMPLE), FORWARD_LINE] in [list(place[:2]) for place in found["stack"]]
    ]
    assert in_forward == []
    assert sum(graph["code"].count("expert_loop") >= 4 or "experts" in graph["code"] for graph in report["graphs"]) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    printed = run(tmp_path, "--steps", "6", "--ranks", "2")
    assert "losses agree step for step" in printed
    plain, ranks = json.loads((tmp_path / "figures.json").read_text())
    assert max(abs(a - b) / abs(a) for a, b in zip(plain["losses"], ranks["losses"], strict=True)) <= 1e-4
    assert "2 ranks" in printed


def test_wrong_options_are_named() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE), "--steps", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and "--steps is at least 2" in done.stderr
