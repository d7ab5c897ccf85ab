"""``bench/collectives.py``: torch's profiler counts what docs/distributed.md predicts, by the command itself."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.share(1)
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_predicted_is_counted(mesh):
    command = [sys.executable, str(ROOT / "bench/collectives.py"), "--mesh", mesh]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs/distributed.md").read_text()
    for line in done.stdout.splitlines()[4:]:
        _, phase, predicted, counted, *_ = (cell.strip() for cell in line.split("|"))
        assert predicted == counted
        row = next(row for row in page.splitlines() if row.startswith(f"| {phase} |") and row.count("|") == 6)
        assert row.split("|")[2 if mesh == "2" else 4].strip() == counted, "docs/distributed.md's table is older"
