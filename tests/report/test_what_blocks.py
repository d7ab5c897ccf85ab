"""Of experts that stay a loop, the report shows the expressions that keep them one: all of them, and no other.

Statements of all kinds are put into loops over experts, written in several ways. What the report shows is then taken
out of the program itself: it must be one operator without these lines, and still a loop where one of them stays.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture, explain
from moebius.report import Report, stays
from moebius.report.page import page
from moebius.report.text import render

LOOPS = {
    "where": """\
    for e, expert in enumerate(experts):
        token, slot = torch.where(chosen == e)
        {begin}
        h = expert.up(x[token])
        {inner}
        h = F.silu(h)
        y = expert.down(h)
        {rows}
        out.index_add_(0, token, y * weight[token, slot, None])
        {end}
""",
    "hits": """\
    mask = F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for e in mask.sum((1, 2)).nonzero()[:, 0].tolist():
        slot, token = torch.where(mask[e])
        {begin}
        h = experts[e].up(x[token])
        {inner}
        h = F.silu(h)
        y = experts[e].down(h)
        {rows}
        out[token] += y * weight[token, slot, None]
        {end}
""",
    "dense": """\
    gates = torch.zeros(len(x), len(experts)).scatter(1, chosen, weight)
    token = torch.arange(len(x))
    for e, expert in enumerate(experts):
        {begin}
        h = expert.up(x)
        {inner}
        h = F.silu(h)
        y = expert.down(h)
        {rows}
        out = out + y * gates[:, e, None]
        {end}
""",
}
HEAD = """\
import random
import torch
import torch.nn.functional as F

def step(x, router, experts):
    weight, chosen = router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
"""
STATEMENTS = {  # each may be taken out
    "inner": [
        "h = h - h.mean(0)",
        "h = h.cumsum(0)",
        "h = h.flip(0)",
        "h = F.batch_norm(h, None, None, training=True)",
        "h = h * out.sum()",
        "h = h.clamp(max=50.0)",
        "h = torch.sort(h, dim=0).values",
    ],
    "rows": ["y = y - y.max()", "y = y.roll(1, 0)", "y = y + out[token]", "y = y * 2.0", "y = y / (1 + y.norm())"],
    "end": [
        "x = x + 0.1 * out.mean()",
        "out = out.relu()",
        "weight = weight * (1 + out.mean())",
        "out = out - out.mean(0)",
        "random.seed(3); weight = weight * (1 + random.random())",
    ],
}
SINGLE = [(place, one) for place, many in STATEMENTS.items() for one in many]
PAIRS = [pair for pair in itertools.combinations(SINGLE, 2) if pair[0][0] != pair[1][0]]
UNANSWERED = [("hits", "y = y / (1 + y.norm())", "x = x + 0.1 * out.mean()")]  # the proof's own words are shown


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks how fast a machine is."""
    monkeypatch.setattr(stays, "LOOKED_FOR", 600.0)


def reported(text: str, path: Path) -> Report:
    path.write_text(text)
    linecache.checkcache(str(path))
    namespace: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), namespace)
    torch.manual_seed(0)
    experts = nn.ModuleList(Expert() for _ in range(3))
    return explain(capture(namespace["step"]))(torch.randn(12, 8), nn.Linear(8, 3), experts)


def blocking_lines(report: Report) -> list[int]:
    found = [why for why in report.stays.values() if why.all_of_it]
    return sorted({excerpt.line for why in found for excerpt in why.excerpts})


def is_lowered(report: Report) -> bool:
    return bool(report.lowered) and report.lowered == len(report.expert_regions)


@pytest.mark.share(16)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("planted", [*((one,) for one in SINGLE), *PAIRS], ids=lambda p: " AND ".join(s for _, s in p))
def test_what_is_shown_is_what_blocks(loop: str, planted: tuple, tmp_path: Path) -> None:
    text = HEAD + LOOPS[loop].format_map(dict.fromkeys(("begin", "inner", "rows", "end"), "pass") | dict(planted))
    lines = [*text.splitlines(), "    return out"]
    report = reported("\n".join(lines), tmp_path / "whole.py")
    numbers = blocking_lines(report)
    if report.breaks or is_lowered(report) or not report.expert_regions:
        return  # there is nothing to say, or it is said of the breaks
    if (loop, *(one for _, one in planted)) in UNANSWERED:
        assert not numbers
        return

    def without(gone: Iterable[int]) -> Report:
        kept = ["        pass" if number in gone else line for number, line in enumerate(lines, 1)]
        return reported("\n".join(kept), tmp_path / "less.py")

    assert numbers, report.expert_regions
    assert is_lowered(without(numbers)), [lines[number - 1] for number in numbers]
    for stays_in in numbers if len(numbers) > 1 else ():
        assert not is_lowered(without(set(numbers) - {stays_in})), (lines[stays_in - 1], numbers)


UNROLLED = """\
import logging
import torch
W_EDD = torch.ones(3, 8, 8)

def step(x, router, experts):
    weight, chosen = router(x).softmax(-1).max(-1)
    out, seen, chosen = torch.zeros_like(x), [], {rows}
    for e in range(len(experts)):
        token = torch.where(chosen == e)[0]
        {skip}
        h = {product}
        {effect}
        out.index_add_(0, token, {result})
    return out
"""
WRITTEN = {
    "modules": ("torch.relu(experts[e].up(x[token]))", "experts[e].down(h) * weight[token, None]"),
    "stacked": ("x[token] @ W_EDD[e]", "h"),
}
SKIPS = ["pass", "if len(token) == 0: continue", "if token.numel() < 1: continue"]
EFFECTS = [
    'print("expert", e)', "seen.append(e)", "seen.append(len(token))", 'logging.getLogger("x").warning("e %d", e)',
    "if len(token) > 99: break", "experts[e].calls = e",
]  # fmt: skip


@pytest.mark.share(6)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("hit", ["all", "some"])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("skip", SKIPS)
def test_what_a_loop_was_unrolled_for_is_named_alone(
    skip: str, effect: str, hit: str, written: str, tmp_path: Path
) -> None:
    """A loop with it is captured as its iterations in a row: what stands between these is no reason."""
    rows = {"all": "chosen", "some": "chosen.clamp(max=1)"}[hit]
    product, result = WRITTEN[written]
    lines = UNROLLED.format(skip=skip, effect=effect, rows=rows, product=product, result=result).splitlines()
    report = reported("\n".join(lines), tmp_path / "whole.py")
    if report.breaks or is_lowered(report) or not report.expert_regions:
        return
    (why,) = report.stays.values()
    named = {excerpt.line for excerpt in why.excerpts}
    for gone in (named, *({one} for one in named if len(named) > 1)):
        less = ["        pass" if number in gone else line for number, line in enumerate(lines, 1)]
        assert is_lowered(reported("\n".join(less), tmp_path / "less.py")) == (gone == named), (why, gone)


@pytest.mark.parametrize("effect", ['print("expert", e)', "seen.append(len(token))", "seen.append(h.sum().item())"])
def test_what_blocks_an_unrolled_loop_is_not_what_it_was_unrolled_for(effect: str, tmp_path: Path) -> None:
    """Without that the loop would be one node, and as little an operator; with it, it is one without the other."""
    blocks = "; h = h / (out.abs().sum() + 1)"
    text = UNROLLED.format(
        skip="if len(token) == 0: continue", rows="chosen", product="torch.relu(experts[e].up(x[token]))",
        result="experts[e].down(h) * weight[token, None]", effect=effect + blocks,
    )  # fmt: skip
    (why,) = reported(text, tmp_path / "whole.py").stays.values()
    assert [excerpt.expression for excerpt in why.excerpts] == ["h / (out.abs().sum() + 1)"] and why.all_of_it
    assert "print" not in why.why and "list" not in why.why and "number" not in why.why
    assert is_lowered(reported(text.replace(blocks, ""), tmp_path / "less.py"))


def test_every_kind_of_loop_has_something_to_say(tmp_path: Path) -> None:
    """The text, the page and the data have it; and each time only what stands in the way."""
    for loop, written in LOOPS.items():
        planted = {"begin": "pass", "inner": "h = h.cumsum(0)", "rows": "y = y * 2.0", "end": "y.sum()"}
        report = reported(HEAD + written.format_map(planted) + "    return out", tmp_path / f"{loop}.py")
        (why,) = report.stays.values()
        assert [excerpt.expression for excerpt in why.excerpts] == ["h.cumsum(0)"] and why.all_of_it
        assert "without this it would be one operator" in " ".join(render(report, 200).split())
        assert "without this it would be one operator" in page([report])
        assert [one["text"] for one in report.to_dict()["expert_regions"][0]["blocking"]] == ["h = h.cumsum(0)"]


def test_without_time_the_report_says_what_the_proof_says(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stays, "LOOKED_FOR", 0.0)
    planted = {"begin": "pass", "inner": "h = h.cumsum(0)", "rows": "pass", "end": "pass"}
    report = reported(HEAD + LOOPS["where"].format_map(planted) + "    return out", tmp_path / "where.py")
    (why,) = report.stays.values()
    assert not why.all_of_it and "cumsum" in why.why and why.excerpts[0].text == "h = h.cumsum(0)"
    assert report.to_dict()["expert_regions"][0]["blocking"] == []


def test_what_is_taken_out_leaves_the_captured_graph_as_it_was(tmp_path: Path) -> None:
    planted = {"begin": "pass", "inner": "h = h.cumsum(0)", "rows": "pass", "end": "x = x + 0.1 * out.mean()"}
    for loop, written in LOOPS.items():
        report = reported(HEAD + written.format_map(planted) + "    return out", tmp_path / f"{loop}.py")
        before = [str(module.graph) for graph in report.graphs for module in graph.gm.modules()]
        assert len(report.stays) == len(report.expert_regions)
        assert [str(module.graph) for graph in report.graphs for module in graph.gm.modules()] == before
