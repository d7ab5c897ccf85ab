"""The passes, in order, each held to its Contract."""

from __future__ import annotations

from dataclasses import replace

from moebius.lowering import dead_code, overlap, placement
from moebius.lowering.contract import Contract, Work
from moebius.lowering.draft import copy_graph
from moebius.lowering.experts import rewrite, weight_concat
from moebius.lowering.graph import CapturedGraph, ExpertRegion, LoweringOptions
from moebius.lowering.memo import remembering
from moebius.lowering.step import asks_of_each, checkpoint, inference, observed
from moebius.lowering.step.given_out import GIVEN, Ways, is_lost, ways_out
from moebius.lowering.step.written_later import WRITTEN, Readers, is_unread, readers_before_writes

PASSES: tuple[Contract, ...] = (
    rewrite.CONTRACT,
    dead_code.CONTRACT,
    placement.CONTRACT,
    overlap.CONTRACT,
    weight_concat.CONTRACT,
    checkpoint.CONTRACT,
    inference.CONTRACT,
)

OUTLINES = (checkpoint.CONTRACT, inference.CONTRACT)  # what these put into a body has the users that it had
HOOKED = "a gradient hook or retain_grad() looks at a value that the loop's iterations compute or use"
ASKED = "autograd.grad with create_graph or allow_unused asks what one operator for all experts has no answer to"


def run_passes(captured: CapturedGraph, options: LoweringOptions, passes: tuple[Contract, ...] = PASSES) -> Work:
    """A copy of the captured graph, after all passes, without code yet. The captured graph stays as it is.

    A gradient that somebody looks at halfway must go the way that it goes in the captured graph.
    """
    seen, ways, readers = observed(captured.gm), ways_out(captured.gm), readers_before_writes(captured.gm)
    why = ASKED if asks_of_each(captured.gm) else None
    work, taken = attempt(captured, options, passes, why, seen, ways, readers)
    if taken is not None and why is None:
        why, tried = taken, work.regions
        work, taken = attempt(captured, options, passes, why, seen, ways, readers)
        work.regions += as_written(tried, work.regions, why)
    if taken is not None:  # no pass is known to: what the graph means is then the captured graph's to say
        only = tuple(contract for contract in passes if contract in OUTLINES)
        work, _ = attempt(captured, options, only, taken, {}, {}, {})
    return work


def as_written(tried: list[ExpertRegion], known: list[ExpertRegion], why: str) -> list[ExpertRegion]:
    """The experts that were found and have to stay as they are, of those that are not known to be loops. tried: what
    became of them where they did not have to."""
    places = {(region.file, region.line) for region in known}
    left = [one for one in tried if (one.file, one.line) not in places]
    refusals = [why if one.lowered else one.refusal for one in left]
    return [
        replace(one, lowered=False, refusal=refusal, kernel="loop", saved_bytes=None)
        for one, refusal in zip(left, refusals, strict=True)
    ]


def attempt(
    captured: CapturedGraph,
    options: LoweringOptions,
    passes: tuple[Contract, ...],
    why: str | None,
    seen: dict[str, frozenset[str]],
    ways: Ways,
    readers: Readers,
) -> tuple[Work, str | None]:
    """The graph after the passes, and why loops have to be kept. why: for what they are kept already."""
    work, same = Work(copy_graph(captured.gm), captured, options, keep_loops=why), True
    lost: list[str] | None = None  # asked before a part of the graph becomes a body, in which its ways are not seen

    def losses() -> list[str]:
        return [GIVEN] * is_lost(ways, work.gm) + [WRITTEN] * is_unread(readers, work.gm)

    with remembering():
        for contract in passes:
            if contract in OUTLINES and lost is None:
                lost = losses()
            contract.apply(work)
            if seen and contract not in OUTLINES:
                now = observed(work.gm)
                same = same and all(users == now.get(name) for name, users in seen.items())
    lost = losses() if lost is None else lost
    return work, HOOKED if not same else lost[0] if lost else None
