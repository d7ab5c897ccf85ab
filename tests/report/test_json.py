"""The report as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from json_schema import faults

from moebius import capture, explain
from moebius.report import Report
from moebius.report.schema import SCHEMA


def test_round_trip(report: Report, tmp_path: Path) -> None:
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == data
    assert data["coverage"] == {"captured": 90, "opaque": 4, "native": 6}
    assert data["breaks"][0]["line"] == 15 and data["breaks"][0]["instruction"] == "POP_JUMP_FORWARD_IF_FALSE"
    assert data["graphs"][0]["operations"] == 2 and data["graphs"][0]["inputs"] == 2
    assert "matmul" in data["graphs"][0]["code"]
    assert [region["lowered"] for region in data["expert_regions"]] == [True, False]
    assert data["guards"][0]["cost_ns"] == 21.0
    assert data["lines"][report.file]["15"] == "break"


def test_guards_stand_with_what_the_user_wrote() -> None:
    """What our own modules are asked about is of the libraries."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    guards = json.loads(explain(capture(step))(torch.ones(2, 4)).to_json())["guards"]
    ours = [guard["owner"] for guard in guards if "moebius" in guard["source"]]
    assert ours and set(ours) == {"torch and Python's builtins"}
    assert {"x", "optimizer", "model"} <= {guard["owner"].split()[0] for guard in guards}


def test_no_result_in_it(report: Report) -> None:
    assert "result" not in json.loads(report.to_json())


def test_the_schema_holds(report: Report) -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * n
        return y + (id(y) > 0)

    captured = capture(step)
    found = [report, Report(), *(explain(captured)(torch.ones(3), n) for n in (2, 3))]
    assert found[-1].status == "recaptured" and found[-1].breaks
    for one in found:
        assert not faults(json.loads(one.to_json()), SCHEMA)


@pytest.mark.parametrize(("key", "value"), [("status", "warm"), ("coverage", {}), ("more", 1)])
def test_the_schema_refuses_another_form(report: Report, key: str, value: object) -> None:
    data = {**json.loads(report.to_json()), key: value}
    assert faults(data, SCHEMA)


def test_two_reports_of_one_callable_are_compared() -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n if n < 3 else (x + 1) * n

    captured, x = capture(step), torch.ones(3)
    explain(captured)(x, 2)
    first, again, other = explain(captured)(x, 2), explain(captured)(x, 2), explain(captured)(x, 3)
    assert first.diff(again) == ""
    lines = first.diff(other).splitlines()
    assert "- status: hit" in lines and "+ status: recaptured" in lines
    assert any(line.startswith("+ captured again: n was 2, is 3") for line in lines)


def test_in_a_notebook_and_at_the_prompt(report: Report) -> None:
    html = report._repr_html_()
    assert html.startswith("<iframe") and "<script" not in html
    assert repr(report).count("\n") == 0 and report.verdict in repr(report) and len(repr(report)) < 300


def test_the_trace_has_the_times(report: Report, tmp_path: Path) -> None:
    data = json.loads(report.to_trace(tmp_path / "trace.json").read_text())
    spans = {event["name"]: event for event in data["traceEvents"] if event["ph"] == "X"}
    assert spans["step_0"]["dur"] == pytest.approx(12300) and spans["data-dependent branch"]["dur"] == 12.5
    assert spans["data-dependent branch"]["args"]["code"] == "MB001"
    assert all({"ph", "pid", "tid", "name"} <= set(event) for event in data["traceEvents"])
