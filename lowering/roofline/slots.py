"""Counts the slots of each expert in the graphs that run: what ``moebius plan --routing`` takes."""
from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.graph import CapturedGraph, Lowered
from moebius.lowering.planner import balance, page
from moebius.lowering.torch_private import DispatchMode

RANKS = 8  # over which imbalance is shown
SHOWN = 16  # layers that have a bar


class Counting(DispatchMode):
    """One call of one graph. slots: of its layers so far, in the order of their first forward, [E] each; a layer whose
    weights come again in the call is the same: in a second microbatch, or where it runs again in backward, which is
    counted again."""

    def __init__(self, slots: list[Tensor]) -> None:
        super().__init__()
        self.slots, self.weights = slots, list[Tensor]()  # (held, so that no other weights come to lie there)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.moebius.experts.default:
            gate_up, here = args[1], found[3].diff().cpu().long()
            places = [i for i, known in enumerate(self.weights) if known.data_ptr() == gate_up.data_ptr()]
            if not places:
                places.append(len(self.weights))
                self.weights.append(gate_up)
            if places[0] == len(self.slots):
                self.slots.append(here)
            else:
                self.slots[places[0]] = self.slots[places[0]] + here
        return found


class Recorder:
    """Counts in the graphs that are lowered while it is on (``RECORDER.on``). Captures of the same line are one."""

    def __init__(self) -> None:
        self.on = False
        self.graphs: dict[tuple[str, int], list[Tensor]] = {}

    def around(self, graph: CapturedGraph, lowered: Lowered) -> Callable[..., tuple]:
        """What is to run in the place of ``lowered.fn``."""
        run, slots = lowered.fn, self.graphs.setdefault((graph.file, graph.line), [])

        def counted(*inputs: Any) -> tuple:
            with Counting(slots):
                return run(*inputs)

        return counted

    def rows(self) -> list[list[int]]:
        """[layers][E]."""
        return [slots.tolist() for layers in self.graphs.values() for slots in layers]


def render(rows: list[list[int]]) -> str:
    """How uneven the load is: of each layer's experts, and of ranks that share them, in order and by load."""
    first = f" (the first {SHOWN})" if len(rows) > SHOWN else ""
    lines = [f"Slots of experts, {len(rows)} layers{first}: the busiest expert's over the mean"]
    shown = enumerate(rows[:SHOWN])
    lines += page.bars([(f"layer {i}", max(row) * len(row) / max(1, sum(row)), "") for i, row in shown])
    used = [row for row in rows if sum(row)]
    ranks = min(RANKS, *map(len, used)) if used else 1
    if ranks > 1:
        lines.append(f"On {ranks} expert ranks: the busiest rank's over the mean, mean of the layers")
        ways = [("in order", [balance.in_order(len(row), ranks) for row in used])]
        ways += [(f"by load, {more or 'no'} more on each rank", [balance.by_load(row, ranks, more) for row in used])
                 for more in (0, 1) if all(-(-len(row) // ranks) + more <= len(row) for row in used)]
        lines += page.bars([(name, fmean(one.imbalance(row) for one, row in zip(placed, used, strict=True)), "")
                            for name, placed in ways])
    return "\n".join(lines)


RECORDER = Recorder()
