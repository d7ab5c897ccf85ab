"""The report as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from moebius.report import Report


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


def test_no_result_in_it(report: Report) -> None:
    assert "result" not in json.loads(report.to_json())
