"""``moebius explain SCRIPT`` tells of captures whose model has died by the script's end, and of what gave up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """\
import torch
from moebius import capture, disable

@disable
def native():
    return 1

@capture
def step(model, x):
    y = model(x)
    return y * 2 + native()

@capture(dynamic=False)
def sized(x):
    return x * 2

def main():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for _ in range(3):
        step(model, torch.ones(2, 4))
    for size in range(2, 22):
        sized(torch.ones(size))

main()
"""


def reports(tmp_path: Path) -> tuple[dict[str, Any], str]:
    path, found = tmp_path / "train.py", tmp_path / "found.json"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "moebius", "explain", str(path), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return {report["name"]: report for report in json.loads(found.read_text())}, done.stdout


def test_they_do(tmp_path: Path) -> None:
    found, text = reports(tmp_path)
    step = found["step"]
    assert step["verdict"].startswith("Runs as 2 graphs; break") and len(step["graphs"]) == 2
    assert [item["code"] for item in step["breaks"]] == ["MB006"]
    assert step["coverage"]["captured"] and all(guard["cost_ns"] is not None for guard in step["guards"])
    sized = found["sized"]
    assert sized["status"] == "native" and sized["verdict"].startswith("NOT captured: it was captured 16 times")
    assert step["verdict"] in " ".join(text.split()) or "Runs as 2 graphs" in text
