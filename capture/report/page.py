"""The report as one self-contained HTML file: styles and script inside, nothing fetched, light and dark."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bytecode.expressions import Excerpt, excerpt_of
from ..guards.sources import as_written
from .codes import by_name
from .drawing import PHASES, drawing
from .groups import guard_groups
from .listing import Listing, listings
from .model import Findings
from .records import GraphBreak, counted
from .stays import Stays
from .words import (
    COUNTING_STOPPED,
    ONLY_CAPTURED,
    byte_size,
    counted_once,
    duration,
    percent,
    place,
    plural,
    region_row,
)

if TYPE_CHECKING:
    from moebius.lowering.graph import CapturedGraph, ExpertRegion

HOWS = {
    "captured": "in a graph",
    "opaque": "run by Python for a call that a graph makes",
    "native": "run by Python itself",
}
LISTINGS_OPEN = 3
TIMES = {  # what a part of a time is drawn as
    "capture": "capture",
    "capturing": "capture",
    "lowering": "lowering",
    "backend": "lowering",
    "guards and code": "rest",
    "running": "rest",
}
GROUPS_SHOWN = 12
CAUSES_SHOWN = 8  # rows of the timeline
NUMBER = ' class="num"'


def write(reports: Sequence[Findings], path: str | Path) -> Path:
    """Write one HTML file about all these reports; folders on the way are made. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(reports), encoding="utf-8")
    return path


def page(reports: Sequence[Findings]) -> str:
    """The whole document."""
    here = files(__package__)
    css = here.joinpath("page.css").read_text(encoding="utf-8")
    script = here.joinpath("page.js").read_text(encoding="utf-8")
    title = "moebius · " + ", ".join(report.name for report in reports)
    chapters = "\n".join(chapter(report, index) for index, report in enumerate(reports))
    contents = ""
    if len(reports) > 1:
        names = [report.name for report in reports]
        texts = [one.name if names.count(one.name) == 1 else f"{one.name}, {one.how_called}" for one in reports]
        contents = "".join(f'<a href="#r{index}">{escape(text)}</a>' for index, text in enumerate(texts))
        contents = f'<nav class="contents">{contents}</nav>'
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<header class="top">
{LOGO}<span class="brand">moebius</span><span class="about">capture report</span>
<span class="spring"></span><span class="about">{escape(versions())}</span>
<button id="theme" type="button" aria-label="switch between light and dark">◐</button>
</header>
{contents}
<main>
{chapters}
</main>
<script>
{script}</script>
</body>
</html>
"""


# one side, one edge: the band
LOGO = (
    '<svg class="logo" viewBox="0 0 48 24" aria-hidden="true"><path d="M24 12C18 3 12 3 9 3a9 9 0 0 0 0 18c3 0 9 0 15-9'
    's12-9 15-9a9 9 0 0 1 0 18c-3 0-9 0-15-9z" fill="none" stroke="currentColor"'
    ' stroke-width="3.4" stroke-linejoin="round"/></svg>'
)


def versions() -> str:
    """``Python 3.11.7 · torch 2.13.0`` of the process that writes the report."""
    said = [f"Python {platform.python_version()}"]
    for name in ("torch", "moebius"):
        try:
            said.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return " · ".join(said)


def chapter(report: Findings, index: int) -> str:
    """One report: summary first, then what a reader looks for next, each section left out when it has nothing."""
    where = f'<span class="place">{escape(place(report.file, report.line))}</span>' if report.file else ""
    sections = "".join(
        f'<section><h2>{title}<span class="count">{count}</span></h2>{content}</section>'
        for title, count, content in (
            ("Graph breaks", len(report.breaks), "".join(break_card(*each) for each in counted(report.breaks))),
            ("Expert regions", len(report.expert_regions), regions(report)),
            *source(report),
            ("Waits for the device", len(report.sync_points), sync_points(report)),
            ("Graphs", len(report.graphs), graphs(report)),
            ("Time", len(report.graphs), times(report)),
            ("Captured again", len(report.recompiles), recompiles(report)),
            ("Guards", len(report.guards), guards(report)),
        )
        if count
    )
    mood = "bad" if report.status == "native" or report.breaks else "good"
    return (
        f'<article id="r{index}"><h1>{escape(report.name)} {where}</h1>'
        f'<p class="verdict {mood}">{escape(report.verdict)}</p>'
        f'<div class="tiles">{tiles(report)}</div>{coverage(report)}{sections}</article>'
    )


def tiles(report: Findings) -> str:
    """The figures that a reader wants first."""
    regions = report.of_a_call(report.expert_regions)
    known = [one.saved_bytes for one in regions if one.saved_bytes is not None]
    costs = [guard.cost_ns for guard in report.of_a_call(report.guards) if guard.cost_ns is not None]
    made = [
        tile(*counted_as(report.graphs, "graph"), f"cold {duration(report.cold_seconds)}"),
        tile(
            *counted_as(report.breaks, "graph break"),
            "each with its line and a hint below" if report.breaks else report.how_called,
            "bad" if report.breaks or report.status == "native" else "good",
        ),
        captured_tile(report),
    ]
    if regions:
        mood = "good" if report.lowered == len(regions) else "bad"
        lowered = f"{report.lowered}/{len(regions)}"
        made.append(tile(lowered, "expert loops lowered", "to one grouped operator each", mood))
    if known:
        made.append(tile(byte_size(sum(known)), "kept for backward", "by the expert regions, parameters excluded"))
    checked = f"{duration(sum(costs) * 1e-9)} a call" if costs else "checked on each call"
    made.append(tile(*counted_as(report.guards, "guard"), checked))
    return "".join(made)


def counted_as(items: list[Any], noun: str) -> tuple[str, str]:
    """``("1", "graph")``, ``("2", "graphs")``."""
    count, _, noun = plural(len(items), noun).partition(" ")
    return count, noun


def captured_tile(report: Findings) -> str:
    share, total = report.captured_share, sum(report.coverage.values())
    if share is None and total:
        return tile(str(total), "instructions captured", ONLY_CAPTURED)
    return tile(percent(share), "captured", f"of {total} instructions that ran")


def tile(figure: str, label: str, note: str, mood: str = "") -> str:
    return (
        f'<div class="tile {mood}"><div class="figure">{escape(figure)}</div>'
        f'<div class="label">{escape(label)}</div><div class="note">{escape(note)}</div></div>'
    )


def coverage(report: Findings) -> str:
    """The stacked bar and its legend."""
    total = sum(report.coverage.values())
    if not total:
        return ""
    bars = "".join(
        f'<span class="{how}" style="flex-grow:{count}" title="{count} {how}"></span>'
        for how in HOWS
        if (count := report.coverage[how])
    )
    legend = "".join(
        f'<li><i class="{how}"></i><b>{report.coverage[how]}</b> {how}<span> {said}</span></li>'
        for how, said in HOWS.items()
        if report.captured_share is not None or how == "captured"
    )
    if report.in_loops:
        legend += f"<li><span>{counted_once(sum(report.in_loops.values()))}</span></li>"
    if report.counting_stopped:
        legend += f"<li><span>{COUNTING_STOPPED}</span></li>"
    label = "instructions by how they ran"
    return f'<div class="coverage" role="img" aria-label="{label}">{bars}</div><ul class="legend">{legend}</ul>'


def break_card(item: GraphBreak, count: int) -> str:
    stack = "".join(
        f'<li><span class="place">{escape(place(file, line))}</span> in {escape(function)}</li>'
        for file, line, function in item.stack
    )
    folded = (
        f'<details><summary>call stack</summary><ol class="stack">{stack}</ol></details>' if len(item.stack) > 1 else ""
    )
    cost = f'<span class="chip">{duration(item.cost_us * 1e-6)} natively</span>' if item.cost_us is not None else ""
    origins = "".join(f'<p class="origin"><b>where</b> {escape(said)}</p>' for said in item.origins)
    times = f' <b title="the same break, met {count} times">×{count}</b>' if count > 1 else ""
    return (
        f'<div class="card break"><div class="cardhead"><code class="chip">{item.code}</code>'
        f'<b>{escape(item.reason)}</b>{times}'
        f'<span class="place">{escape(place(item.file, item.line))}</span> in {escape(item.function)}'
        f'<code class="chip">{escape(item.instruction)}</code>{cost}</div>'
        f'{shown_excerpt(item.excerpt)}<p>{escape(item.detail)}</p>{origins}'
        f'<p class="hint"><b>hint</b> {escape(item.hint)}</p>{edited(item)}{example(item)}{folded}</div>'
    )


def shown_excerpt(excerpt: Excerpt | None) -> str:
    """The user's line with the expression underlined."""
    if excerpt is None:
        return ""
    before, after = excerpt.text[: excerpt.begin], excerpt.text[excerpt.end :]
    where = escape(place(excerpt.file, excerpt.line))
    inside = f"{escape(before)}<u>{escape(excerpt.expression)}</u>{escape(after)}"
    return f'<pre class="excerpt" title="{where}"><span class="number">{excerpt.line}</span>{inside}</pre>'


def edited(item: GraphBreak) -> str:
    """The user's line, and the line as it could be."""
    rows = "".join(
        f'<{tag} data-sign="{sign}"><span class="number">{number}</span>{escape(line) or " "}</{tag}>'
        for number, sign, line in (() if item.edit is None else item.edit.rows())
        for tag in ("del" if sign == "-" else "ins",)
    )
    return f'<pre class="edit" aria-label="suggested change">{rows}</pre>' if rows else ""


def example(item: GraphBreak) -> str:
    """What avoids breaks of this code."""
    known = by_name(item.code)
    if known is None:
        return ""
    lines = f"<pre>{escape(known.before)}\n→\n{escape(known.after)}</pre>" if known.before else ""
    title = "other ways" if item.edit else "the smallest change"
    return f"<details><summary>{title}</summary><p>{escape(known.change)}</p>{lines}</details>"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[tuple[str, str | float | None]]],
    numbers: Sequence[str] = (),
    kind: str = "",
) -> str:
    """A table. rows: (HTML, value to sort by) a cell. numbers: the columns that hold them."""
    classes = [NUMBER if column in numbers else "" for column in columns]
    titles = "".join(f"<th{css}>{escape(column)}</th>" for css, column in zip(classes, columns, strict=True))
    lines = []
    for row in rows:
        cells = "".join(
            f'<td{css} data-sort="{"" if key is None else escape(str(key))}">{content}</td>'
            for (content, key), css in zip(row, classes, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    inside = f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{inside}</table></div>'


def text_cell(text: str, css: str = "") -> tuple[str, str]:
    return (f'<span class="{css}">{escape(text)}</span>' if css else escape(text)), text


def regions(report: Findings) -> str:
    rows = []
    first = {region_row(region): region for region in reversed(report.expert_regions)}
    for row, count in Counter(map(region_row, report.expert_regions)).items():
        where, idiom, experts, top_k, lowered, kernel, saved, _ = row
        times = f' <b title="the same line, captured {count} times">×{count}</b>' if count > 1 else ""
        if lowered:
            became = ('<span class="pill good">one operator</span>', "0")
        else:
            stays = report.stays.get(row, Stays(""))
            lines = "".join(map(shown_excerpt, stays.excerpts))
            became = (f'<span class="pill bad">loop</span> {escape(stays.sentence)}{lines}', "1")
        became = (became[0] + proof(first[row]), became[1])
        loop = (f'<span class="place">{escape(where)}</span>{times}', where)
        written = map(text_cell, (idiom, experts, top_k))
        rows.append([loop, *written, became, text_cell(kernel, "mono"), text_cell(saved)])
    columns = ("loop", "written as", "experts", "top-k", "became", "kernel", "kept for backward")
    return table(columns, rows, numbers=("experts", "top-k", "kept for backward"))


def proof(region: ExpertRegion) -> str:
    """The steps that hold, each with what that says and the user's line."""
    if not region.proof:
        return ""
    count, before = len(region.proof), "" if region.lowered else ", before the one that fails"
    steps = "".join(
        f'<li><b>{escape(step.name)}</b> <span class="place">{escape(place(step.file, step.line))}</span><br>'
        f"{escape(step.holds)}</li>"
        for step in region.proof
    )
    return f"<details><summary>proof: {plural(count, 'step')} hold{before}</summary><ol>{steps}</ol></details>"


def sync_points(report: Findings) -> str:
    rows = []
    for (where, why, operator), count in Counter((p.place, p.why, p.operator) for p in report.sync_points).items():
        times = f" <b>×{count}</b>" if count > 1 else ""
        said = (escape(why) + shown_excerpt(excerpt_of(where)), why)
        rows.append([text_cell(place(*where[:2]), "place"), said, (f"{escape(operator)}{times}", operator)])
    left = f"<p>On a GPU the step waits there; not one CUDA graph: {escape(report.cuda_graph)}.</p>"
    return table(("line", "what", "operator"), rows) + left


def graphs(report: Findings) -> str:
    cards = []
    for graph in report.graphs:
        code = graph.gm.code.strip()
        cards.append(
            f'<details class="card graph"><summary class="cardhead"><b>{escape(graph.name)}</b>'
            f'<span class="place">{escape(place(graph.file, graph.line))}</span>'
            f'<span class="chip">{plural(graph.operations, "operation")}</span>'
            f'<span class="chip">{plural(graph.inputs, "input")}</span>'
            f'<span class="chip">cold {duration(graph.cold_seconds)}</span></summary>'
            f'{drawn(graph)}<details><summary>as FX code</summary><pre class="fx">{escape(code)}</pre></details>'
            "</details>"
        )
    return "".join(cards)


def drawn(graph: CapturedGraph) -> str:
    """What the script draws on, its buttons, and the data."""
    found = drawing(graph)
    count = Counter(PHASES[node[3]] for node in found["nodes"])
    phases = "".join(
        f'<button type="button" data-phase="{index}"><i class="{name}"></i>{count[name]} {name}</button>'
        for index, name in enumerate(PHASES)
        if count[name]
    )
    tools = "".join(
        f'<button type="button" data-key="{key}" aria-label="{said}">{shown}</button>'
        for key, shown, said in (("+", "+", "larger"), ("-", "−", "smaller"), ("0", "fit", "all of it"))
    )
    label = "the graph: drag or arrow keys to move, + and − to zoom, 0 for all of it"
    return (
        f'<div class="tools"><input class="search" type="search" placeholder="search operators and lines"'
        f' aria-label="search operators and lines">{phases}{tools}</div>'
        f'<canvas tabindex="0" role="img" aria-label="{label}"></canvas><div class="said" aria-live="polite"></div>'
        f'{template({**found, "phases": PHASES})}'
    )


def template(data: object) -> str:
    """Data for the script."""
    safe = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<template class="data">{escape(safe)}</template>'


def times(report: Findings) -> str:
    """Where the time went: of the call, of each graph's capture (on one scale), and of what runs natively in a call."""
    rows: list[tuple[str, dict[str, float], float]] = [("this call", report.seconds, 1.0)] if report.seconds else []
    most = max((graph.cold_seconds for graph in report.graphs), default=0.0)
    for graph in report.graphs:
        parts = graph.times or {"capture": graph.cold_seconds}
        rows.append((f"{graph.name} {place(graph.file, graph.line)}", parts, graph.cold_seconds / (most or 1.0)))
    native = {f"{place(b.file, b.line)} {b.reason}": (b.cost_us or 0.0) * 1e-6 for b, _ in counted(report.breaks)}
    if sum(native.values()):
        rows.append(("native parts of a call", native, 1.0))
    made = ""
    for name, parts, share in rows:
        bars = "".join(
            f'<span class="{TIMES.get(part, "native")}" style="flex-grow:{seconds / (sum(parts.values()) or 1.0):.4f}"'
            f' title="{escape(part)}: {duration(seconds)}"></span>'
            for part, seconds in parts.items()
        )
        said = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items() if part in TIMES)
        made += (
            f'<span class="place">{escape(name)}</span><div><div class="bar" style="width:{share * 100:.2f}%">{bars}'
            f'</div><span class="note">{escape(said or duration(sum(parts.values())))}</span></div>'
        )
    return f'<div class="card times">{made}</div>'


def times_again(report: Findings) -> str:
    """In which calls it was captured: a row for each cause, the calls from left to right, a mark where it was."""
    known = [item for item in report.recompiles if item.call]
    if not known:
        return ""
    last = max(report.calls[1] if report.calls else 0, *(item.call for item in known))
    causes: dict[str, list[tuple[int, str]]] = {"captured first": [(1, "call 1")]}
    for item in known:
        cause = as_written(item.guard)
        cause = cause if cause in causes or len(causes) < CAUSES_SHOWN else "others"
        causes.setdefault(cause, []).append((item.call, f"call {item.call}: {item.change}"))
    made = ""
    for cause, marks in causes.items():
        dots = "".join(
            f'<i tabindex="0" role="img" style="left:{100 * (call - 1) / max(last - 1, 1):.2f}%" title="{said}"'
            f' aria-label="{said}"></i>'
            for call, said in ((call, escape(said)) for call, said in marks)
        )
        made += f'<span class="mono" title="{escape(cause)}">{escape(cause)}</span><div class="track">{dots}</div>'
    return (
        f'<div class="card timeline">{made}<span></span>'
        f'<div class="ends"><span>call 1</span><span>call {last}</span></div></div>'
    )


def recompiles(report: Findings) -> str:
    rows = []
    for item in report.recompiles:
        others = "".join(f"<li>{escape(as_written(line))}</li>" for line in item.entries)
        older = f"<details><summary>each older capture</summary><ol>{others}</ol></details>" if others else ""
        rows.append(
            [
                text_cell(as_written(item.guard), "mono"),
                text_cell(as_written(item.old)),
                text_cell(as_written(item.new)),
                text_cell(place(item.file, item.line), "place"),
                text_cell(str(item.call or "–")),
                (escape(item.hint) + older, item.hint),
            ]
        )
    columns = ("guard", "was", "became", "asked at", "call", "hint")
    return times_again(report) + table(columns, rows, ("call",), "again")


def guards(report: Findings) -> str:
    """What they look at, the dearest first; then each of them, in rows that a script makes of compact data."""
    groups = guard_groups(report)
    summary: list[Sequence[tuple[str, str | float | None]]] = [
        [
            text_cell(as_written(group.owner), "mono"),
            (str(len(group.guards)), len(group.guards)),
            (duration(None if group.cost_ns is None else group.cost_ns * 1e-9), group.cost_ns),
        ]
        for group in groups[:GROUPS_SHOWN]
    ]
    if left := groups[GROUPS_SHOWN:]:
        count, cost = sum(len(group.guards) for group in left), sum(group.cost_ns or 0.0 for group in left)
        others = text_cell(f"{len(left)} others")
        summary.append([others, (str(count), count), (duration(cost * 1e-9), cost)])
    made = table(("what they look at", "guards", "a call"), summary, ("guards", "a call"), "sortable")
    places = {place(guard.file, guard.line): None for guard in report.guards}
    at = {where: index for index, where in enumerate(places)}
    same: Counter[tuple[str, str, int]] = Counter()
    costs: dict[tuple[str, str, int], float] = {}
    for guard in report.guards:
        key = guard.source, guard.check, at[place(guard.file, guard.line)]
        same[key] += 1
        costs[key] = costs.get(key, 0.0) + (guard.cost_ns or 0.0)
    rows = [
        [as_written(source), as_written(check), where, count, round(costs[source, check, where], 1)]
        for (source, check, where), count in same.items()
    ]
    find = '<input class="search" type="search" placeholder="search all guards" aria-label="search all guards">'
    return (
        f'{made}<details class="guards"><summary>each of them</summary>{find}<div class="rows"></div>'
        f'{template({"places": list(places), "rows": rows})}</details>'
    )


def source(report: Findings) -> list[tuple[str, int, str]]:
    """The section with the user's source lines; empty when no source file could be read."""
    made = listings(report)
    own = [item for item in made if not item.library]
    cards = "".join(listing_card(report, item, index < LISTINGS_OPEN) for index, item in enumerate(own))
    if rest := [item for item in made if item.library]:
        inside = "".join(listing_card(report, item, False) for item in rest)
        cards += f"<details><summary>{plural(len(rest), 'more function')} in libraries</summary>{inside}</details>"
    key = "".join(f'<li><i class="{how}"></i>{how}</li>' for how in (*HOWS, "break"))
    return [("Source", len(made), f'<ul class="legend">{key}</ul>{cards}')]


def listing_card(report: Findings, item: Listing, is_open: bool) -> str:
    """One function's lines, a colour a line, breaks and expert loops written under their line."""
    breaks: dict[int, list[GraphBreak]] = {}
    for found, _ in counted(report.breaks):
        if found.file == item.file:
            breaks.setdefault(found.line, []).append(found)
    lowered = {region.line: region for region in report.expert_regions if region.file == item.file}
    rows = []
    for entry in item.lines:
        if entry is None:
            rows.append('<tr class="fold"><td></td><td>⋯</td><td></td></tr>')
            continue
        number, text, how = entry
        notes = f'<span class="chip">{plural(item.operations[number], "op")}</span>' if item.operations[number] else ""
        rows.append(
            f'<tr class="{how or ""}"><td class="no">{number}</td><td class="code">{text or " "}</td>'
            f'<td class="notes">{notes}</td></tr>'
        )
        if region := lowered.get(number):
            said = f"experts → one operator · {region.kernel}" if region.lowered else "experts stay a loop"
            rows.append(
                f'<tr class="{how or ""} below"><td class="no"></td><td colspan="2">'
                f'<span class="pill {"good" if region.lowered else "bad"}">{escape(said)}</span></td></tr>'
            )
        for found in breaks.get(number, ()):
            rows.append(
                f'<tr class="callout"><td></td><td colspan="2"><b>{escape(found.reason)}</b> {escape(found.detail)}'
                f'<br><span class="hint">{escape(found.hint)}</span></td></tr>'
            )
    counts = "".join(
        f'<span class="chip"><i class="{how}"></i>{item.counts[how]}</span>'
        for how in (*HOWS, "break")
        if item.counts[how]
    )
    return (
        f'<details class="card source"{" open" if is_open else ""}><summary class="cardhead"><b>{escape(item.name)}</b>'
        f'<span class="place">{escape(place(item.file, item.first))}</span>'
        f'<span class="spring"></span>{counts}</summary>'
        f'<div class="scroll"><table class="lines">{"".join(rows)}</table></div></details>'
    )
