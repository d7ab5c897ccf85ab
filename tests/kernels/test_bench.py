"""The benchmark of the experts: it runs, it checks what it times, and it needs nothing but torch."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = """
import importlib.abc, runpy, sys
{before}
sys.path.insert(0, {folder!r})
import _peers, experts
experts.CPU_SHAPES["tiny"] = _peers.Shape(32, 16, 8, 4, 2)
{after}
sys.argv = ["experts.py", "--shape", "tiny", "--rounds", "1", "--threads", "1", *{options!r}]
experts.main()
"""


def run(*options: str, before: str = "", after: str = "") -> subprocess.CompletedProcess:
    options = (*options, "--contender", "moebius", "--contender", "eager loop", "--contender", "grouped_mm")
    code = SCRIPT.format(folder=str(BENCH), options=options, before=before, after=after)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_it_runs_and_says_how_it_did(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    ran = {(row["contender"], row["dtype"]) for row in rows if not row["note"]}
    assert ran == {(name, dtype) for name in ("moebius", "eager loop", "grouped_mm", "GEMMs alone")
                   for dtype in ("float32", "bfloat16")}
    assert all(row["forward"] > 0 and row["backward"] > 0 for row in rows)
    assert "tiny: T=32 D=16 N=8 E=4 K=2, bfloat16" in done.stdout


def test_a_wrong_contender_is_not_timed() -> None:
    done = run(after="experts.moebius_default = lambda p: 1.01 * _peers.eager_loop(p)")
    assert done.returncode != 0 and "moebius, T=32" in done.stderr and "result is" in done.stderr


@pytest.mark.parametrize("missing", ["bytecode rich pygments transformers matplotlib moebius"])
def test_it_needs_torch_alone(missing: str) -> None:
    """In a checkout that is not installed, with neither moebius nor what it depends on to be found."""
    before = f"""
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {missing.split()!r} and path is None:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "moebius" else real(name, package)
"""
    done = run("--plot", before="import importlib.util" + before)
    assert done.returncode == 0, done.stderr
    assert "no plot: matplotlib is not installed" in done.stdout
