"""The benchmark of the experts: it runs, it checks what it times, and it needs nothing but torch."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_what_needs_a_gpu_runs_its_steps_without_one(tmp_path: Path) -> None:
    """Under Triton's interpreter; neither installed nor with anything but torch and Triton."""
    pytest.importorskip("triton")
    code = f"""
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "moebius" else real(name, package)
sys.meta_path = [each for each in sys.meta_path if "editable" not in type(each).__name__.lower()]
sys.path.insert(0, {str(BENCH)!r})
sys.argv = ["gpu.py", "--dry", "--out", {str(tmp_path)!r}]
import gpu, moebius
print("from the checkout:", list(moebius.__path__) == [{str(BENCH.parent)!r}])
sys.exit(gpu.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "from the checkout: True" in done.stdout and "WRONG" not in done.stdout
    checks = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert [each["case"] for each in checks] == [
        "one token", "fp8", "fp8_block", "mxfp8", "packed H, concat", "packed H, interleaved", "packed H, none"]
    assert all(each["right"] for each in checks)


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "torch sees no GPU; --dry runs the steps on a CPU" in done.stderr


def test_loss_curves_are_kept_tabled_and_drawn(tmp_path: Path) -> None:
    """From the curves of earlier runs: nothing is trained."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    pytest.importorskip("moebius.cli", reason="moebius is not installed")
    kept, page = tmp_path / "curves.json", tmp_path / "page.md"
    curves = [{"name": "bfloat16", "losses": [4.0, 2.0], "chosen": []},
              {"name": "mxfp8", "losses": [4.0, 2.3], "chosen": ["up=mxfp8"]}]
    kept.write_text(json.dumps(curves))
    page.write_text("before\n<!-- losses: written by bench/precision.py -->\nold\n<!-- end of losses -->\nafter\n")
    done = subprocess.run(
        [sys.executable, str(BENCH / "precision.py"), "--steps", "2", "--run", "mxfp8", "--json", str(kept),
         "--plot", str(tmp_path / "plot.png"), "--table", str(page)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| mxfp8 | 4.000 | 3.1500 | +5.00% | 15.0% |" in page.read_text()
    assert page.read_text().startswith("before\n") and "old" not in page.read_text() and "after" in page.read_text()
    assert (tmp_path / "plot.png").stat().st_size > 10_000 and json.loads(kept.read_text()) == curves
