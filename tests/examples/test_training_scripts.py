"""The training scripts in the manner of torchtitan and nanoGPT, as a user runs them: plain and captured agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "command", [("train_nanogpt.py", "--steps"), ("train_titan.py", "--training.steps")], ids=lambda c: c[0]
)
def test_losses_agree_with_plain_pytorch(command):
    words = [sys.executable, str(EXAMPLES / command[0]), command[1], "6", "--compare"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    # Experts that run as one operator add up in another order: float32 rounding, a few steps of training apart.
    assert said["captured"] == pytest.approx(said["plain"], rel=1e-5)
    assert len(set(said["captured"])) == 6
    assert said["breaks"] == 0, said  # the whole step is one graph
    assert 1 <= said["graphs"] <= 1 + said["recompiles"] and said["recompiles"] <= 3, said


def test_the_trainer_of_transformers_runs_a_captured_step():
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it; the extra `examples` has it")
    words = [sys.executable, str(EXAMPLES / "train_hf_trainer.py"), "--steps", "5", "--compare"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["captured"] == pytest.approx(said["plain"], rel=1e-5)  # float32 rounding, as above
    assert len(set(said["captured"])) == 5
    # The first micro-batch breaks where transformers installs its hooks; from the second on the step is one graph.
    assert said["step"] == {"graphs": 1, "breaks": 0, "hits": 9}, said
    assert said["update"] == {"graphs": 1, "breaks": 0, "hits": 4}, said


@pytest.mark.share(1)
@pytest.mark.parametrize("options", [[], ["--cache", "static", "--batch", "2", "--sample"]], ids=["dynamic", "static"])
def test_generation_with_a_captured_forward_gives_the_same_tokens(options):
    words = [sys.executable, str(EXAMPLES / "generate.py"), "--tokens", "6", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["equal"] and said["misses"] <= 3 and not said["later_misses"] and not said["breaks"], said
