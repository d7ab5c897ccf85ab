"""Questions to all ranks of a mesh, before collectives whose order the program gives; and collectives over axes."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moebius.lowering.distribution.channels import traffic
from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.rendezvous import group_of, headers
from moebius.lowering.distribution.torch_private import by_rank, for_each_rank
from moebius.lowering.planner.traffic import reduced_bytes
from moebius.lowering.torch_private import DispatchMode

COLLECTIVES = {"_c10d_functional", "_dtensor", "c10d"}  # namespaces of torch's operators


def agree(mesh: Any, what: str, value: int | dict[int, int] = 0, trouble: str = "") -> bool:
    """Whether ``value`` (of 60 bits) is the same on all ranks of the mesh. Collective. A dict: by axis of the mesh, in
    the order to ask in; axes along which fewer things are alike come last.

    Raises RanksDisagreeError, on every rank, where one is at another place (``what``), and DistributionError where one
    has ``trouble``: that one says which.
    """
    differs, others = 0, int(bool(trouble))
    for axis, mine in value.items() if isinstance(value, dict) else ((axis, value) for axis in range(mesh.ndim)):
        if (ranks := mesh.size(axis)) > 1:
            told = in_a_number(ranks, mine, others, differs, mesh.device_type)
            others, differs = in_words(headers(group_of(mesh.get_group(axis)), told, what), mine)
    if trouble:
        raise DistributionError(trouble)
    if others:
        raise DistributionError(f"another rank cannot go on with {what}, and says why")
    return not differs


class AgreeFirst(DispatchMode):
    """Within it the ranks agree on ``what`` before the first collective that an operator of DTensor comes to, if it
    comes to one: which do is DTensor's own matter, and differs between versions of torch."""

    def __init__(self, mesh: Any, what: str):
        super().__init__()
        self.mesh, self.what = mesh, what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # (what DTensor makes of it comes here next)
        if self.what and func.namespace in COLLECTIVES:
            agree(self.mesh, self.what)
            self.what = ""
        return func(*args, **(kwargs or {}))


@for_each_rank
def in_a_number(ranks: int, mine: int, others: int, differs: int, device: str) -> torch.Tensor:
    """[ranks]: what a rank says to each."""
    return torch.full((ranks,), mine % (1 << 60) * 4 + others * 2 + differs, dtype=torch.int64, device=device)


@for_each_rank
def in_words(found: torch.Tensor, mine: int) -> tuple[int, int]:
    """Of what all ranks say: whether one has trouble, and whether one differs or knows of one that does."""
    numbers = found.tolist()
    differs = any(number & 1 or number >> 2 != mine % (1 << 60) for number in numbers)
    return max(number >> 1 & 1 for number in numbers), int(differs)


def all_reduce(tensor: torch.Tensor, mesh: Any, axes: Any, purpose: str, how: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce in place over these axes of a mesh, and count what it sends. Collective."""
    for axis in axes:
        if mesh.size(axis) > 1:
            group_of(mesh.get_group(axis)).all_reduce(tensor, how)
            for part in by_rank(tensor):
                traffic.add(purpose, reduced_bytes(part.nbytes, mesh.size(axis)))


def copy_from_first_rank(tensor: torch.Tensor, mesh: Any) -> None:
    """Write the first rank's values into the tensor on all ranks. Collective."""
    value = tensor.detach()
    if value.numel() == 0:
        return
    buffer = value.contiguous()
    for axis in range(mesh.ndim):
        group_of(mesh.get_group(axis)).copy_from_first(buffer)
    if buffer is not value:
        value.copy_(buffer)
