"""The report as text, for terminals and logs."""

from __future__ import annotations

import io
import itertools
import linecache
from collections import Counter
from collections.abc import Iterator

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..bytecode.expressions import Excerpt, excerpt_of
from ..guards.sources import as_written
from .groups import guard_groups
from .model import Findings
from .records import GraphBreak, counted
from .stays import proof_by_line
from .words import (
    COUNTING_STOPPED,
    NOTHING_COUNTED,
    ONLY_CAPTURED,
    RAN_AS_PYTHON,
    counted_once,
    duration,
    percent,
    place,
    plural,
    region_row,
)

GROUPS_SHOWN = 8
FUNCTIONS_SHOWN = 5
PLACES = ("expert loop", "asked at")  # columns of one line each
REGION_COLUMNS = ("expert loop", "written as", "experts", "top-k", "became", "kernel", "saved")
WIDE, NARROW = 90, 75  # columns of a terminal: one that is narrower is not shown all of them
ROOM_OF_NUMBERS = 27  # in the table of guards: two columns of numbers, and what stands between columns
HOW_COLORS = {"captured": "green", "opaque": "yellow", "native": "red"}


def render(report: Findings, width: int = 110, color: bool = False) -> str:
    """The report as text of at most ``width`` columns, with ANSI colours if ``color``."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=not color, highlight=False, legacy_windows=False
    )
    console.print(body(report, width))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def body(report: Findings, width: int) -> Group:
    """The report's parts, from the summary down to the guards; empty parts are left out."""
    bad = report.status == "native" or bool(report.breaks)
    said = Text(report.verdict, style="bold yellow" if bad else "bold green")
    parts: list = [headline(report), said, Text(summary(report)), Text(""), coverage_bar(report, min(width, 72))]
    for title, part in (
        ("Graphs", graphs(report)),
        ("Graph breaks", breaks(report, width)),
        ("Expert regions", regions(report, width)),
        ("Waits for the device", sync_points(report, width)),
        ("Guards", guards(report, width)),
        ("Captured again", recompiles(report)),
    ):
        if part is not None:
            parts += [Text(""), Text(title, style="bold"), Padding(part, (0, 0, 0, 2))]
    return Group(*parts)


def headline(report: Findings) -> Text:
    """``moebius · step  train.py:42``."""
    text = Text("moebius", style="bold magenta")
    text.append(" · ", style="dim")
    text.append(report.name, style="bold")
    if report.file:
        text.append("  " + place(report.file, report.line), style="dim")
    return text


def summary(report: Findings) -> str:
    """One line with the counts."""
    said = [
        plural(len(report.graphs), "graph"),
        plural(len(report.breaks), "graph break"),
        plural(len(report.guards), "guard"),
    ]
    if regions := report.of_a_call(report.expert_regions):
        said.append(f"{report.lowered} of {plural(len(regions), 'expert region')} lowered")
    said.append(report.how_called)
    said.append(f"cold {duration(report.cold_seconds)}")
    return " · ".join(said)


def coverage_bar(report: Findings, width: int) -> Text:
    """How the user's instructions ran, as a bar and in numbers."""
    total = sum(report.coverage.values())
    text = Text()
    if not total:
        said = "no user instructions ran" if report.status != "native" else RAN_AS_PYTHON
        return text.append(NOTHING_COUNTED if report.graphs else said, style="dim")
    for how, symbol in (("captured", "█"), ("opaque", "▒"), ("native", "░")):
        count = report.coverage[how]
        cells = max(1, round(width * count / total)) if count else 0
        text.append(symbol * cells, style=HOW_COLORS[how])
    if (share := report.captured_share) is None:
        return Text(f"{total} instructions captured; {ONLY_CAPTURED}", style="dim")
    text.append(f"\n{percent(share)} of {total} instructions captured")
    text.append(f" · {report.coverage['opaque']} opaque · {report.coverage['native']} native", style="dim")
    if report.in_loops:
        text.append(f"\n{counted_once(sum(report.in_loops.values()))}", style="dim")
    if report.counting_stopped:
        text.append(f"\n{COUNTING_STOPPED}", style="dim")
    below = [(name, known) for (_, name, _), known in report.functions.items() if known["native"] or known["opaque"]]
    for name, known in sorted(below, key=lambda item: -item[1]["native"])[:FUNCTIONS_SHOWN]:
        text.append(f"\n  {name}: " + ", ".join(f"{count} {how}" for how, count in known.items() if count), style="dim")
    return text


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An unboxed table in the report's style."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", overflow="fold", no_wrap=column in (*right, *PLACES)
        )
    return made


def graphs(report: Findings) -> Group | None:
    if not report.graphs:
        return None
    made = table("graph", "begins at", "operations", "inputs", "cold", right=("operations", "inputs", "cold"))
    for graph in report.graphs:
        where = place(graph.file, graph.line)
        made.add_row(graph.name, where, str(graph.operations), str(graph.inputs), duration(graph.cold_seconds))
    failed = [graph for graph in report.graphs if graph.fault]
    said = [f"{place(one.file, one.line)} as it was captured: lowering failed, {one.fault}" for one in failed]
    return Group(made, *(Text(line, style="red") for line in said))


def breaks(report: Findings, width: int) -> Group | None:
    found = [break_text(item, count, width) for item, count in counted(report.breaks)]
    return Group(*found) if found else None


def break_text(item: GraphBreak, count: int, width: int) -> Text:
    """A break that there are so many of: where, what, and what to do."""
    text = Text()
    text.append(f"[{item.code}] ", style="red")
    text.append(f"{place(item.file, item.line)} in {item.function}", style="bold")
    text.append(f"  {item.reason}", style="red")
    text.append(f"  [{item.instruction}]{f' ×{count}' if count > 1 else ''}\n", style="dim")
    if item.excerpt is not None:
        text.append(excerpt_text(item.excerpt, width, item.file))
    text.append(f"  {item.detail}\n")
    for said in item.origins:
        text.append("  where ", style="cyan").append(f"{said}\n")
    text.append("  hint  ", style="cyan").append(item.hint)
    for number, sign, shown in () if item.edit is None else item.edit.rows():
        text.append(f"\n{number:>5} ", style="dim")
        text.append(f"{sign} {shown}", style="not dim red" if sign == "-" else "not dim green")
    called = "from"
    for entry, same in itertools.groupby(item.stack):
        file, line, function = entry
        if entry == (item.file, item.line, item.function):
            called = "into"
        else:
            times = len(list(same))
            said = f"\n  {called}  {place(file, line)} in {function}{f' ×{times}' if times > 1 else ''}"
            text.append(said, style="dim")
    if item.cost_us is not None:
        took = duration(item.cost_us * 1e-6) if item.cost_us >= 1 else "under 1 µs"
        text.append(f"\n  time  {took} a call as Python, as without moebius", style="dim")
    return text


def excerpt_text(excerpt: Excerpt, width: int, file: str = "") -> Text:
    """The user's line with the expression underlined; with its file, where that is another one than was said before."""
    number = f"{excerpt.line:>5} " if excerpt.file == file else f"  {place(excerpt.file, excerpt.line)} "
    line, begin, end = excerpt.text, excerpt.begin, excerpt.end
    room = max(width - len(number) - 4, 16)
    if cell_len(line) > room and end > room // 2:
        cut = max(begin - 4, 0)
        line, begin, end = "…" + line[cut:], begin - cut + 1, end - cut + 1
    text = Text(number, style="dim").append("│ ").append(set_cell_size(line, room).rstrip(), style="not dim")
    before, below = cell_len(line[:begin]), cell_len(line[begin:end])
    text.append(f"\n{' ' * len(number)}│ ")
    return text.append(f"{' ' * before}{'^' * min(below, room - before)}\n", style="not dim bold red")


def regions(report: Findings, width: int) -> Group | None:
    if not report.expert_regions:
        return None
    left_out = ["top-k", "kernel"] * (width < WIDE) + ["written as", "experts"] * (width < NARROW)
    shown = [name for name in REGION_COLUMNS if name not in left_out]
    made = table(*shown, right=("experts", "top-k", "saved"))
    refusals: list[Text] = []
    room = max(width - 90, width // 4, 20)  # for the place
    for row, count in Counter(map(region_row, report.expert_regions)).items():
        where, idiom, experts, top_k, lowered, kernel, saved, _ = row
        became = Text("one operator", style="green") if lowered else Text("a loop", style="red")
        first = ending(where + (f" ×{count}" if count > 1 else ""), room)
        cells: tuple[str | Text, ...] = (first, idiom, experts, top_k, became, kernel, saved)
        made.add_row(*(cell for name, cell in zip(REGION_COLUMNS, cells, strict=True) if name in shown))
        if (stays := report.stays.get(row)) is not None:
            refusals.append(Text(f"why {where} stays a loop: {stays.sentence}", style="red"))
            refusals += [excerpt_text(excerpt, width) for excerpt in stays.excerpts]
    return Group(made, *refusals, *proofs(report, width))


def proofs(report: Findings, width: int) -> Iterator[Text | Table]:
    """Of each region, the steps of its proof that hold, beside the user's lines that they are about."""
    first = {region_row(region): region for region in reversed(report.expert_regions) if region.proof}
    for row, region in reversed(first.items()):
        known = "all hold" if region.lowered else "then the one that fails, above"
        yield Text(f"proof of {row[0]}: {plural(len(region.proof), 'step')}, {known}", style="dim")
        made = Table.grid(padding=(0, 2, 0, 0))
        made.add_column(no_wrap=True)
        made.add_column(style="green")
        for file, line, names in proof_by_line(region):
            number = f"{line:>5} " if file == region.file else f"  {place(file, line)} "
            source = linecache.getline(file, line).strip()
            made.add_row(Text(number, style="dim").append("│ ").append(shorten(source, width // 3)), ", ".join(names))
        yield made


def sync_points(report: Findings, width: int) -> Group | None:
    """Where the step waits, and what that means for a CUDA graph."""
    if not report.sync_points:
        return None
    lines: list[Text] = []
    for (where, why, operator), count in Counter((p.place, p.why, p.operator) for p in report.sync_points).items():
        text = Text(f"{place(*where[:2])} in {where[2]}", style="bold")
        text.append(f"  {why}", style="yellow")
        text.append(f"  [{operator}]{f' ×{count}' if count > 1 else ''}", style="dim")
        if (excerpt := excerpt_of(where)) is not None:
            text.append("\n").append(excerpt_text(excerpt, width, where[0]))
            text.right_crop(1)
        lines.append(text)
    return Group(*lines, Text(f"on a GPU the step waits there; not one CUDA graph: {report.cuda_graph}", style="dim"))


def guards(report: Findings, width: int) -> Group | None:
    if not report.guards:
        return None
    groups = guard_groups(report)
    wide = width >= WIDE
    made = table("what they look at", "guards", *["slowest"] * wide, "asked at", "a call", right=("guards", "a call"))
    places = [place(guard.file, guard.line) for group in groups[:GROUPS_SHOWN] for guard in group.guards]
    longest = min(max(map(cell_len, places)), max(width * 3 // 10, 24))
    room = width - longest - ROOM_OF_NUMBERS  # one line each
    for group in groups[:GROUPS_SHOWN]:
        first = max(group.guards, key=lambda guard: guard.cost_ns or 0.0)
        cost = None if group.cost_ns is None else group.cost_ns * 1e-9
        own = min(room // 2, 40) if wide else room
        owner, where = shorten(as_written(group.owner), own), place(first.file, first.line)
        rest = f"{as_written(first.source).removeprefix(as_written(group.owner))} {as_written(first.check)}".strip()
        slowest = [shorten(rest, room - own)] * wide
        made.add_row(owner, str(len(group.guards)), *slowest, ending(where, longest), duration(cost))
    left = groups[GROUPS_SHOWN:]
    said = [f"{plural(sum(len(group.guards) for group in left), 'more guard')} of other kinds; "] if left else [""]
    if timed := [cost for group in groups for cost in group.costs]:
        passed = report.of_a_call(report.guards)
        which = "all guards" if len(timed) == len(passed) else f"those {len(timed)} that were timed"
        which = which if len(passed) == len(report.guards) else f"the {len(passed)} guards of the newest capture"
        said.append(f"{which} together {duration(sum(timed) * 1e-9)} a call")
    return Group(made, Text("".join(said).removesuffix("; "), style="dim")) if "".join(said) else Group(made)


def shorten(text: str, length: int = 56) -> str:
    """The text, or its beginning and an ellipsis; the page and the JSON have it whole."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def ending(place: str, length: int) -> str:
    """The place, or an ellipsis and its end: the line, and the file that it is in."""
    return place if len(place) <= length else "…" + place[len(place) - length + 1 :]


def recompiles(report: Findings) -> Group | None:
    """Each time that it was captured again: why, at which line, and what the older captures were made for."""
    if not report.recompiles:
        return None
    lines = []
    for number, item in enumerate(report.recompiles, 1):
        text = Text(f"{number}. ", style="dim").append(item.change, style="bold")
        text.append(f"  {place(item.file, item.line)}{f', in call {item.call}' if item.call else ''}", style="dim")
        for line in item.entries if len(item.entries) > 1 else ():
            text.append(f"\n   {as_written(line)}", style="dim")
        if item.hint:
            text.append("\n   hint  ", style="cyan").append(item.hint)
        lines.append(text)
    return Group(*lines)
