"""The self-test: it captures and trains for real, it fails where capture fails, and it speaks once."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius import capture, doctor, selftest, stats, trial
from moebius.cache.captured import captured_once
from moebius.cli import main
from moebius.python.calls import Calls
from moebius.versions import RELEASES, TORCHES, is_tested, numbers


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if no test had run on this torch; the folder for verdicts."""
    monkeypatch.setattr(selftest, "WORKS", None)
    monkeypatch.setenv("MOEBIUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def breaks_everything(*_: Any) -> Any:
    raise AttributeError("'builtin_function_or_method' object has no attribute '__func__'")


def said() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.training()}


def test_the_doctor_trains_a_layer_and_compares() -> None:
    findings = said()
    assert [finding.status for finding in findings.values() if "GPU" not in finding.what] == ["ok"] * 3
    assert findings["capture"].found == "1 graph, 0 graph breaks, 2 of 2 hits"
    assert findings["lowering"].found.startswith("1 of 1 expert region, kernel ")
    outcome = trial.try_moe_step()
    assert outcome.equal and (outcome.graphs, outcome.breaks, outcome.hits, outcome.lowered) == (1, [], 2, 1)


@pytest.mark.faults
@pytest.mark.parametrize("place", ["__init__", "call", "python_function"])
def test_capture_that_fails_is_a_doctor_that_fails(place: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(Calls, place, breaks_everything)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "1 graph, 0 graph breaks" not in printed and "moebius cannot run here: mend capture" in printed


@pytest.mark.faults
def test_what_fails_without_experts_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.fx._lazy_graph_module._LazyGraphModule.force_recompile", breaks_everything)
    finding = said()["a step without experts"]
    assert finding.status == "missing" and "no attribute '__func__'" in finding.note


def test_a_graph_break_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "    optimizer.step()\n"
    monkeypatch.setattr(selftest, "STEPS", selftest.STEPS.replace(step, f"{step}    open('/dev/null').close()\n"))
    finding = said()["capture"]
    assert finding.status == "missing" and " 0 graph breaks" not in finding.found and "open" in finding.note


def test_other_values_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "copy", type("Copy", (), {"deepcopy": staticmethod(shaken)}))
    finding = said()["training"]
    assert finding.status == "missing" and finding.found == "not as plain Python"


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    twin = type(model)()
    twin.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})
    return twin


def test_experts_that_are_not_lowered_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "capture", lambda function: capture(function, backend="eager"))
    findings = said()
    assert findings["lowering"].status == "instead" and findings["lowering"].found == "0 of 1 expert region"
    assert findings["capture"].status == findings["training"].status == "ok"


def test_on_a_tested_torch_nothing_is_tried_first() -> None:
    assert is_tested(torch.__version__) == (selftest.WORKS is True)
    assert {*map(numbers, RELEASES)} == {*TORCHES} and all(is_tested(f"{release}+cu130") for release in RELEASES)
    others = "2.10.0", "2.13.1", "2.13.0.dev20260101+cpu", "2.13.0a0+git12", "2.15.9", "2.99.0", "3.0.1"
    assert not any(map(is_tested, others))


@pytest.mark.faults
def test_where_capture_fails_there_is_one_warning_and_all_runs_natively(
    untested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calls, "call", breaks_everything)
    double, triple = capture(lambda x: x.clone() * 2), capture(lambda x: x.clone() * 3, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
            assert torch.equal(triple(torch.ones(2)), torch.full((2,), 3.0))
    (warning,) = caught
    text = str(warning.message)
    assert "no attribute '__func__'" in text and torch.__version__ in text and 'pip install "torch>=' in text
    assert stats(double).graphs == stats(triple).graphs == 0 and not untested.exists()


def test_values_that_differ_are_a_failure(untested: Path) -> None:
    class Wrong:
        graph_break = None

        @staticmethod
        def run(layer: Any, x: Any) -> Any:
            return torch.tensor(0.0)

    assert "other values" in str(selftest.try_first_step(lambda step, args: Wrong))


@pytest.mark.faults
def test_that_it_works_is_remembered(untested: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest.works(captured_once)
    (file,) = untested.iterdir()
    for content, tries in ((file.read_text(), 0), ("", 1), (file.read_text()[:-1], 1), ("\0\xff" * 9, 1)):
        file.write_text(content)
        monkeypatch.setattr(selftest, "WORKS", None)
        tried: list[Any] = []
        assert selftest.works(lambda step, args, tried=tried: tried.append(step) or captured_once(step, args))
        assert len(tried) == tries
    file.unlink()
    file.mkdir()  # nothing can be read or written there
    monkeypatch.setattr(selftest, "WORKS", None)
    assert selftest.works(captured_once) and file.is_dir()


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode, torch.no_grad, lambda: torch.device("meta"), lambda: torch.autocast("cpu"),
        lambda: torch.autograd.graph.save_on_cpu(), torch.random.fork_rng,
    ],
)  # fmt: skip
def test_what_the_program_has_switched_on_is_no_reason(untested: Path, mode: Any) -> None:
    state = torch.get_rng_state()
    with mode():
        double = capture(lambda x: x * 2)
        x = torch.ones(2)
        assert double(x).shape == (2,) and selftest.WORKS is True
    assert torch.equal(state, torch.get_rng_state())


def test_a_default_dtype_is_no_reason(untested: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert selftest.works(captured_once)
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_that_capture_first_at_once_try_once(untested: Path) -> None:
    tried: list[Any] = []

    def once(step: Any, args: Any) -> Any:
        tried.append(step)
        return captured_once(step, args)

    threads = [threading.Thread(target=selftest.works, args=(once,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1 and selftest.WORKS is True


def test_a_program_on_an_untested_torch(tmp_path: Path) -> None:
    """From the import on: what torch calls itself decides, and nothing is printed."""
    program = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.99.0")
from moebius import capture, stats
step = capture(lambda x: x * 2)
step(torch.ones(2))
from moebius import selftest
assert selftest.WORKS is True and stats(step).graphs == 1
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True,
        env={"MOEBIUS_CACHE": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert (run.returncode, run.stderr) == (0, "") and len(list(tmp_path.iterdir())) == 1
