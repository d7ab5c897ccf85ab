"""The report as HTML: well-formed, self-contained, complete, and nothing of the user's text becomes markup."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moebius.report import Guard, Report
from moebius.report.listing import by_function, fold, highlight, listings
from moebius.report.page import page

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Page(HTMLParser):
    """Collects tags and text; raises when tags do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID and tag != "path":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def parse(html: str) -> Page:
    parser = Page()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def parsed(report: Report, tmp_path: Path) -> Page:
    return parse(report.to_html(tmp_path / "sub" / "report.html").read_text(encoding="utf-8"))


def test_every_fact_is_on_the_page(parsed: Page) -> None:
    text = re.sub(r"\s+", " ", "".join(parsed.text))
    for fact in (
        "90.0%",
        "1/2",
        "2.5 MiB",
        "the branch needs the value of loss > 0",
        "use torch.where",
        "range(num_experts)",
        "carried value is read before it is written, line 13",
        "torch.zeros_like",
        "step_0",
        "matmul",
        "[6, 8]",
    ):
        assert fact in text, fact


def test_source_lines_are_coloured_by_how_they_ran(parsed: Page) -> None:
    rows = [attrs.get("class") for tag, attrs in parsed.tags if tag == "tr"]
    assert rows.count("captured") == 4
    assert rows.count("break") == 1
    assert rows.count("native") == 1
    assert rows.count("callout") == 1


def test_self_contained(parsed: Page) -> None:
    assert not [attrs for _, attrs in parsed.tags if "src" in attrs]
    assert all(str(attrs["href"]).startswith("#") for _, attrs in parsed.tags if "href" in attrs)
    assert "link" not in {tag for tag, _ in parsed.tags}


def test_user_text_stays_text(report: Report) -> None:
    report.breaks[0].detail = '<script>alert(1)</script> & "quotes"'
    report.guards[0].source = "<img onerror=x>"
    report.name = "<b>step</b>"
    parser = parse(page([report]))
    assert [tag for tag, _ in parser.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in parser.tags}
    assert "<b>step</b>" in "".join(parser.text)


def test_several_reports_on_one_page(report: Report) -> None:
    other = Report(name="second")
    parser = parse(page([report, other]))
    assert [attrs["id"] for tag, attrs in parser.tags if tag == "article"] == ["r0", "r1"]
    assert {"#r0", "#r1"} <= {attrs.get("href") for _, attrs in parser.tags}


def test_a_source_file_that_is_gone_leaves_the_rest(report: Report, source_file: str) -> None:
    Path(source_file).unlink()
    text = "".join(parse(page([report])).text)
    assert "data-dependent branch" in text


def test_lines_go_to_their_innermost_function() -> None:
    text = "def a():\n    x = 1\n    def b():\n        return x\n    return b\n\ny = a()\n"
    groups = by_function(text, {2: "captured", 4: "native", 7: "captured"})
    assert {name: lines for (name, _, _), lines in groups.items()} == {
        "a": {2: "captured"},
        "a.b": {4: "native"},
        "module level": {7: "captured"},
    }


def test_long_unmarked_runs_are_folded() -> None:
    lines: list[tuple[int, str, str | None]] = [(n, "", "captured" if n == 1 else None) for n in range(1, 30)]
    folded = fold(lines)
    assert folded.count(None) == 1 and len(folded) == 6
    assert fold(lines[:8]) == lines[:8]


def test_thousands_of_guards_stay_small_and_quick(report: Report) -> None:
    """As of a model of 24 layers. A row is made when somebody looks; the data of each is there, once. (0.7 s; the
    bound is for what grows with the square, not for slow machines.)"""
    report.guards = [
        Guard(f"L['model'].layers[{i}].weight", "float32[8, 8] on cpu, requires grad", report.file, i % 9 + 1, 2.0)
        for i in range(4000)
    ] * 2
    report.guards += [Guard(f"G(m{i})['x']", "== 1", report.file, 1) for i in range(40)]
    began = time.process_time()
    html = page([report])
    assert time.process_time() - began < 50 and len(html) < 1_000_000
    text = "".join(parse(html).text)
    data = json.loads(text[text.rindex('{"places":') : text.rindex("}") + 1])
    assert len(data["rows"]) == 4040 and [2, 4.0] == data["rows"][0][3:]
    assert html.count("<tr>") < 100


def test_a_function_is_coloured_as_in_its_file(source_file: str, report: Report) -> None:
    whole = highlight(Path(source_file).read_text())
    (step,) = [item for item in listings(report) if item.name == "step"]
    for entry in step.lines:
        assert entry is None or entry[1] == whole[entry[0] - 1]


def test_reports_of_one_name_are_told_apart(report: Report) -> None:
    contents = page([report, replace(report, calls=(3, 4, 1))]).partition("</nav>")[0]
    assert re.findall(r'<a href="#r\d">([^<]*)', contents) == ["step, this call: captured", "step, 3 of 4 calls hit"]
