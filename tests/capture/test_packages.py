"""What libraries ask of packages in the midst of a step: whether one is installed, and which version it has."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from packaging import version

from moebius import capture, stats

NAME = "a_package_that_is_not_there"


def asking(x):
    return x * 2 if importlib.util.find_spec(NAME) is None else x


def test_a_package_that_is_missing_and_then_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    step, x = capture(asking, backend="eager", fullgraph=True), torch.ones(2)
    assert [step(x).equal(asking(x)) for _ in range(3)] == [True] * 3 and stats(step).hits == 2
    (tmp_path / f"{NAME}.py").write_text("")
    importlib.invalidate_caches()
    step = capture(asking, backend="eager")
    assert asking(x).equal(x) and step(x).equal(x)
    (tmp_path / f"{NAME}.py").unlink()
    importlib.invalidate_caches()
    assert step(x).equal(x * 2) and step(x).equal(x * 2)


def test_one_that_is_installed_after_the_capture(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    step, x = capture(asking, backend="eager"), torch.ones(2)
    assert step(x).equal(x * 2)
    (tmp_path / f"{NAME}.py").write_text("")
    importlib.invalidate_caches()
    assert step(x).equal(x)


def test_without_the_guard_it_would_go_unnoticed(tmp_path, monkeypatch):
    monkeypatch.setattr("moebius.python.packages.is_missing", lambda name: True)
    with pytest.raises(AssertionError):
        test_one_that_is_installed_after_the_capture(tmp_path, monkeypatch)


def test_a_module_that_the_step_imports_by_hand(tmp_path, monkeypatch):
    """What the step has done to ``sys.path`` by then counts."""
    (tmp_path / f"{NAME}.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def step(x):
        sys.path.append(str(tmp_path))
        found = asking(x)
        sys.path.pop()
        return found

    captured, x = capture(step, backend="eager"), torch.ones(2)
    assert [captured(x).tolist() for _ in range(3)] == [step(x).tolist()] * 3 == [[1.0, 1.0]] * 3


def test_one_that_is_there_is_found_as_before():
    def step(x):
        return x * 2 if importlib.util.find_spec("torch") is not None else x

    captured, x = capture(step, backend="eager"), torch.ones(2)
    assert [captured(x).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3


def test_versions_are_compared_in_the_graph():
    required = ["2.0"]

    def step(x):
        return x * 2 if version.parse("2.13.0") >= version.parse(required[0]) else x

    captured, x, found = capture(step, backend="eager"), torch.ones(2), []
    captured(x)
    assert stats(captured).graphs == 1 and not stats(captured).breaks
    for text in ("2.0", "2.0", "2.14", "2.13.0rc1", "2.13.0.post1"):
        required[0] = text
        found.append((captured(x).tolist(), step(x).tolist()))
    assert all(a == b for a, b in found) and len({tuple(a) for a, _ in found}) == 2
    with pytest.raises(version.InvalidVersion, match="not a version"):
        required[0] = "not a version"
        capture(step, backend="eager")(x)
