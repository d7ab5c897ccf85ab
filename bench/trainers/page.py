"""The page docs/trainers.md, from what was measured."""

from __future__ import annotations

import statistics
from typing import Any

INTRODUCTION = """# Training scripts, as people write them

Written by `make trainers`. Each script is small and has the structure of a public one (bench/trainers); nothing in it
knows moebius. It trains 50 steps, the last batch short, plain and captured in turns, from one seed. *bits*: with
backend "eager" each result and all parameters are plain Python's to the bit. The other columns are with the default
backend: graphs at the end, graph breaks in them, calls that captured anew after the first, hits among the steps after
the third, loops over experts that were lowered, seconds of the first call, and a step's time beside plain Python's
(the median of the last twenty; times are the processor's, of one thread). With the default backend parameters are
plain Python's up to rounding: within half a percent, or within four times what one rounding of the start does to
plain training. Where the machine does other things as well, a ratio is good to about a tenth.
"""


TITLE = "## What breaks a graph or is captured again"
DETAIL = "  - "


def page(rows: dict[str, dict[str, Any]], made: str = "", before: str = "") -> str:
    """The whole text. made: when, and of which commit. before: a page whose rows stand where there is no newer one."""
    table, told = read_page(before)
    for name, row in rows.items():
        table[name] = line_of(name, row)
        found = row.get("moebius", {})
        lines = [f"{DETAIL}break: {text:.200}" for text in dict.fromkeys(found.get("breaks", ()))]
        lines += [f"{DETAIL}again: {text:.200}" for text in list(dict.fromkeys(found.get("recompiles", ())))[:4]]
        told[name] = [as_text(text) for text in lines]
    lines = [INTRODUCTION + (f"\n{made}\n" if made else ""), summary([*table.values()]), ""]
    lines += ["| script | family | bits | graphs | breaks | captured again | hits | experts | first call | step |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|", *table.values(), "", TITLE, ""]
    for name in table:
        lines += [f"- {name}", *told[name]] if told.get(name) else []
    return "\n".join(lines) + "\n"


def as_text(line: str) -> str:
    """In a page: no column of a table, no link."""
    return line.replace("|", "\\|").replace("[", "\\[").replace("\n", " ")


def read_page(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The rows of a page, and what it tells of each script, by name."""
    head, _, rest = text.partition(TITLE)
    rows = [line for line in head.splitlines() if line.startswith("| ") and not line.startswith("| script ")]
    told: dict[str, list[str]] = {}
    name = ""
    for line in rest.splitlines():
        if line.startswith("- "):
            name = line[2:]
        elif line.startswith(DETAIL):
            told.setdefault(name, []).append(line)
    return {cells(line)[0]: line for line in rows}, told


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def summary(lines: list[str]) -> str:
    """The goals of the gallery as they are met."""
    every = [cells(line) for line in lines]
    done = [row for row in every if row[8]]
    if not done:
        return ""
    ratios = [float(row[9].rstrip("×")) for row in done]
    experts = [float(row[9].rstrip("×")) for row in done if " of " in row[7]]
    counts = [row[7].split(" of ") for row in done if " of " in row[7]]
    first = [float(row[8].rstrip(" s")) for row in done]
    often = sum(int(row[6].rstrip("%")) >= 95 for row in done)
    return (
        f"{len(lines)} scripts. Equal to the bit: {sum(row[2].startswith('equal') for row in every)}. "
        f"Hits of 95 % and more: {often}. Without a break: {sum(row[4] == '0' for row in done)}. "
        f"Native in the end: {sum('native' in row[5] for row in done)}. "
        f"Loops over experts lowered: {sum(int(a) for a, _ in counts)} of {sum(int(b) for _, b in counts)}. "
        f"Step beside plain: median {statistics.median(ratios):.2f}"
        + (f", with experts {statistics.median(experts):.2f}" if experts else "")
        + f", at most {max(ratios):.2f}. "
        f"First call: median {statistics.median(first):.1f} s, at most {max(first):.1f} s."
    )


def line_of(name: str, row: dict[str, Any]) -> str:
    eager, found = row.get("eager", {}), row.get("moebius", {})
    bits = f"error: {eager['error']}" if "error" in eager else eager.get("difference", "?") or "equal"
    if "error" in found or not found:
        return f"| {name} | | {bits} | error: {found.get('error', '?')} | | | | | | |"
    experts = f"{found['lowered']} of {found['regions']}" if found["regions"] else "–"
    wrong = f" ({found['difference']})" if found["difference"] else ""
    again = max(0, len(found["misses"]) - 1)
    native = ", native" if found["native"] else ""
    shown = [
        name, found["family"], bits + wrong, found["graphs"], len(found["breaks"]), f"{again}{native}",
        f"{found['hit_rate']:.0%}", experts, f"{found['first']:.1f} s", f"{found['step'] / found['plain']:.2f}×",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, shown)) + " |"
