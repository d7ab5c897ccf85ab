"""What finished runs of `make fuzz` found: kept as JSON, and their table in docs/fuzzing.md."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from .reach import UNREACHABLE, Reach

BEGIN, END = "<!-- figures: written by run.py --docs -->", "<!-- end of figures -->"


def keep(folder: Path, name: str, figures: dict[str, Any], reach: Reach | None = None) -> None:
    figures |= {"python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if reach is not None:
        figures |= {
            "opcodes": len(reach.opcodes),
            "unreached": reach.unreached(),
            "excused": sorted(UNREACHABLE[sys.version_info[:2]]),
            "pairs": len(reach.pairs),
            "shapes": len(reach.tables),
            "routes": len({name for name, _, _ in reach.routes}),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"figures-{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def table(folder: Path) -> str:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("figures-*.json"))]
    lines = ["| what | commit, day | seed | programs | differing | seconds |", "|---|---|---|---|---|---|"]
    for one in found:
        if one["kind"] != "faults":
            lines.append(
                f"| {one['python']}, {one['kind']} | {one['commit']}, {one['date']} | {one['seed']} "
                f"| {one['programs']:,} | {one['differing']} | {one['seconds']:,.0f} |"
            )
    lines += ["", "What the interpreted programs reached, counted in the half of them that run with checks:", ""]
    lines += [
        "| Python | opcodes | not reached | cannot be | pairs | shapes of exception tables | opcodes that raised |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        if "opcodes" in one:
            lines.append(
                f"| {one['python']} | {one['opcodes']} | {', '.join(one['unreached']) or 'none'} "
                f"| {', '.join(one['excused'])} | {one['pairs']:,} | {one['shapes']} | {one['routes']} |"
            )
    for one in found:
        if one["kind"] == "faults":
            missed = f" Not found: {', '.join(one['missed'])}." if one["missed"] else ""
            lines += [
                "",
                f"Planted faults ({one['python']}, {one['commit']}, {one['date']}), one at a time, against "
                f"{one['programs']} programs: {one['found']} of {one['faults']} found, half of them by program "
                f"{one['median']}, the last one by program {one['slowest']}.{missed}",
            ]
    return "\n".join(lines)


def document(path: Path, folder: Path) -> None:
    """Put the table between the marks in the file at `path`."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
