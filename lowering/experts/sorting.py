"""When the graph runs: the rows of all experts one after another, in the order in which a loop's iterations run
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.kernels.projection import project

__all__ = ["draw_noise", "project", "sort_slots"]


def sort_slots(index: torch.Tensor, experts: int, axes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """(slot [S], expert [S], offsets [experts + 1]), int64: the slots t·K + k of ``index`` [T, K] that go to an expert,
    sorted by it, those of one expert in the row-major order of index's ``axes``."""
    numbers = torch.arange(index.numel(), dtype=torch.int64, device=index.device)
    places = numbers.view(index.shape).permute(axes).reshape(-1)
    chosen = index.permute(axes).reshape(-1)
    inside = (chosen >= 0) & (chosen < experts)
    places, chosen = places[inside], chosen[inside].long()
    expert, order = torch.sort(chosen, stable=True)
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    offsets[1:] = torch.bincount(expert, minlength=experts).cumsum(0)
    return places[order], expert, offsets


def draw_noise(offsets: torch.Tensor, *dropouts: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """What each dropout (p, width, dtype) of an iteration multiplies its rows [S, width] with. Drawn as the iterations
    do: one expert after another, all dropouts of its iteration, each for the rows that the expert has."""
    bounds = offsets.tolist()
    made: list[list[torch.Tensor]] = [[] for _ in dropouts]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for room, (p, width, dtype) in zip(made, dropouts, strict=True):
            ones = torch.ones(stop - start, width, dtype=dtype, device=offsets.device)
            room.append(torch.nn.functional.dropout(ones, p))
    return tuple(map(torch.cat, made))


fx.wrap("sort_slots")
fx.wrap("project")
fx.wrap("draw_noise")
