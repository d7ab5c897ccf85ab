"""``moebius explain --step``: what is recorded of a capture, and the walk through it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius import MoebiusWarning, capture
from moebius.report.walk import Walk
from moebius.tensors.graphs import GraphWriter
from moebius.trace.recorder import Recordings
from moebius.trace.recording import Recording


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    kept: list[Recording] = []
    monkeypatch.setattr(Recordings, "is_on", True)
    monkeypatch.setattr(Recordings, "kept", kept)
    yield kept


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    y = x * by
    return y


def straight(x: torch.Tensor) -> torch.Tensor:
    a = scaled(x, 2.0)
    b = (
        a
        + 1
    )
    return a * b


def branches_and_loops(x: torch.Tensor) -> torch.Tensor:
    total = x
    for i in range(3):
        if i == 1:
            continue
        total = scaled(total, i + 1.0)
    while total.ndim < 4:
        total = total[None]
    try:
        raise ValueError("no")
    except ValueError as error:
        total = total + len(str(error))
    with torch.no_grad():
        kept = [total.sum() for _ in range(2)]
    return total + kept[1]


def generators(x: torch.Tensor) -> torch.Tensor:
    def items() -> Iterator[torch.Tensor]:
        yield x
        yield x * 2

    return sum(items(), torch.zeros(()))


def made_around(w: torch.Tensor, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def cells(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        y = x * w
        count = count + 1
        later = lambda: y + count  # noqa: E731
        y = y * 2
        text = "kept"
        return sum([later() + len(text) for _ in range(2)])

    return cells


PROGRAMS = (straight, branches_and_loops, generators, made_around(torch.ones(3), 4))


def lines_of(function: Callable[..., Any], *args: Any) -> list[tuple[str, int, dict[str, Any]]]:
    """The lines of this file that a plain run comes to, as ``sys.settrace`` tells them, with the variables there."""
    found: list[tuple[str, int, dict[str, Any]]] = []

    def look(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        if event == "line":
            found.append((frame.f_code.co_qualname, frame.f_lineno, dict(frame.f_locals)))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return found


def undone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its closure as it was before the captured call."""
    return made_around(torch.ones(3), 4) if function.__name__ == "cells" else function


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_the_moments_are_the_lines_of_a_plain_run(function: Callable[..., Any], recordings: list[Recording]) -> None:
    x = torch.ones(2, 3)
    capture(function, backend="eager")(x)
    (recording,) = recordings
    plain = lines_of(undone(function), x)
    assert [(m.function, m.line) for m in recording.moments] == [line[:2] for line in plain]
    for moment, (_, _, variables) in zip(recording.moments, plain, strict=True):
        assert {*moment.values} == {*variables}
        for name, value in variables.items():
            said = moment.values[name]
            assert said == repr(value) if type(value) in (int, str) else said != "a cell"
    guards, operators = [[getattr(m, name) for m in recording.moments] for name in ("guards", "operators")]
    assert guards == sorted(guards) and operators == sorted(operators) and operators[-1] > 0
    assert recording.outcome == "the function returns" and len(recording.guards) >= guards[-1]


def test_nothing_is_recorded_where_nobody_asked() -> None:
    before = len(Recordings.kept)
    capture(straight, backend="eager")(torch.ones(2))
    assert len(Recordings.kept) == before


def told(recordings: list[Recording], commands: str) -> str:
    out = io.StringIO()
    Walk(recordings, io.StringIO(commands.replace("; ", "\n") + "\n"), out).cmdloop()
    return out.getvalue()


def places(text: str) -> list[str]:
    """Of each stop of the walk its number."""
    return [line[1:].split(" ")[0] for line in text.splitlines() if line.startswith("[")]


def test_forwards_and_backwards(recordings: list[Recording]) -> None:
    capture(branches_and_loops, backend="eager")(torch.ones(2, 3))
    count = len(recordings[0].moments)
    there, back = "s; " * (count - 1), "rs; " * (count - 1)
    forwards = [str(i + 1) for i in range(count)]
    assert places(told(recordings, there + back)) == forwards + forwards[-2::-1]
    assert places(told(recordings, "c; rc")) == ["1", str(count), "1"]
    assert "this is the beginning" in told(recordings, "rs") and "this is the end" in told(recordings, "c; s")


def test_a_difference_opens_the_walk_at_its_operator(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second capture of three has a wrong number in its graph: a line of ``scaled``."""
    original = GraphWriter.node

    def spoiled(self: Any, op: str, target: Any, args: Any, kwargs: Any) -> Any:
        return original(self, op, target, (args[0], 4.0) if args[1:] == (2.0,) else args, kwargs)

    x = torch.ones(2, 3)
    capture(generators, backend="eager", verify=1)(x)
    with monkeypatch.context() as patch:
        patch.setattr(GraphWriter, "node", spoiled)
        with pytest.warns(MoebiusWarning, match="differs from plain Python"):
            capture(straight, backend="eager", verify=1)(x)
    capture(branches_and_loops, backend="eager", verify=1)(x)
    text = told(recordings, "w; captures; capture 1; capture 2; rs; s")
    line = scaled.__code__.co_firstlineno + 1
    assert places(text) == ["2", "1", "2", "1", "2"]
    assert text.count(f"mul (mul, {__file__}:{line}): numbers differ by 2") == 3
    assert "\n> test_walk.py:" + str(line) + " in scaled" in text
    assert sum("; differs from plain Python" in words for words in text.splitlines()) == 1
    assert places(told(recordings[:1], "s")) == ["1", "2"]


def test_next_goes_over_calls_and_breakpoints_stop_in_them(recordings: list[Recording]) -> None:
    capture(straight, backend="eager")(torch.ones(2, 3))
    recording = recordings[0]
    inner = scaled.__code__.co_firstlineno + 1
    over = told(recordings, "n; n; rn")
    depths = [recording.depth(int(number) - 1) for number in places(over)]
    assert depths == [0, 0, 0, 0]
    stopped = told(recordings, f"b test_walk.py:{inner}; c; w; locals; u; p x; b 1; new")
    assert f"test_walk.py:{inner} in scaled" in stopped and "by = 2.0" in stopped
    assert "float32[2, 3], node x" in stopped and "which this capture does not come to" in stopped
    assert "mul = mul(x, 2.0)" in stopped


def test_a_graph_break_ends_a_capture_and_another_follows(recordings: list[Recording]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        os.getppid()
        return y * 2

    capture(step, backend="eager")(torch.ones(2))
    text = told(recordings, "captures; capture 2; capture 9; c; new; no_such")
    assert len(recordings) == 2 and "graph break MB" in text and "the function returns" in text
    assert "capture needs a number from 1 to 2" in text and "no command 'no_such'" in text and "mul" in text


def test_each_command_says_what_it_does() -> None:
    names = [name for name in vars(Walk) if name.startswith("do_")]
    assert len(names) > 20
    assert all(getattr(Walk, name).__doc__ for name in names)


def test_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\nfrom moebius import capture\n@capture\ndef step(x):\n    y = x + 1\n    return y * 2\n"
        "print(step(torch.ones(2)), sys.argv[1:])\n"
    )
    words = [sys.executable, "-m", "moebius", "explain", "--step", str(script), "--step", "3"]
    done = subprocess.run(words, input="s\nlocals\nq\n", capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "['--step', '3']" in done.stdout and "[2 of 2] script.py:6 in step" in done.stdout
    assert "y = float32[2], node add" in done.stdout and "Runs as one graph" not in done.stdout


def test_help_has_a_line_for_each_command(recordings: list[Recording]) -> None:
    capture(straight, backend="eager")(torch.ones(2))
    text = told(recordings, "help; help n; help nothing")
    for name in Walk(recordings, io.StringIO(), io.StringIO()).get_names():
        if name.startswith("do_") and len(name) > 5 and name != "do_EOF":
            assert f"\n{name[3]}" in text and name[4:] in text
    assert "End of the input" not in text and text.count("to the next line of this function") == 2
    assert "no command 'nothing'" in text


def test_a_continuation_begins_at_the_users_line(recordings: list[Recording]) -> None:
    """Not at the ``def``, where the instructions stand that put its frame together again."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        for _ in range(2):
            with open(os.devnull) as file:
                y = y * len(file.read(0) + "a")
        return y

    capture(step, backend="eager")(torch.ones(2))
    first = step.__code__.co_firstlineno
    assert len(recordings) > 2
    assert all(moment.line > first for recording in recordings for moment in recording.moments)
