"""Why experts stay a loop: the refusal, and the expressions of the user's that it takes to make them one operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bytecode.expressions import Excerpt, excerpt_of
from .words import region_row, with_short_places

if TYPE_CHECKING:
    from moebius.lowering import Blocking, ExpertRegion

LOOKED_FOR = 4.0  # seconds of CPU time, of all regions: each try lowers the part of the graph that a loop stands in
RegionRow = tuple[str, str, str, str, bool, str, str, str]
Search = Callable[["ExpertRegion", float], "Blocking | None"]


@dataclass(frozen=True)
class Stays:
    """why: the first step of the proof that fails, and at which line. excerpts: the expressions that block it.
    all_of_it: whether it is one operator without them; else the one is where the refusal points."""

    why: str
    excerpts: tuple[Excerpt, ...] = ()
    all_of_it: bool = False

    @property
    def sentence(self) -> str:
        """What stands above the excerpts."""
        if not self.all_of_it:
            return self.why
        count = len(self.excerpts)
        return f"{self.why}; without {'this' if count == 1 else f'these {count}'} it would be one operator:"


def proof_by_line(region: ExpertRegion) -> list[tuple[str, int, list[str]]]:
    """The steps of its proof that hold, by the user's line that each is about: (file, line, their names)."""
    by_line: dict[tuple[str, int], list[str]] = {}
    for step in region.proof:
        by_line.setdefault((step.file, step.line), []).append(step.name)
    return [(*place, names) for place, names in sorted(by_line.items())]


def stays_of(regions: list[ExpertRegion], searches: list[tuple[list[ExpertRegion], Search]]) -> dict[RegionRow, Stays]:
    """For each row of refused regions. searches: what looks further, for the regions of a graph."""
    found: dict[RegionRow, Stays] = {}
    until = time.thread_time() + LOOKED_FOR
    for region in regions:
        row = region_row(region)
        if region.lowered or row in found:
            continue
        look = next((search for known, search in searches if any(one is region for one in known)), None)
        blocking = None if look is None else look(region, until - time.thread_time())
        if blocking is None:
            excerpt = excerpt_of(region.blocker or ())
            found[row] = Stays(row[-1], () if excerpt is None else (excerpt,))
        else:
            excerpts = [excerpt for where in blocking.places if (excerpt := excerpt_of(where)) is not None]
            found[row] = Stays(with_short_places(blocking.refusal), tuple(excerpts), bool(excerpts))
    return found

