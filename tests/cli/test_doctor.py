"""moebius doctor: says what is there, and what is used instead."""

from __future__ import annotations

import pytest

from moebius import doctor
from moebius.cli import main


def found(findings: list[doctor.Finding], what: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.what == what)


def test_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "moebius can run here" in printed
    for what in ("Python", "frame hook", "torch", "Triton", "GPU", "distributed"):
        assert what in printed


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", {"torch": "2.10.0"}.get)
    torch = found(list(doctor.torch()), "torch")
    assert torch.status == "missing" and "2.11" in torch.note


def test_an_untested_pair_of_torch_and_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", {"torch": "2.13.0", "triton": "3.6.0"}.get)
    triton = found(list(doctor.triton()), "Triton")
    assert triton.status == "instead" and "goes with Triton 3.7" in triton.note


def test_disabled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBIUS_DISABLE", "1")
    assert found(list(doctor.hook()), "frame hook").status == "instead"


def test_what_is_missing_decides_the_verdict() -> None:
    lines = doctor.render([doctor.Finding("torch", "not installed", "missing", "pip install torch")])
    assert "moebius cannot run here: mend torch" in lines


def test_one_broken_part_never_hides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "hook", broken)
    findings = doctor.examine()
    assert "disk on fire" in found(findings, "broken").note
    assert found(findings, "torch").status == "ok"
