"""The tool that runs other projects' tests twice: what is equal is not shown, what differs is, and nothing ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from seeds import seed_of_the_code

TESTS = """
import os
import unittest

import torch
from torch.testing import a_name_that_is_gone


class TestPeers(unittest.TestCase):
    def test_frames_are_counted(self):
        step = torch.compile(lambda x: x * 2 + 1, backend="eager")
        self.assertEqual(step(torch.ones(2)).sum().item(), 6.0)
        self.assertEqual("frames of another compiler", 1)
        print("goes on")

    def test_who_runs_it(self):
        print(type(self.test_who_runs_it.__func__).__name__)

    def test_a_model(self):
        doubled = type("Doubled", (torch.nn.Module,), {"forward": lambda self, x: x * 2})()
        model = torch.compile(torch.nn.Sequential(doubled), backend="eager")
        self.assertIs(torch.compile(model).train(), model)
        model(torch.ones(2))

    def test_numbers(self):
        self.assertEqual(torch.ones(2).sum().item(), 2.0)

    def test_that_crashes(self):
        os.abort()
"""


# run.py, with a capture that answers one time more
WRONG = """
import sys
import torch
sys.path.insert(0, {room!r})
import run
from moebius.cache.captured import Captured
from moebius.hook import finish
cold = Captured.cold
Captured.cold = lambda *args: finish(cold(*args)) + 1
sys.exit(run.main())
"""

# run.py, with a capture that multiplies
WRONG_NUMBERS = """
import sys
import torch
sys.path.insert(0, {room!r})
import once
import run
replaced = once.run
def wrong(cls, method, record, kept, wrapped):
    torch.ones = (lambda n: torch.full((n,), 3.0)) if wrapped else torch.ones
    return replaced(cls, method, record, kept, wrapped)
once.run = wrong
sys.exit(run.main())
"""


def run(path: Path, how: str, only: str = "", program: str = "") -> subprocess.CompletedProcess:
    room = Path(__file__).parent
    start = ["-c", program.format(room=str(room))] if program else [str(room / "run.py")]
    command = [sys.executable, *start, str(path), "--how", how, "--only", only]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "test_of_somebody.py"
    path.write_text(TESTS)
    return path


def test_what_is_equal_is_not_shown(suite):
    done = run(suite, "compiled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("test_of_somebody: 5 tests") and done.stdout.endswith("0 differ\n")
    assert "'ended by signal 6': 1" in done.stdout


def test_what_differs_is(suite):
    done = run(suite, "whole", "who_runs")
    assert done.returncode == 1 and "TestPeers.test_who_runs_it\n    printed 'function" in done.stdout
    assert done.stdout.endswith("1 tests ({'passed': 1}), 1 differ\n")


def test_what_a_model_gives_is_compared(suite):
    done = run(suite, "compiled", "a_model", WRONG)
    assert done.returncode == 1 and done.stdout.endswith("1 tests ({'passed': 1}), 1 differ\n")
    assert "Tensor['torch.float32', [2], (1,), False, True, " in done.stdout


def test_what_a_whole_test_asserts_is_compared(suite):
    assert run(suite, "whole", "numbers").returncode == 0
    done = run(suite, "whole", "numbers", WRONG_NUMBERS)
    assert done.returncode == 1 and "assertEqual tuple(float 2.0, float 2.0) -> " in done.stdout


def test_a_test_of_one_side_alone_differs(suite):
    only_once = """
    if not os.path.exists(__file__ + ".read"):
        open(__file__ + ".read", "w").close()

        def test_by_chance(self):
            pass
"""
    suite.write_text(TESTS + only_once)
    done = run(suite, "whole", "chance")
    assert done.returncode == 1 and "TestPeers.test_by_chance\n    is a test of one side alone: plain" in done.stdout


def test_a_file_that_is_not_there(tmp_path):
    done = run(tmp_path / "none.py", "whole")
    assert done.returncode == 2 and "no such file" in done.stderr


OPTIMIZERS = """
import torch


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad.sign(), alpha=group["lr"] / state["count"])


class NeedsMore(Sign):
    def __init__(self, params, lr, schedule):
        super().__init__(params, lr)
"""

# optimizers.py, with a capture that doubles what the step is given
WRONG_STEP = """
import sys
sys.path.insert(0, {room!r})
import optimizers
capture = optimizers.capture
optimizers.capture = lambda step, **options: capture(lambda x, y: step(x * 2, y), **options)
sys.exit(optimizers.main())
"""


@pytest.mark.parametrize("program", ["", WRONG_STEP], ids=["right", "wrong"])
def test_optimizers_of_other_packages(tmp_path, monkeypatch, program):
    (tmp_path / "of_somebody.py").write_text(OPTIMIZERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    room = Path(__file__).parent
    start = ["-c", program.format(room=str(room))] if program else [str(room / "optimizers.py")]
    done = subprocess.run([sys.executable, *start, "of_somebody"], capture_output=True, text=True, timeout=300)
    needs, sign, total = done.stdout.splitlines()
    assert needs.startswith("of_somebody.NeedsMore: not made: TypeError")
    if program:
        assert done.returncode == 1 and sign.startswith("of_somebody.Sign: DIFFERS from step 0 on")
    else:
        assert (
            done.returncode == 0
            and sign.startswith("of_somebody.Sign: equal; ")
            and total == "1 equal, 0 raise the same, 0 differ, 1 not made"
        )


@pytest.mark.timeout(300)
def test_torchs_own_samples_of_operators_and_modules():
    """One in eighty, other ones for other code; ``make samples`` runs all."""
    tool = Path(__file__).with_name("torchs_samples.py")
    command = [sys.executable, str(tool), "--every", "80", "--offset", str(seed_of_the_code() % 80)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert " 0 differ" in done.stdout
