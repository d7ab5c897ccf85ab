"""The benchmark's peers: their adapters give what the plain loop gives, where their kernels run in Triton's interpreter
and the package is installed (none is a dependency of ours); what a wrong peer does to a run."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCH = Path(__file__).parents[2] / "bench"
ADAPTER = """
import json, sys
sys.path.insert(0, {folder!r})
import experts, torch
from _peers import Shape, eager_loop, make_problem
errors = []
for dtype in (torch.float32, torch.float16):
    problem = make_problem(Shape(24, 32, 16, 4, 2), dtype, "cpu")
    out = eager_loop(problem)
    want = [out.detach(), *torch.autograd.grad(out, problem.leaves, problem.grad)]
    contender = experts.Contender({name!r}, problem, experts.{name})
    contender.verify(want)
    contender.forward()
    got = [contender.out.detach()]
    contender.backward()
    errors += [experts.error(a, b) for a, b in zip([*got, *contender.grads], want, strict=True)]
print(json.dumps(errors))
"""
RUN = """
import sys
from dataclasses import replace
sys.path.insert(0, {folder!r})
import _peers, experts, torch
experts.CPU_SHAPES["tiny"] = _peers.Shape(32, 16, 8, 4, 2)
found = experts.contenders
def interleaved_loop(p):
    return _peers.eager_loop(replace(p, gate_up=torch.cat((p.gate_up[:, ::2], p.gate_up[:, 1::2]), 1)))
def contenders(problem, device):
    def contender(name, run, layout=None):
        return lambda: experts.Contender(name, problem, lambda: run, layout)
    return found(problem, device) | dict(
        interleaved=contender("interleaved", interleaved_loop, _peers.interleaved),
        mistaken=contender("mistaken", interleaved_loop))
experts.contenders = contenders
sys.argv = ["experts.py", "--shape", "tiny", "--rounds", "1", "--threads", "1", "--dtype", "float32",
            "--json", {json!r}, *(f"--contender={{name}}" for name in ("moebius", "interleaved", "mistaken"))]
experts.main()
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name, module", [("liger", "liger_kernel"), ("scattermoe", "scattermoe")])
def test_adapters(name: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    # one tile shape: choosing one wants a GPU. Without torch.compile, which ScatterMoE sorts with.
    said = run(ADAPTER.format(folder=str(BENCH), name=name), TRITON_INTERPRET="1", LIGER_FUSED_MOE_AUTOTUNE="0",
               TORCHDYNAMO_DISABLE="1")
    errors = json.loads(said.splitlines()[-1])
    assert max(errors[:5]) < 3e-6 and max(errors[5:]) < 3e-3, errors


def test_layouts_and_mistakes(tmp_path: Path) -> None:
    """A peer with its own layout of gate_up is compared in that; one that gives something else is named, not timed,
    and the others are."""
    run(RUN.format(folder=str(BENCH), json=str(tmp_path / "rows.json")))
    rows = {row["contender"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert not rows["moebius"]["note"] and not rows["interleaved"]["note"] and rows["interleaved"]["backward"] > 0
    assert rows["mistaken"]["note"].startswith("Wrong: result is ")
