"""Each place that breaks a graph has a code; codes, help and page say the same."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebius import explain
from moebius.cli import main
from moebius.report.codes import CODES, UNKNOWN, by_name, code_of, help_text, page

ROOT = Path(__file__).resolve().parents[2]
RAISES = {"Break", "Body", "GraphBreak", "UnfollowedTensor"}
CARRIED = {"stop.reason", "self.why.reason", "body.reason", "said"}  # of a break that was made elsewhere
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "capture").rglob("*.py"))}


def texts(node: ast.expr) -> list[str]:
    """The strings that this can be, with a * for what varies in an f-string; of a tuple the first item's."""
    if isinstance(node, ast.Tuple):
        return texts(node.elts[0])
    if isinstance(node, ast.JoinedStr):
        parts = [[str(v.value)] if isinstance(v, ast.Constant) else varying(v) for v in node.values]
        return ["".join(chosen) for chosen in itertools.product(*parts)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def varying(node: ast.expr) -> list[str]:
    name = ast.unparse(node.value) if isinstance(node, ast.FormattedValue) else ""
    return of_classes(name.removeprefix("self.")) if name.startswith("self.") else ["*"]


def of_classes(name: str) -> list[str]:
    """What classes of capture/ have as this attribute."""
    found = []
    for path, tree in TREES.items():
        for node in (line for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for line in kind.body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                found += texts(node.value) or constants(ast.unparse(node.value), path)
    return found


def constants(name: str, path: Path) -> list[str]:
    """What is assigned to a name in a file."""
    assigned = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Assign)]
    return [each for node in assigned if ast.unparse(node.targets[0]) == name for each in texts(node.value)]


def of_callers(name: str, path: Path) -> list[str]:
    """What is given for the first parameter, of that name, of the methods in a file."""
    functions = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef)]
    takes = {node.name for node in functions if name in [a.arg for a in node.args.args[1:2]]}
    calls = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr in takes]
    return [each for node in named for each in texts(node.args[0])]


def reasons() -> Iterator[tuple[str, str]]:
    """(place, reason) of each break in capture/."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in RAISES:
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "reason"), None)
            assert first is not None, place
            name = ast.unparse(first).strip("*")
            if name in CARRIED:
                continue
            known = texts(first) or (
                of_classes(name.partition(".")[2]) if name.startswith(("self.", "cls."))
                else constants(name, path) or of_callers(name, path)
            )  # fmt: skip
            assert known, (place, ast.unparse(node))
            yield from ((place, each) for each in known)


def test_every_break_has_a_code() -> None:
    found = list(reasons())
    missing = [(place, reason) for place, reason in found if code_of(reason) is UNKNOWN]
    assert len(found) > 150 and not missing


def test_numbers_are_given_once() -> None:
    numbers = [code.number for code in CODES]
    assert numbers == sorted(set(numbers)) and numbers[0] == 1
    every = [reason for code in CODES for reason in code.reasons]
    assert len(every) == len(set(every))
    assert all(code.meaning and code.change and bool(code.before) == bool(code.after) for code in CODES)


def test_the_page_is_the_registry() -> None:
    assert (ROOT / "docs" / "break-codes.md").read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("word", ["MB002", "mb2", "2"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", word]) == 0
    code = by_name("MB002")
    assert code is not None and capsys.readouterr().out.strip() == help_text(code)


def test_help_of_a_code_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "MB999"]) == 2
    assert "MB001" in capsys.readouterr().err


def test_a_report_names_the_code() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0) and id(x) > 0:
            x = x + 1
        return x

    report = explain(step)(torch.ones(3))
    assert report.breaks and all(by_name(item.code) for item in report.breaks)
    for item in report.breaks:
        assert f"[{item.code}]" in str(report) and f'"code": "{item.code}"' in report.to_json()
