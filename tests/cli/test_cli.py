"""The command line: what it runs, what it writes, what it says when asked for something wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moebius.cli import Explained, UsageError, main, run_script, split_explain


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.py"], ("a.py", [], None, None, False)),
        (["a.py", "--steps", "3"], ("a.py", ["--steps", "3"], None, None, False)),
        (["--html", "r.html", "a.py", "x"], ("a.py", ["x"], "r.html", None, False)),
        (["a.py", "x", "--json=r.json", "--html", "r.html"], ("a.py", ["x"], "r.html", "r.json", False)),
        (["a.py", "--", "--html", "own"], ("a.py", ["--html", "own"], None, None, False)),
        (["--step", "a.py", "--step", "3"], ("a.py", ["--step", "3"], None, None, True)),
        (["--roofline", "a.py", "--on", "x"], ("a.py", ["--on", "x"], None, None, False, "here")),
        (["--on=h200", "--roofline", "a.py"], ("a.py", [], None, None, False, "h200")),
        (["--routing", "s", "a.py", "--routing", "x"], ("a.py", ["--routing", "x"], None, None, False, None, "s")),
    ],
)
def test_explain_options_stand_anywhere(words: list[str], expected: tuple) -> None:
    assert split_explain(words) == Explained(*expected)


@pytest.mark.parametrize("words", [[], ["--html"], ["a.py", "--json"], ["--nonsense", "a.py"], ["--on", "h200", "a.py"],
                                   ["--roofline", "--on"], ["--routing"]])
def test_explain_says_what_is_wrong(words: list[str]) -> None:
    with pytest.raises(UsageError):
        split_explain(words)


@pytest.mark.parametrize(
    "words", [["explain"], ["explain", "no_such_file.py"], ["explain", "--roofline", "--on", "tpu", __file__],
              ["bench", "no_such_bench"], ["plan", "--model", "x"], []]
)
def test_wrong_use_exits_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("moebius: ") or "usage: moebius" in printed.out


def test_bench_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert {"warm", "cold"} <= set(capsys.readouterr().out.split())


def test_module_and_command_are_the_same() -> None:
    run = subprocess.run([sys.executable, "-m", "moebius", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("moebius 0.")


@pytest.mark.parametrize(
    ("last", "status"), [("", 0), ("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('bad')", 1), ("1 / 0", 1)]
)
def test_a_script_runs_as_python_would_run_it(
    tmp_path: Path, last: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'helped'\n")
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nimport helper\nprint(__name__, sys.argv[1:], helper.WORD)\n{last}\n")
    before = sys.argv, list(sys.path)
    assert run_script(script, ["a", "--b"], list) == (status, [])
    assert (sys.argv, sys.path) == before
    printed = capsys.readouterr()
    assert printed.out == "__main__ ['a', '--b'] helped\n"
    if last == "1 / 0":
        assert "ZeroDivisionError" in printed.err and "runpy" not in printed.err


def test_interpreter_imports_no_torch() -> None:
    code = "import sys, moebius, moebius.interpreter, moebius.report.records; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_completes_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "train.py").touch()

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({' '.join(words)!s} ''); COMP_CWORD={len(words)}; _shtab_moebius; echo ${{COMPREPLY[@]}}"
        typed = ["bash", "-c", f"source {script}; {line.replace(chr(39) * 2, repr(''))}"]
        done = subprocess.run(typed, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        return set(done.stdout.split())

    assert {"explain", "doctor", "bench", "help", "plan", "debug", "completion"} <= completed("moebius")
    assert "train.py" in completed("moebius", "explain")
    assert completed("moebius", "completion") == {"bash", "zsh", "tcsh"}


COMMANDS = ("explain", "doctor", "bench", "help", "completion", "plan", "debug")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_is_complete(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what the command does, and something of each option; the shell completes the same options."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert not ended.value.code
    before = text.partition("\noptions:")[0].partition("\npositional arguments:")[0]
    said = [part for part in before.split("\n\n") if not part.startswith("usage:")]
    assert said and len(said[0].split()) > 5, before
    lines = text.splitlines()
    options = [(i, line) for i, line in enumerate(lines) if line.startswith(("  -", "  {"))]
    for i, line in options:
        following = lines[i + 1] if i + 1 < len(lines) else ""
        assert len(line.split("  ")) > 2 or following.startswith("        "), line
    assert main(["completion", "zsh"]) == 0
    completed = capsys.readouterr().out
    for name in {word for _, line in options for word in re.findall(r"--[a-z]+", line)}:
        assert name in completed, name


def test_completion_without_shtab_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_slots_of_a_script_that_has_no_experts(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "slots.json"
    script.write_text("import moebius, torch\nmoebius.capture(lambda x: (x @ x).sum())(torch.ones(8, 8))\n")
    command = [sys.executable, "-m", "moebius", "explain", "--routing", str(file), str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no experts operator ran" in run.stdout and not file.exists()


def test_a_roofline_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import moebius, torch\nstep = moebius.capture(lambda x: (x @ x).sum())\n"
                      "for _ in range(3):\n    step(torch.ones(8, 8))\n")
    command = [sys.executable, "-m", "moebius", "explain", "--roofline", "--on", "h100", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "On H100 SXM" in run.stdout and "train.py:2), 3 calls" in run.stdout and "graph break" not in run.stdout
