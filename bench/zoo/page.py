"""docs/zoo.md, made of the results of all families."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .measure import GRADIENT_TOLERANCE, LOSS_TOLERANCE, STEPS

Result = dict[str, Any]


def crash(result: Result) -> str | None:
    """What went wrong where there are no figures, by contender."""
    ours = result["ours"]
    for part in (ours, ours.get("eager", {}), ours.get("moebius", {})):
        if "crash" in part:
            return str(part["crash"])
    return None


def lowered(result: Result) -> tuple[int, int]:
    regions = result["ours"]["moebius"]["regions"]
    return sum(r["lowered"] for r in regions), len(regions)


def one_graph(result: Result) -> bool:
    return crash(result) is None and all(
        result["ours"][b]["graphs"] == 1 and not result["ours"][b]["breaks"] for b in ("eager", "moebius")
    )


def equal(result: Result) -> bool:
    return crash(result) is None and not any(result["ours"][b]["differs"] for b in ("eager", "moebius"))


def summary(family: str, result: Result) -> str:
    """One line for the terminal."""
    if (error := crash(result)) is not None:
        return f"{family:<24} crash: {error}"
    ours = result["ours"]["moebius"]
    good, all_ = lowered(result)
    differs = [f"{b}: {result['ours'][b]['differs']}" for b in ("eager", "moebius") if result["ours"][b]["differs"]]
    told = "equal" if equal(result) else "DIFFERS " + "; ".join(differs)
    peer = result.get("peer")
    beside = f"  torch.compile {peer['graphs']}/{peer['breaks']}" if peer and "crash" not in peer else ""
    return f"{family:<24} {told}  graphs {ours['graphs']}  breaks {len(ours['breaks'])}  regions {good}/{all_}{beside}"


def row(family: str, result: Result) -> str:
    peer = result.get("peer", {})
    theirs = [peer.get("graphs", "–"), peer.get("breaks", "–")]
    theirs_cold = f"{peer['cold_seconds']:.1f}" if "cold_seconds" in peer else "–"
    if "crash" in peer:
        theirs = ["crash", "–"]
    if crash(result) is not None:
        return f"| {family} | **crash** | | | | | | {theirs[0]} | {theirs[1]} | | {theirs_cold} |"
    ours, same, plain = (result["ours"][k] for k in ("moebius", "eager", "plain"))
    good, all_ = lowered(result)
    told = "yes" if equal(result) else "**no**"
    worst = max(ours["errors"].values())
    memory = ours["peak_bytes"] / plain["peak_bytes"]
    cells = [family, told, ours["graphs"], len(ours["breaks"]), f"{good}/{all_}", f"{worst:.0e}", f"{memory:.2f}"]
    cells += [*theirs, f"{same['cold_seconds']:.1f}", theirs_cold]
    return "| " + " | ".join(map(str, cells)) + " |"


def counted(places: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of "count × reason, detail, families"."""
    families: dict[str, Counter[str]] = {}
    for family, text in places:
        families.setdefault(text, Counter())[family] += 1
    lines = []
    for text, names in sorted(families.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        lines.append(f"- {sum(names.values())} × {text} ({', '.join(sorted(names))})")
    return lines or ["- none"]


def clean(text: str) -> str:
    """On one line, without what Markdown would read, and without the folders of the machine it was made on."""
    text = re.sub(r"[^\s(]*/(\w+\.py)", r"\1", text)
    return " ".join(text.replace("|", "/").replace("<", "‹").replace(">", "›").split())[:300]


def paragraph(text: str) -> list[str]:
    first = "- " if text.startswith("- ") else ""
    return textwrap.wrap(
        text.strip(), 120, subsequent_indent=" " * len(first), break_long_words=False, break_on_hyphens=False
    )


INTRODUCTION = """
Every MoE family of transformers ({known} modeling files), tiny and with random weights, its experts
{experts}, trained for {steps} whole steps: `zero_grad`, forward with
loss, `backward`, `clip_grad_norm_`, `AdamW.step`. `{command}` measures it and writes this page; each family runs in a
process of its own, one thread, on a CPU. Made with {versions}{days}.
"""

LOOP = 'as the plain loop that transformers ships (`experts_implementation="eager"`)'
OTHER = 'with `experts_implementation="{}"` where the family has it, else as transformers ships them'

COLUMNS = """
*Equal*: with backend "eager" losses, gradients, parameters, buffers and AdamW's state are the same bits after every
step; with the default backend, each step begun with eager's weights and optimizer state, every loss is within {loss:g}
of eager's, and the gradients, taken as one vector, within {gradient:g}, both relative. *Error*: the larger of these
two. *Memory*: the most bytes of tensors that a warm step holds above what there was when it began, default backend,
over eager's. *Cold*: CPU seconds of the first step with backend "eager". *Peer*: `torch.compile(backend="eager")`, the
same step on the same machine; its figures are kept from one run to the next while the versions stay the same.
"""

HEADS = [
    *("family", "equal", "graphs", "breaks", "lowered", "error", "memory"),
    *("peer's graphs", "its breaks", "cold", "peer's cold"),
]


def write(results: dict[str, Result], known: int, versions: str, experts: str = "eager") -> str:
    """The page: figures of all families, then what broke and what was refused, with reasons."""
    whole = {f: r for f, r in results.items() if crash(r) is None}
    ours = [(f, r["ours"]["moebius"]) for f, r in whole.items()]
    broken = [(f, clean(f"{b['reason']}: {b['detail']}, at {b['at']}")) for f, o in ours for b in o["breaks"]]
    kept = [(f, clean(f"{g['at']}: {g['refusal']}")) for f, o in ours for g in o["regions"] if not g["lowered"]]
    lines = ["# The model zoo", ""]
    measured = sorted({r["measured"] for r in results.values() if "measured" in r})
    days = f", on {' and '.join(dict.fromkeys((measured[0], measured[-1])))}" if measured else ""
    written = LOOP if experts == "eager" else OTHER.format(experts)
    command = "make zoo" if experts == "eager" else f'make zoo ARGS="--experts {experts}"'
    said = {"experts": written, "command": command, "steps": STEPS, "known": known, "versions": versions, "days": days}
    lines += [*paragraph(INTRODUCTION.format(**said)), ""]
    lines += [line for text in totals(results, whole) for line in paragraph(f"- {text}")]
    lines += ["", *paragraph(COLUMNS.format(loss=LOSS_TOLERANCE, gradient=GRADIENT_TOLERANCE)), ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    lines += [row(f, r) for f, r in sorted(results.items())]
    lines += ["", "## Breaks", "", *counted(broken)]
    lines += ["", "## Expert regions that were not lowered", "", *counted(kept)]
    lines += ["", "## Not equal, or not run", ""]
    lines += counted((f, why) for f, r in results.items() for why in failures(r))
    return "\n".join([*lines, ""])


def failures(result: Result) -> list[str]:
    if (error := crash(result)) is not None:
        return [clean(error)]
    ours = result["ours"]
    return [clean(f'backend "{b}": {ours[b]["differs"]}') for b in ("eager", "moebius") if ours[b]["differs"]]


def totals(results: dict[str, Result], whole: dict[str, Result]) -> list[str]:
    """The figures over all families; whole: the results of those that did not crash."""
    regions = [lowered(r) for r in whole.values()]
    peers = [r["peer"] for r in results.values() if "graphs" in r.get("peer", {})]
    told = [
        f"Equal to eager: **{sum(map(equal, results.values()))} of {len(results)}**.",
        f"The whole step is one graph: **{sum(map(one_graph, results.values()))} of {len(results)}**.",
        f"Expert regions that were lowered: **{sum(a for a, _ in regions)} of {sum(b for _, b in regions)}**.",
    ]
    if whole:
        ratios = [r["ours"]["moebius"]["peak_bytes"] / r["ours"]["plain"]["peak_bytes"] for r in whole.values()]
        cold = statistics.median(r["ours"]["eager"]["cold_seconds"] for r in whole.values())
        told += [
            f"Peak memory of a warm step over eager's: median {statistics.median(ratios):.2f}, largest "
            f"{max(ratios):.2f}; {sum(ratio > 1 for ratio in ratios)} families need more than eager.",
            f'CPU seconds of the first step, backend "eager": median {cold:.1f}.',
        ]
    if peers:
        cold = statistics.median(p["cold_seconds"] for p in peers)
        one = sum(p["graphs"] == 1 and not p["breaks"] for p in peers)
        apart = sum(p["differs"] is not None for p in peers)
        told.append(
            f'`torch.compile(backend="eager")` on the same machine, {len(peers)} families: one graph in {one}, '
            f"beyond the tolerance in {apart}, "
            f"median {statistics.median(p['graphs'] for p in peers):.0f} graphs, median "
            f"{cold:.1f} CPU seconds for the first step."
        )
    return told
