"""The report as text: every fact is in it, plain when nobody's terminal reads it."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moebius import capture, explain
from moebius.api import captured_of, report_of
from moebius.bytecode.user_code import is_ours
from moebius.report import Guard, Report
from moebius.report.records import Recompile
from moebius.report.text import render
from moebius.report.words import byte_size, duration, percent, plural, short


def test_plain_when_printed_to_a_pipe(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    print(report)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "1 graph · 1 graph break · 3 guards · 1 of 2 expert regions lowered" in printed
    assert "90.0% of 100 instructions captured" in printed


def test_of_all_calls_no_share_is_said_where_native_parts_were_not_counted(report: Report) -> None:
    report.calls = 3, 4, 1
    text = render(report, width=120)
    assert report.breaks and "100 instructions captured; what ran natively was not counted" in text
    report.breaks = []
    assert "90.0% of 100 instructions captured" in render(report, width=120)


def test_says_where_why_and_what_to_do_of_each_break(report: Report) -> None:
    text = render(report, width=120)
    for fact in (
        "train.py:15 in step",
        "data-dependent branch",
        "the branch needs the value",
        "hint  use torch.where",
        "12.5 µs",
    ):
        assert fact in text
    assert "POP_JUMP_FORWARD_IF_FALSE" in text


def test_says_which_loop_was_refused_and_why(report: Report) -> None:
    text = render(report, width=140)
    assert "2.5 MiB" in text
    assert "train.py:13 stays a loop: carried value is read before it is written, line 13" in text


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_fits_the_terminal(report: Report, width: int) -> None:
    assert max(map(len, render(report, width=width).splitlines())) <= width


def test_colour_changes_no_word(report: Report) -> None:
    import re

    colored = render(report, width=110, color=True)
    assert "\x1b[" in colored
    words = re.sub(r"\x1b\[[0-9;]*m", "", colored).split()
    assert words == render(report, width=110).split()


def test_coverage_says_what_it_counts_once(report: Report) -> None:
    assert "counted once" not in render(report)
    report.in_loops = {("step.py", "step", 1): 7}
    assert "7 of them" in render(report) and "counted once" in render(report)


def test_the_verdict_comes_first(report: Report) -> None:
    assert render(report, width=300).splitlines()[1] == report.verdict
    assert report.verdict.startswith("Runs as 1 graph; break") and "train.py:15" in report.verdict
    report.breaks.clear()
    assert report.verdict.startswith("Runs as one graph; 1 of 2 expert loops stays a loop")
    report.status, report.why = "native", "it was captured 16 times"
    assert report.verdict == "NOT captured: it was captured 16 times"


def test_an_empty_report_still_prints() -> None:
    assert "0 graphs · 0 graph breaks · 0 guards" in str(Report())


def test_the_break_and_its_line_reach_source_lines(report: Report, source_file: str) -> None:
    assert report.source_lines()[source_file] == {
        6: "captured",
        8: "captured",
        13: "captured",
        14: "captured",
        15: "break",
        16: "native",
    }


@pytest.mark.parametrize(
    ("share", "said"), [(None, "–"), (0.0, "0%"), (1.0, "100%"), (0.99999, "99.9%"), (0.00001, "0.1%"), (0.5, "50.0%")]
)
def test_percent_never_rounds_to_all_or_nothing(share: float | None, said: str) -> None:
    assert percent(share) == said


def test_sizes_times_and_numbers() -> None:
    assert [byte_size(n) for n in (None, 0, 1023, 1024, 2_637_888, 3 << 40)] == [
        "–",
        "0 B",
        "1023 B",
        "1.0 KiB",
        "2.5 MiB",
        "3072.0 GiB",
    ]
    assert [duration(s) for s in (None, 21e-9, 12.5e-6, 0.0123, 1.5)] == ["–", "21 ns", "12.5 µs", "12.3 ms", "1.50 s"]
    assert [plural(1, "graph"), plural(2, "graph")] == ["1 graph", "2 graphs"]
    assert short("/usr/lib/site-packages/transformers/models/a/b.py") == "transformers/…/b.py"
    assert short("/usr/lib/site-packages/torch/nn/a.py") == "torch/nn/a.py"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variable", "colored"), [("", True), ("1", False)])
def test_no_color(report: Report, monkeypatch: pytest.MonkeyPatch, variable: str, colored: bool) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert ("\x1b" in str(report)) == colored


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_a_place_is_one_line(report: Report, width: int) -> None:
    """Of a file whose path is longer than there is room for, the end."""
    file = "/home/somebody/a_long_way/to/a_package/its_experts.py"
    report.guards = [Guard("L['model'].layers", "a list", file, 1234, 1.0)]
    report.expert_regions[0].file, report.expert_regions[0].line = file, 56
    text = render(report, width)
    assert "its_experts.py:1234 " in text and "its_experts.py:56 " in text


@pytest.mark.parametrize("width", [80, 110, 200])
def test_a_kind_of_guards_is_one_line(report: Report, width: int) -> None:
    tensor = "float32[8, 8] on cpu, requires grad, strides (8, 1)"
    report.guards = [Guard(f"L['model'].a_long_name_{i}[{i}].weight", tensor, "a.py", 1) for i in range(9)]
    same = "the same object as in the call before"
    report.guards += [Guard(f"G(module_{i})['x']", same, "train.py", 12, 1.0) for i in range(9)]
    lines = render(report, width).splitlines()
    begin = next(i for i, line in enumerate(lines) if "what they look at" in line)
    table = lines[begin + 2 : next(i for i in range(begin, len(lines)) if "more guard" in lines[i])]
    assert len(table) == 8 and all(line.split()[-1] in ("–", "ns") for line in table)


def test_a_recursion_in_a_call_stack_is_one_line(report: Report) -> None:
    (item,) = report.breaks
    item.stack = (("a.py", 9, "step"), *[("a.py", 5, "walk")] * 40, (item.file, item.line, item.function))
    text = render(report, width=110)
    assert text.count("in walk") == 1 and "a.py:5 in walk ×40" in text and "a.py:9 in step\n" in text


def test_what_a_reader_is_told_of_breaks_that_go_and_of_guards(report: Report) -> None:
    gone = Recompile("graph break", "method in C", "none", "train.py", 3)
    assert gone.change == "the graph break (method in C) was not met again"
    assert Recompile("k", "1", "9", "train.py", 3).change == "k was 1, is 9"
    branch = Recompile("branch on data", "goes False", "True", "train.py", 3)
    assert branch.change == "branch on data: the capture goes False, the data True"


def test_a_step_without_an_operator_in_a_graph_is_not_called_captured():
    report = explain(lambda x: pickle.loads(pickle.dumps(x)))(torch.ones(2))
    assert report.breaks and report.verdict.startswith("Runs as Python, without a tensor operation in a graph; slowest")
    assert explain(lambda x: x)(torch.ones(2)).verdict == "Captured, without a tensor operation in it"
    text = str(report)
    assert "all guards together" in text or "that were timed together" in text


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield doubled(x)


async def later(x: torch.Tensor) -> torch.Tensor:
    return doubled(x)


@pytest.mark.parametrize("function", [rows, later])
def test_a_generator_or_coroutine_function_is_said_to_run_as_python(function: Any) -> None:
    """Calling it runs nothing, and what runs later is not captured; the functions that it calls are."""
    captured = capture(function)
    for report in (explain(captured)(torch.ones(2)), report_of(captured_of(captured))):
        assert report.status == "native" and "runs as Python" in report.verdict, report.verdict
        assert report.captured_share is None and "it runs as Python" in render(report)
        if function is later and asyncio.iscoroutine(report.result):
            report.result.close()


def test_what_the_step_makes_is_named_at_its_line() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        class Local:
            factor = 3

        waiting = later(x)
        waiting.close()
        return x * Local.factor

    found = {item.reason: item for item in explain(step)(torch.ones(2)).breaks}
    line = step.__code__.co_firstlineno
    assert (found["class made in the step"].line, found["coroutine"].line) == (line + 1, line + 4)
    assert found["coroutine"].excerpt is not None and found["coroutine"].excerpt.expression == "later(x)"


def test_no_place_or_name_of_moebius_is_shown() -> None:
    """Neither of what calls a captured module, nor of what stands in for a library's code."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    reports = [explain(capture(one))(torch.ones(2)) for one in (model, step)]
    guards = [guard for report in reports for guard in report.guards]
    assert guards and not [guard for guard in guards if is_ours(guard.file) or guard.source.startswith("Range.")]
