"""Experts that live on ranks: what is moved there before a captured graph first runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..options import Options
from ..trace.segment import Segment
from ..trace.trace import Request


@dataclass
class Placement:
    """Expert parameters that a plan moves onto the ranks before the graph first runs (``lowering.distribution``)."""

    parameters: list[torch.nn.Parameter]
    others: list[torch.Tensor]
    plan: Any

    @classmethod
    def wanted(cls, segment: Segment, request: Request) -> Placement | None:
        """What is still to be moved for this segment, or None."""
        from moebius.lowering.distribution import parameters_to_place

        assert segment.lowered is not None
        parameters = parameters_to_place(segment.lowered.gm)
        if not parameters:
            return None
        chosen = {id(p) for p in parameters}
        modules = [a for a in (*request.args, *request.kwargs.values()) if isinstance(a, torch.nn.Module)]
        others = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers()) if id(t) not in chosen}
        return cls(parameters, list(others.values()), segment.lowered.gm.meta["plan"])

    def place(self, options: Options) -> None:
        """Collective. If it cannot be done nothing was moved; the whole parameters give the right result too."""
        from moebius.lowering.distribution import PlacementError, place_parameters

        try:
            place_parameters(self.parameters, self.others, options.mesh, self.plan)
        except PlacementError as error:
            warnings.warn(f"moebius: experts stay whole on each rank: {error}", stacklevel=6)
