"""Where a capture's time went, as a file that chrome://tracing and ui.perfetto.dev open (the Trace Event Format)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .model import Findings
from .words import place

CAPTURE, CALL = 1, 2  # rows


def events(report: Findings) -> list[dict[str, Any]]:
    """Complete events ("X"), in microseconds: graphs as they were captured, one after another, each with its parts
    (capture, lowering or a backend, guards and code), and native parts of the call. Only lengths are known, so each row
    begins at 0 and has no gaps."""
    made: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((CAPTURE, "capture and lowering"), (CALL, "native parts of the call"))
    ]
    at = 0.0
    for graph in report.graphs:
        length = graph.cold_seconds * 1e6
        where = {"at": place(graph.file, graph.line)}
        made.append({"ph": "X", "pid": 1, "tid": CAPTURE, "name": graph.name, "ts": at, "dur": length, "args": where})
        begins = at
        for part, seconds in graph.times.items():
            took = seconds * 1e6
            made.append({"ph": "X", "pid": 1, "tid": CAPTURE, "name": part, "ts": begins, "dur": took, "args": where})
            begins += took
        at += length
    at = 0.0
    for item in report.breaks:
        if item.cost_us is not None:
            why = {"at": place(item.file, item.line), "code": item.code, "detail": item.detail}
            made.append(
                {"ph": "X", "pid": 1, "tid": CALL, "name": item.reason, "ts": at, "dur": item.cost_us, "args": why}
            )
            at += item.cost_us
    return made


def write(report: Findings, path: str | Path) -> Path:
    """Write the trace; returns its path."""
    path = Path(path)
    text = json.dumps({"traceEvents": events(report), "otherData": {"verdict": report.verdict}}, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path
