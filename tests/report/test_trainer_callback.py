"""The Trainer's callback: a report of the captured step, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from moebius import capture, reset
from moebius.report.trainer import ReportOnce


def step(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("main", [True, False])
def test_it_reports_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], main: bool) -> None:
    """As the Trainer calls it, after each step; on several ranks the first one alone says it."""
    reset()
    captured, page = capture(step), tmp_path / "report.html"
    handler = CallbackHandler([ReportOnce(step=2, html=page)], None, None, None, None)
    args, control = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True), TrainerControl()
    printed = []
    for number in range(1, 5):
        captured(torch.ones(3))
        state = TrainerState(global_step=number, is_world_process_zero=main)
        handler.on_step_end(args, state, control)
        printed.append(capsys.readouterr().out)
    assert [bool(text) for text in printed] == [False, main, False, False]
    assert ("moebius · step" in printed[1] and "Runs as one graph" in printed[1]) == main
    assert page.exists() == main


def test_it_says_where_nothing_was_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import moebius.api

    monkeypatch.setattr(moebius.api, "captured_functions", list)
    callback = ReportOnce(step=1)
    callback.on_step_end(None, TrainerState(global_step=1), TrainerControl())
    assert "nothing was captured" in capsys.readouterr().out
