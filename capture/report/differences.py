"""What is other in one report than in another: for ``report.diff`` and for tests that keep a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..guards.sources import as_written
from .model import Findings
from .words import place


def difference(before: Findings, after: Findings) -> str:
    """Lines that begin with "-" (before), "+" (after); "" for none."""
    return "\n".join(lines(before, after))


def lines(before: Findings, after: Findings) -> Iterator[str]:
    for was, now in zip(facts(before), facts(after), strict=True):
        gone, come = Counter(was), Counter(now)
        yield from (f"- {fact}" for fact in (gone - come).elements())
        yield from (f"+ {fact}" for fact in (come - gone).elements())


def facts(report: Findings) -> Iterator[list[str]]:
    """What a reader would compare, part by part; no times, which differ always."""
    why = f" ({report.why})" if report.why else ""
    yield [f"status: {report.status}{why}"]
    yield [f"coverage: {count} {how}" for how, count in report.coverage.items()]
    yield [f"graph {graph.name} at {place(graph.file, graph.line)}" for graph in report.graphs]
    yield [f"break [{b.code}] {place(b.file, b.line)}: {b.reason}: {b.detail}" for b in report.breaks]
    yield [
        f"expert loop {place(r.file, r.line)}: {f'one operator, {r.kernel}' if r.lowered else f'a loop: {r.refusal}'}"
        for r in report.expert_regions
    ]
    yield [f"sync point {place(*p.place[:2])}: {p.operator}: {p.why}" for p in report.sync_points]
    yield [as_written(f"guard {guard.source}: {guard.check}") for guard in report.guards]
    yield [f"captured again: {r.change}" for r in report.recompiles]
