"""``moebius plan``: what it prints, and what it says to what it cannot plan."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moebius.cli import main
from moebius.lowering.planner import calibrate, hardware

ASKED = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "64", "--gpu", "h200", "--nodes", "8"]


def test_plans_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    text = capsys.readouterr().out
    assert "Plans that moebius runs" in text and "Not run by moebius yet" in text
    assert text.index("Plans that moebius runs") < text.index("Best: dp=") < text.index("Next: dp=")
    assert "@capture(mesh=init_device_mesh(" in text and "bound by " in text


def test_json_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    assert main([*ASKED, "--json", str(file), "--top", "2"]) == 0
    data, text = json.loads(file.read_text()), capsys.readouterr().out
    best = data["running"][0]
    assert len(data["running"]) == 2 and best["runs"] and not best["missing"]
    assert f"Best: dp={best['mesh']['dp']} × ep={best['mesh']['ep']}" in text
    assert f"{1e3 * best['seconds']['step']:.1f}" in text
    seconds = best["seconds"]
    hidden = seconds["communication"] - seconds["exposed"]  # behind products, of a plan in chunks
    assert best["chunks"] > 1 and hidden > 0
    assert seconds["step"] + hidden == pytest.approx(sum(seconds["terms"].values()))
    assert seconds["step"] == pytest.approx(seconds["products"] + seconds["memory"] + seconds["exposed"])
    assert all(plan["missing"] and not plan["runs"] for plan in data["later"])
    assert main([*ASKED, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["running"][0] == best


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-30b-a3b", "--gpus", "1", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    assert "No plan that moebius runs fits" in text and "The smallest cluster that it fits: " in text
    assert "Plans that moebius runs" not in text


@pytest.mark.parametrize(("words", "said"), [
    (["--gpus", "8"], "--model NAME"),
    (["--model", "mixtral-8x7b"], "--gpus N"),
    (["--model", "mixtral", "--gpus", "8"], "mixtral-8x7b"),
    (["--model", "mixtral-8x7b", "--gpus", "60", "--nodes", "8"], "--nodes 5 or 6 or 10"),
    (["--model", "mixtral-8x7b", "--gpus", "0"], "at least one"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--batch", "9"], "8 or 16"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--gpu", "a200"], "h100"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--precision", "mxfp8"], "no rate for mxfp8"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--network", "0"], "above 0"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--top", "0"], "at least one"),
    (["--model", "mixtral-8x7b", "--gpus", "8", "--routing", "no_such.json"], "no_such.json"),
    (["--config", "no_such.json", "--gpus", "8"], "no_such.json"),
])
def test_wrong_use_says_what_to_ask(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_and_list_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["plan", "--help"])
    assert leaving.value.code == 0
    assert "example: moebius plan --model" in capsys.readouterr().out
    assert main(["plan", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "deepseek-v3" in listed and "mi300x" in listed


def test_a_calibrated_machine_is_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    start, rate = calibrate.exchange()
    assert 0 < start < 1 and rate > 1e6
    device = replace(hardware.device("h100"), name="mine", rates={"fp32": 1e11}, near_rate=rate, element=4)
    hardware.write(device, tmp_path / "mine.json")
    assert hardware.device(str(tmp_path / "mine.json")) == device
    assert main(["plan", "--model", "olmoe-1b-7b", "--gpus", "8", "--gpu", str(tmp_path / "mine.json")]) == 0
    assert "8 × mine" in capsys.readouterr().out
    (tmp_path / "mine.json").write_text("{}")
    assert main(["plan", "--model", "olmoe-1b-7b", "--gpus", "8", "--gpu", str(tmp_path / "mine.json")]) == 2
    assert "is no file of a device" in capsys.readouterr().err
