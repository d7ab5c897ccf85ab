"""A graph break shows the user's line with the expression underlined, and where the values in it come from."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from json_schema import faults
from rich.cells import cell_len

from moebius import GraphBreakError, capture, disable, explain
from moebius.bytecode.expressions import excerpt_of
from moebius.bytecode.user_code import is_ours
from moebius.report import GraphBreak, Report
from moebius.report.schema import SCHEMA
from moebius.report.text import render

CONFIG = SimpleNamespace(limit=3)


@disable
def native(*values: Any) -> int:
    return len(values)


def helper(h: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    loss = h.sum()
    native(loss, model)
    return loss


def step(x: torch.Tensor, model: torch.nn.Module) -> Any:
    y = x * 2
    z = native(y, x) + 1; z = z + native(  # noqa: E702
        "ä", x)  # fmt: skip
    k = (x > 0).sum().item()
    rows = [0] * k
    found = helper(y, model)
    größe = {"ä": native(CONFIG.limit)}
    return found, rows, größe, z


def explained() -> Report:
    return explain(capture(step))(torch.ones(3), torch.nn.Linear(3, 3))


def by_expression(report: Report) -> dict[str, GraphBreak]:
    assert all(item.excerpt is not None for item in report.breaks)
    return {item.excerpt.expression: item for item in report.breaks if item.excerpt is not None}


def test_the_expression_that_breaks_is_underlined() -> None:
    found = by_expression(explained())
    once = ["native(y, x)", "native(  # noqa: E702", "[0] * k", "native(CONFIG.limit)", "native(loss, model)"]
    assert {*found} == {*once}
    for item in found.values():
        excerpt = item.excerpt
        assert excerpt is not None and excerpt.line == item.line and excerpt.file == item.file
        assert excerpt.text == excerpt.text.strip() and excerpt.underline.count("^") == len(excerpt.expression)


def test_where_the_values_come_from() -> None:
    found = by_expression(explained())
    assert [said.partition(" by ")[2] for said in found["native(y, x)"].origins] == ["`x * 2`", ""]
    assert found["native(y, x)"].origins[1] == "x: an argument of step"
    loss, model = found["native(loss, model)"].origins
    assert loss.startswith("loss: computed at test_excerpts.py:") and loss.endswith("by `h.sum()`")
    assert model.startswith("model: an argument")
    (size,) = found["[0] * k"].origins
    assert size.startswith("k: computed at") and size.endswith("by `(x > 0).sum().item()`")
    (x,) = found["native(  # noqa: E702"].origins
    assert x == "x: an argument of step"
    assert "m_" not in str([item.origins for item in found.values()])


def test_the_error_of_fullgraph_has_it_too() -> None:
    with pytest.raises(GraphBreakError, match=r"\n    native\(loss, model\)\n    \^{19}\n"):
        capture(helper, fullgraph=True)(torch.ones(3), torch.nn.Linear(3, 3))


def test_a_break_without_an_open_frame_has_a_line() -> None:
    """What is raised through all frames: its place is the line that raises it."""

    def raises(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        {}["missing"]
        return y

    captured = capture(raises)
    with pytest.raises(KeyError):
        explain(captured)(torch.ones(3))
    with pytest.raises(GraphBreakError, match="KeyError") as caught:
        capture(raises, fullgraph=True)(torch.ones(3))
    found = caught.value.graph_break
    assert found.file == __file__ and found.excerpt is not None and found.excerpt.expression == '{}["missing"]'


def test_in_json_and_html(tmp_path: Path) -> None:
    report = explained()
    data = json.loads(report.to_json())
    assert not faults(data, SCHEMA)
    first = data["breaks"][0]
    assert first["excerpt"]["text"][first["excerpt"]["begin"] : first["excerpt"]["end"]] == "native(y, x)"
    assert first["origins"][1] == "x: an argument of step" and first["change"]
    html = report.to_html(tmp_path / "report.html").read_text()
    assert "<u>native(loss, model)</u>" in html and "x: an argument of step" in html


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("before", [0, 30, 200])
def test_carets_stand_below_the_expression(tmp_path: Path, width: int, before: int) -> None:
    """In lines of any length, and behind characters of two cells."""
    path = tmp_path / "long.py"
    path.write_text(f"def run(x, native):\n    y = '{'宽' * before}', native(x), {'1, ' * 60}\n    return x\n")
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    text = render(explain(namespace["run"])(torch.ones(3), native), width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    line, carets = next(
        (one, two) for one, two in zip(text.splitlines(), text.splitlines()[1:], strict=False) if "^^^" in two
    )
    at = cell_len(line[: line.index("native(x)")])
    assert carets.index("^") == at and carets.count("^") == len("native(x)")


def test_no_source_no_excerpt() -> None:
    assert excerpt_of(("nowhere.py", 3, "f")) is None
    code = compile("f(x)", "<nowhere>", "eval")
    from moebius.bytecode.expressions import Place

    assert excerpt_of(Place(("<nowhere>", 1, "f"), code, 0)) is None


class Stored:
    def __init__(self) -> None:
        self.net, self.kept = torch.nn.Linear(3, 3), None


BELOW = {
    "json.dumps": lambda stored, x: (x * 2, json.dumps({"n": x.sum().item(), "m": [1]}))[0] + 1,
    "torch.func.vmap": lambda stored, x: torch.func.vmap(lambda row: (row * id(row)).sum() * 0)(x) + 1,
    "pickle": lambda stored, x: x * len(pickle.dumps([stored.net.in_features, SimpleNamespace()])),
}


@pytest.mark.parametrize("name", BELOW)
def test_a_break_below_a_librarys_call_is_at_the_users_line(name: str) -> None:
    """The line that can be changed; what the library calls stands below it, and no file of ours is told."""
    stored, x, step = Stored(), torch.ones(2, 3), BELOW[name]
    report = explain(lambda x: step(stored, x))(x)
    assert report.breaks
    for item in report.breaks:
        assert item.file == __file__ and item.line == step.__code__.co_firstlineno
        assert not any(is_ours(file) for file, _, _ in item.stack) and "capture/" not in str(report)


CAME_FROM = {
    "value = x + 1": "set at SCRIPT:SET by `x + 1`",
    "value = x.sum().item()": "set at SCRIPT:SET by `x.sum().item()`",
    "value, other = x + 1, x": "set at SCRIPT:SET",
    "for value in (x, x + 1): pass": "an argument of step, or set at SCRIPT:SET",  # (as the code says it)
    "value += 1": "set at SCRIPT:SET by `value += 1`",
    "pass": "an argument of step",
    "if flag: value = x * 3": "an argument of step, or set at SCRIPT:SET by `x * 3`",
    "value = x * 3 if flag else x": "set at SCRIPT:SET",
    "with torch.no_grad(): value = x + 1": "set at SCRIPT:SET by `x + 1`",
    "value: torch.Tensor = x.neg()": "set at SCRIPT:SET by `x.neg()`",
    "(value := x.neg())": "set at SCRIPT:SET",
    "value = {'a': x}": "set at SCRIPT:SET by `{'a': x}`",
}
SCRIPT = """\
import torch
from moebius import disable

@disable
def native(*values): return 0

def step(x, value, flag, y):
    y = y * 2
    {written}
    native(y)
    native({between})
    native(value)
    return y
"""


@pytest.mark.share(11)
@pytest.mark.parametrize("breaks", [1, 2])
@pytest.mark.parametrize("written", CAME_FROM)
def test_behind_breaks_a_value_is_told_by_the_statement_that_set_it(written: str, breaks: int, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(written=written, between="value" if breaks == 2 else "y"))
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    x = torch.ones(3)
    report = explain(capture(namespace["step"]))(x, x * 2, False, x)
    (item,) = [one for one in report.breaks if one.line == 12]
    (said,) = [one for one in item.origins if one.startswith("value: ")]
    assert said == "value: " + CAME_FROM[written].replace("SCRIPT", "script.py").replace("SET", "9")


def saves(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x + 1
    with (
        open("/dev/null", "w") as ä,
        open("/dev/null", "w") as file,
    ):
        z = y + z
        file.write(str(z.shape) + ä.name)
    if x.ndim:
        with open("/dev/null") as file:
            z = z + 1
    return y + z


def test_a_with_statement_is_what_it_enters() -> None:
    """Not its body: its variables are none of the expression's."""
    report = explain(capture(saves))(torch.ones(3))
    entering = [item for item in report.breaks if "__e" in item.detail]
    assert len(entering) >= 4 and not [item.origins for item in entering if item.origins]
    expressions = {item.excerpt.expression for item in entering if item.excerpt is not None}
    named = "" if sys.version_info >= (3, 13) else " as ä,"  # which says of each what it enters, not of the statement
    assert expressions == {f'open("/dev/null", "w"){named}', 'open("/dev/null")'}
