"""The page docs/trainers.md, from what was measured."""

from __future__ import annotations

import statistics
from typing import Any

INTRODUCTION = """# Training scripts, as people write them

Written by `make trainers`. Each script is small and has the structure of a public one (bench/trainers); nothing in it
knows moebius. It trains 50 steps, the last batch short, plain and captured, from one seed. *bits*: with backend "eager"
each result and all parameters are plain Python's to the bit. The other columns are with the default backend: graphs at
the end, graph breaks in them, calls that captured anew after the first, hits among the steps after the third, loops
over experts that were lowered, seconds of the first call, and a step's time beside plain Python's (the median of the
last twenty; times are the processor's, of one thread). With the default backend parameters are plain Python's up to
rounding: within half a percent, or within four times what one rounding of the start does to plain training. Where the
machine does other things as well, a ratio is good to about a tenth.
"""


def page(rows: dict[str, dict[str, Any]], made: str = "") -> str:
    """The whole text. made: when, and of which commit."""
    lines = [INTRODUCTION + (f"\n{made}\n" if made else ""), summary(rows), ""]
    lines += ["| script | family | bits | graphs | breaks | captured again | hits | experts | first call | step |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    lines += [line_of(name, row) for name, row in rows.items()]
    lines += ["", "## What breaks a graph or is captured again", ""]
    for name, row in rows.items():
        found = row.get("moebius", {})
        told = [f"  - break: {text:.200}" for text in dict.fromkeys(found.get("breaks", ()))]
        told += [f"  - again: {text:.200}" for text in list(dict.fromkeys(found.get("recompiles", ())))[:4]]
        if told:
            lines += [f"- {name}", *(text.replace("|", "\\|").replace("\n", " ") for text in told)]
    return "\n".join(lines) + "\n"


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """The goals of the gallery as they are met."""
    done = [r["moebius"] for r in rows.values() if "error" not in r.get("moebius", {"error": ""})]
    if not done:
        return ""
    equal = sum("error" not in r["eager"] and not r["eager"]["difference"] for r in rows.values() if "eager" in r)
    ratios = [r["step"] / r["plain"] for r in done]
    experts = [r["step"] / r["plain"] for r in done if r["regions"]]
    regions, lowered = sum(r["regions"] for r in done), sum(r["lowered"] for r in done)
    often = sum(r["hit_rate"] >= 0.95 for r in done)
    return (
        f"{len(rows)} scripts. Equal to the bit: {equal}. Hits of 95 % and more: {often}. "
        f"Without a break: {sum(not r['breaks'] for r in done)}. Native in the end: {sum(r['native'] for r in done)}. "
        f"Loops over experts lowered: {lowered} of {regions}. Step beside plain: median {statistics.median(ratios):.2f}"
        + (f", with experts {statistics.median(experts):.2f}" if experts else "")
        + f", at most {max(ratios):.2f}. First call: median {statistics.median(r['first'] for r in done):.1f} s, "
        f"at most {max(r['first'] for r in done):.1f} s."
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
    cells = [
        name, found["family"], bits + wrong, found["graphs"], len(found["breaks"]), f"{again}{native}",
        f"{found['hit_rate']:.0%}", experts, f"{found['first']:.1f} s", f"{found['step'] / found['plain']:.2f}×",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"
