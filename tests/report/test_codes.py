"""Each place that breaks a graph has a code; codes, help and page say the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moebius import explain
from moebius.cli import main
from moebius.report.codes import CODES, UNKNOWN, by_name, code_of, help_text, page

ROOT = Path(__file__).resolve().parents[2]
RAISES = {"Break", "Body", "GraphBreak", "UnfollowedTensor"}
# first arguments that are names: constants of their module, or a reason that stands elsewhere
HANDED_ON = {"stop.reason", "self.why.reason", "body.reason", "self.what", "what", "*changes", "REASON", "*BREAKPOINT"}


def reasons() -> Iterator[tuple[str, str]]:
    """(place, reason) of each break in capture/; of an f-string with a * for what varies."""
    for path in sorted((ROOT / "capture").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("REASON", "BREAKPOINT"):
                value = ast.literal_eval(node.value)
                yield place, value if isinstance(value, str) else value[0]
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in RAISES:
                continue
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "reason"), None)
            if isinstance(first, ast.Constant):
                yield place, first.value
            elif isinstance(first, ast.JoinedStr):
                yield place, "".join(v.value if isinstance(v, ast.Constant) else "*" for v in first.values)
            else:
                assert first is not None and ast.unparse(first) in HANDED_ON, (place, ast.unparse(node))


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
