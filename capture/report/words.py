"""How the report writes places, sizes and times, the same in text and in HTML."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moebius.lowering.graph import ExpertRegion


PATHS = re.compile(r"(/[^\s():]+\.py):(\d+)")  # in what other rooms say


def short(file: str) -> str:
    """A file's name as people know it: package and file, relative to where we are, or its last two parts."""
    parts = Path(file).parts
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            package = parts[parts.index(marker) + 1 :]
            return str(Path(package[0], "…", package[-1]) if len(package) > 3 else Path(*package))
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    if not relative.startswith(".."):
        return relative
    return str(Path("…", *parts[-2:])) if len(parts) > 3 else file


def place(file: str, line: int) -> str:
    """``file:line``, shortened; empty when there is no file."""
    return f"{short(file)}:{line}" if file else ""


def byte_size(count: float | None) -> str:
    """A number of bytes with a binary unit; "–" for None (unknown)."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """A time with a fitting unit; "–" for None (not measured)."""
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 s"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def percent(share: float | None) -> str:
    """A share from 0 to 1 as a percentage; "–" for None. 100% and 0% are said only of all and nothing."""
    if share is None:
        return "–"
    if 0 < share < 1:
        return f"{min(max(share * 100, 0.1), 99.9):.1f}%"
    return f"{share * 100:.0f}%"


def counted_once(count: int) -> str:
    """Said where coverage holds instructions of which nobody could tell how often they run."""
    said = f"{count} of them are run by backward(), or are in loops or branches over data"
    return f"{said}: each is counted once, however often it runs"


NOTHING_COUNTED = "no instruction was counted: only those of your own code in files are, not those of libraries"
RAN_AS_PYTHON = "no instruction was counted: it runs as Python"
ONLY_CAPTURED = "what ran natively was not counted: explain one call to count it"
COUNTING_STOPPED = (
    "more ran natively: counting stopped in a long native part, so that its time could be measured; explain a later"
    " call to count all"
)


def plural(count: int, noun: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def with_short_places(text: str) -> str:
    """A text of another room's, with the files in it as people know them."""
    return PATHS.sub(lambda found: place(found[1], int(found[2])), text)


def saved(region: ExpertRegion) -> str:
    """``146.5 KiB → 57.0 KiB``: what it keeps for backward as it is written, where that is known, and as it runs."""
    before, after = region.loop_saved_bytes, region.saved_bytes
    return byte_size(after) if before is None or after is None else f"{byte_size(before)} → {byte_size(after)}"


def region_row(region: ExpertRegion) -> tuple[str, str, str, str, bool, str, str, str]:
    """(place, idiom, experts, top-k, lowered, kernel, saved, refusal): the same line run by each layer is one row."""
    return (
        place(region.file, region.line),
        region.idiom,
        "–" if region.num_experts is None else str(region.num_experts),
        "–" if region.top_k is None else str(region.top_k),
        region.lowered,
        region.kernel,
        saved(region),
        with_short_places(region.refusal or ""),
    )
