"""What pip installs is what was tested: bounds and extras."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from moebius.versions import BESIDE_TRITON, NEWEST_TORCH, OLDEST_TORCH, RELEASES, TORCHES, dotted, works_on

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_torch_is_bounded_by_what_was_tested() -> None:
    """A torch beyond it is added to versions.py and here, when `make torches` says of it what it says of the others."""
    after = (NEWEST_TORCH[0], NEWEST_TORCH[1] + 1)
    assert f"torch>={dotted(OLDEST_TORCH)},<{dotted(after)}" in PROJECT["dependencies"]
    assert f"torch>={dotted(OLDEST_TORCH)},<{dotted(after)}" in works_on()
    oldest, newest = min(TORCHES.values()), max(TORCHES.values())
    after = (newest[0], newest[1] + 1)
    assert PROJECT["optional-dependencies"]["triton"] == [f"triton>={dotted(oldest)},<{dotted(after)}"]
    assert set(BESIDE_TRITON) <= set(TORCHES.values())


def test_what_counts_as_tested_was_tried() -> None:
    """By `make torches`, or by the tests at each commit."""
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d[\d.]+)(?:\+\w+)? \|", page.partition("\n## ")[0], re.M)
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(RELEASES) == {*rows, pinned}


def test_what_is_imported_is_a_dependency() -> None:
    """And what is a dependency is imported."""
    imported: set[str] = set()
    for package in ("capture", "interpreter", "kernels", "lowering"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                imported |= {name.partition(".")[0] for name in names}

    def named(requirements: Iterable[str]) -> set[str]:
        return {re.split(r"[<>=\[]", one)[0].replace("-", "_") for one in requirements}

    extras = named(itertools.chain(*PROJECT["optional-dependencies"].values()))
    brought = {"moebius", "sympy"}  # (torch brings sympy: its symbolic sizes are expressions of it)
    assert imported - sys.stdlib_module_names - brought - extras == named(PROJECT["dependencies"])


def test_the_extras_that_are_named_exist() -> None:
    """In the Makefile, in messages, in the docs."""
    named: set[str] = set()
    files = [ROOT / "Makefile", ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "capture").rglob("*.py")]
    for path in files:
        for found in re.findall(r"(?:moebius|\"\.)\[([a-z,]+)\]", path.read_text()):
            named |= set(found.split(","))
    assert {"export", "triton", "examples", "dev"} <= named <= set(PROJECT["optional-dependencies"])
