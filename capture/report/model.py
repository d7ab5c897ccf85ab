"""What is known of one captured callable and its call, as data; what is read off its graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..bytecode.counting import Counts, add
from ..bytecode.expressions import excerpt_of
from ..guards.sources import as_written
from .codes import code_of
from .records import WAYS, GraphBreak, Guard, Recompile, counted
from .schema import VERSION
from .stays import RegionRow, Search, Stays, stays_of
from .words import duration, place, plural, region_row

if TYPE_CHECKING:
    from moebius.lowering.graph import CapturedGraph, ExpertRegion
    from moebius.lowering.sync_points import SyncPoint


@dataclass(repr=False)
class Findings:
    """What happened to one call: which graphs it became, where and why they broke, and what they rely on.

    result: what the call returned. status: "hit" (captured before), "captured", "recaptured" or "native", of this call,
    and ``why`` if it was native. raised: what ended it, and in which line; then the report is of what ran until then.
    sync_points: where it waits for its device, or would on a GPU. coverage: how many instructions of the user's this
    call executed, as
    ``{"captured": n, "opaque": n, "native": n}``: what ``sys.settrace`` counts on the plain run, in the function and
    what it calls outside of torch, numpy and the standard library. functions: the same for each of them.
    counting_stopped: whether more ran natively than was counted. in_loops: how many of each function's instructions are
    run by a backward (hooks, an ``autograd.Function``'s backward, what a checkpoint runs again), or as often as
    something says that is not computed by operators alone; each was counted once, however often the call runs it. name:
    what the callable is called; file, line: where it is defined.
    lines: file -> line -> how it ran, of several ways the weakest, for the source listing; :meth:`source_lines` adds
    what graphs and breaks know.
    recompiles: why later calls were captured again, if they were. calls: None of the report of one call; of one of all
    calls so far (hits, calls, graphs that the newest capture runs as): then graphs, breaks and the rest are of all
    captures, and status says no more than whether there are any. seconds: of the one call, ``{"capturing", "running"}``
    (its first run, where it was captured), with what looking at it added. step_seconds: of a call with
    graph breaks, the median of the newest in which nothing was captured or reported. searches: regions of one graph,
    and what looks for what keeps one of them a loop, for so many seconds. newest: of a report of all calls so far, the
    guards and expert regions of the captures that a call runs; None: it is of one call.
    """

    result: Any = None
    status: str = "captured"
    why: str = ""
    raised: str = ""
    graphs: list[CapturedGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    expert_regions: list[ExpertRegion] = field(default_factory=list)
    sync_points: list[SyncPoint] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    functions: dict[tuple[str, str, int], dict[str, int]] = field(default_factory=dict)
    counting_stopped: bool = False
    in_loops: dict[tuple[str, str, int], int] = field(default_factory=dict)
    name: str = "call"
    file: str = ""
    line: int = 0
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    recompiles: list[Recompile] = field(default_factory=list)
    calls: tuple[int, int, int] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    searches: list[tuple[list[ExpertRegion], Search]] = field(default_factory=list)
    newest: list[Any] | None = None

    def of_a_call(self, items: list[Any]) -> list[Any]:
        """Those of the guards or of the expert regions that one call comes to."""
        if self.newest is None:
            return items
        known = set(map(id, self.newest))
        return [item for item in items if id(item) in known]

    def count(self, how: str, counts: Counts) -> None:
        """Add the user's instructions that ran "captured", "opaque" or "native"."""
        for function, number in counts.functions.items():
            known = self.functions.setdefault(function, dict.fromkeys(WAYS, 0))
            known[how] += number
            self.coverage[how] += number
        add(self.in_loops, counts.in_loops)
        for file, lines in counts.lines.items():
            known_lines = self.lines.setdefault(file, {})
            known_lines.update({line: max(how, known_lines.get(line, how), key=WAYS.index) for line in lines})

    @property
    def verdict(self) -> str:
        """One sentence: whether the call is one graph, what stands in the way, and what changed."""
        return f"Raised {self.raised}. Until then: {self.until_then}" if self.raised else self.until_then

    @property
    def until_then(self) -> str:
        if self.status == "native":
            return f"NOT captured: {self.why or 'the call ran as plain Python'}"
        captures = len(self.graphs)
        graphs = captures if self.calls is None else self.calls[2]
        if not captures and not self.breaks:
            without = "Captured, without a tensor operation in it"
            said = without if self.functions else "NOT captured: nothing was called"
        elif self.breaks:
            slowest, _ = counted(self.breaks)[0]
            runs = f"Runs as {plural(graphs, 'graph')}{of_all(graphs, captures)}; "
            said = runs if captures else "Runs as Python, without a tensor operation in a graph; "
            cost = self.cost_of(slowest)
            where = place(slowest.file, slowest.line)
            said += f"{'slowest break' if len(self.breaks) > 1 else 'break'} {where} ({slowest.reason}{cost})"
        else:
            said = f"Runs as {'one graph' if graphs == 1 else f'{graphs} graphs'}{of_all(graphs, captures)}"
        if refused := dict.fromkeys(place(one.file, one.line) for one in self.expert_regions if not one.lowered):
            loops = {place(one.file, one.line) for one in self.expert_regions}
            stay = "stays a loop" if len(refused) == 1 else "stay loops"
            said += f"; {len(refused)} of {plural(len(loops), 'expert loop')} {stay} ({next(iter(refused))})"
        if self.status == "recaptured" and self.recompiles:
            last = next(item for item in self.recompiles if item.call == self.recompiles[-1].call)
            said += f"; captured again, since {last.change} ({place(last.file, last.line)})"
        return said

    def cost_of(self, item: GraphBreak) -> str:
        """What a break costs in a call, and which part of the call that is."""
        if not item.cost_us:
            return ""
        took, step = duration(item.cost_us * 1e-6), self.step_seconds
        if step is None or item.cost_us * 1e-6 > step:
            return f", {took} natively"
        share = item.cost_us * 1e-6 / step
        return f", {took} of a step ({share:.0%})" if share >= 0.01 else f", {took} of a step (under 1%)"

    @property
    def how_called(self) -> str:
        """What became of the call, or of the calls so far, in a few words."""
        if self.calls is None:
            return f"this call: {self.status}"
        if not self.calls[1]:
            return "calls of functions below it are not counted" if self.graphs else "not called"
        return f"{self.calls[0]} of {plural(self.calls[1], 'call')} hit"

    @property
    def cold_seconds(self) -> float:
        """Wall time, in seconds, that went into capturing and lowering all graphs."""
        return sum(graph.cold_seconds for graph in self.graphs)

    @property
    def cuda_graph(self) -> str:
        """What keeps the call from being recorded as one CUDA graph; "" where nothing does."""
        if not self.graphs:
            return "nothing is captured"
        many = [plural(len(self.breaks), "graph break")] if self.breaks else []
        many += [plural(len(self.graphs), "graph")] if not self.breaks and len(self.graphs) > 1 else []
        many += [plural(len(self.sync_points), "sync point")] if self.sync_points else []
        return " and ".join(many)

    @property
    def lowered(self) -> int:
        """How many of a call's expert regions became one grouped operator."""
        return sum(region.lowered for region in self.of_a_call(self.expert_regions))

    @functools.cached_property
    def stays(self) -> dict[RegionRow, Stays]:
        """What keeps each refused region a loop. It is looked for when somebody asks, ``LOOKED_FOR`` seconds of all."""
        return stays_of(self.expert_regions, self.searches)

    @property
    def captured_share(self) -> float | None:
        """Share of the user's instructions that were captured, 0 to 1; None when nothing was counted, or of all calls
        so far, where what ran natively was not."""
        partly = self.calls is not None and (self.breaks or self.status == "native")
        total = 0 if partly else sum(self.coverage.values())
        return self.coverage["captured"] / total if total else None

    def source_lines(self) -> dict[str, dict[int, str]]:
        """file -> line -> "captured", "opaque", "native" or "break", from all that the report knows."""
        merged: dict[str, dict[int, str]] = {file: dict(known) for file, known in self.lines.items()}
        for graph in self.graphs:
            for where in graph_places(graph):
                merged.setdefault(where[0], {}).setdefault(where[1], "captured")
        for item in self.breaks:
            merged.setdefault(item.file, {})[item.line] = "break"
            for file, line, _ in item.stack:
                merged.setdefault(file, {}).setdefault(line, "native")
        return merged

    def to_dict(self) -> dict[str, Any]:
        """Everything but ``result``, as plain lists, dicts, strings and numbers."""
        return {
            "schema": VERSION,
            "name": self.name,
            "file": self.file,
            "line": self.line,
            "cold_seconds": self.cold_seconds,
            "seconds": dict(self.seconds),
            "step_seconds": self.step_seconds,
            "status": self.status,
            "why": self.why,
            "raised": self.raised,
            "calls": None if self.calls is None else dict(zip(("hits", "all", "graphs"), self.calls, strict=True)),
            "verdict": self.verdict,
            "coverage": dict(self.coverage),
            "counting_stopped": self.counting_stopped,
            "in_loops": sum(self.in_loops.values()),
            "functions": [
                {"file": key[0], "name": key[1], "line": key[2], **known, "in_loops": self.in_loops.get(key, 0)}
                for key, known in self.functions.items()
            ],
            "graphs": [graph_dict(graph) for graph in self.graphs],
            "breaks": [break_dict(item) for item in self.breaks],
            "guards": [asdict(guard) | {"owner": as_written(guard.owner)} for guard in self.guards],
            "expert_regions": [region_dict(region, self.stays) for region in self.expert_regions],
            "sync_points": [sync_dict(point) for point in self.sync_points],
            "cuda_graph": self.cuda_graph,
            "recompiles": [asdict(item) for item in self.recompiles],
            "lines": {
                file: {str(line): how for line, how in sorted(known.items())}
                for file, known in self.source_lines().items()
            },
        }


def of_all(graphs: int, captures: int) -> str:
    """Said where there are captures that a call does not run: it was captured again, or has other ways to go."""
    return "" if captures == graphs else f", of {captures} captured"


def graph_places(graph: CapturedGraph) -> Iterator[tuple[str, int, str]]:
    """Each (file, line, function) of the user's code that a graph's nodes came from, call sites included."""
    for node in graph.nodes():
        if where := node.meta.get("where"):
            yield where
        yield from node.meta.get("stack", ())


def region_dict(region: ExpertRegion, stays: dict[RegionRow, Stays]) -> dict[str, Any]:
    """A loop over experts as plain data; of what blocks it, the user's lines and the expressions in them."""
    known = asdict(replace(region, blocker=None, as_written=None)) | {"loop_saved_bytes": region.loop_saved_bytes}
    del known["blocker"], known["as_written"]
    why = stays.get(region_row(region), Stays(""))
    found = [asdict(excerpt) for excerpt in why.excerpts]
    return {**known, "excerpt": found[0] if found else None, "blocking": found if why.all_of_it else []}


def break_dict(item: GraphBreak) -> dict[str, Any]:
    """A graph break as plain data, with what to change."""
    edit = None if item.edit is None else asdict(item.edit)
    return {"code": item.code, "change": code_of(item.reason).change, "edit": edit, **asdict(item)}


def sync_dict(point: SyncPoint) -> dict[str, Any]:
    """A place where the step waits as plain data, with the user's line."""
    (file, line, function), excerpt = point.place[:3], excerpt_of(point.place)
    return {
        "why": point.why, "operator": point.operator, "file": file, "line": line, "function": function,
        "excerpt": None if excerpt is None else asdict(excerpt),
    }  # fmt: skip


def graph_dict(graph: CapturedGraph) -> dict[str, Any]:
    """A graph as plain data: its place, its sizes and its FX code."""
    return {
        "name": graph.name,
        "file": graph.file,
        "line": graph.line,
        "cold_seconds": graph.cold_seconds,
        "times": dict(graph.times),
        "operations": graph.operations,
        "inputs": graph.inputs,
        "code": graph.gm.code.strip(),
        "fault": graph.fault,
    }
