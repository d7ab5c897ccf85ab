"""The step benchmark, shortened: it runs, its contenders agree, and it says what it measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "step.py"


def test_runs_and_prints_each_contender():
    words = [sys.executable, str(BENCH), "--peer", "none", "--rounds", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r"  (tiny Mixtral|plain MoE) ", line)]
    assert [(line[2:18].strip(), line[18:34].strip()) for line in lines] == [
        (case, way) for case in ("tiny Mixtral", "plain MoE") for way in ("plain", "moebius")
    ]
    for line in lines:
        ratio, peak, kept = map(float, re.search(r"([\d.]+)× +([\d.]+) MiB +([\d.]+) MiB", line).groups())
        assert ratio > 0 and peak > 0 and kept > 0
