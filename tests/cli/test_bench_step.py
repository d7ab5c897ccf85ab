"""The step benchmark, shortened: it runs, its contenders agree, and it says what it measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "step.py"
LINE = r"  (\w+) +(\S.*?)  +[\d.]+ [mµ]?s +([\d. ]+) × +[\d.]+ [mµ]?s +([\d.]+) MiB +([\d.]+ MiB|–)"


def lines_of(*options: str) -> list[tuple[str, ...]]:
    """case, contender, ratios to plain, peak and what is kept, of each line."""
    words = [sys.executable, str(BENCH), "--rounds", "1", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return re.findall(LINE, done.stdout)


def test_prints_each_contender_with_a_ratio_for_each_run():
    found = lines_of("--runs", "2", "--cases", "tiny", "--peers", "grouped_mm,eager")
    assert [name for _, name, *_ in found] == [
        "plain", "grouped_mm", "torch.compile + grouped_mm, eager", "moebius", "moebius, eager",
        "moebius, eager, whole_step=False",
    ]  # fmt: skip
    for _, name, ratios, peak, kept in found:
        assert len(ratios.split()) == 2 and all(float(ratio) > 0 for ratio in ratios.split())
        assert float(peak) > 0 and (", eager" in name) == (kept == "–")
    assert found[0][2] == "1.00 1.00"


def test_a_model_without_grouped_experts_has_no_such_contender():
    found = lines_of("--runs", "1", "--cases", "written", "--peers", "grouped_mm")
    assert [(case, name) for case, name, *_ in found] == [("written", "plain"), ("written", "moebius")]
