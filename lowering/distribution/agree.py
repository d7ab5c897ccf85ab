"""Whether all ranks have come to the same place: asked before a collective whose order only the program gives.

Every such question is one small collective of one form, so that two different ones that meet are told apart, on every
rank, and nothing is computed from the other's data.
"""
from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from moebius.lowering.distribution.errors import DistributionError, RanksDisagreeError
from moebius.lowering.distribution.exchange import traffic
from moebius.lowering.distribution.plan import reduced_bytes


def agree(mesh: Any, what: str, value: int = 0, trouble: str = "") -> bool:
    """Whether ``value`` (of 62 bits) is the same on all ranks of the mesh. Collective.

    Raises RanksDisagreeError, on every rank, where one is at another place (``what``), and DistributionError where one
    has ``trouble``: that one says which.
    """
    place = zlib.crc32(what.encode())
    told = torch.tensor([place, -place, value, -value, int(bool(trouble))], device=mesh.device_type)
    all_reduce(told, mesh, range(mesh.ndim), "header", dist.ReduceOp.MAX)
    high, low, most, least, others = told.tolist()
    if high != -low:
        raise RanksDisagreeError(
            f"rank {dist.get_rank()} has come to {what}, and another rank to something else; with mesh=..., every "
            f"rank has to run the same program, each on its own part of the batch"
        )
    if trouble:
        raise DistributionError(trouble)
    if others:
        raise DistributionError(f"another rank cannot go on with {what}, and says why")
    return bool(most == -least)


def all_reduce(tensor: torch.Tensor, mesh: Any, axes: Any, purpose: str, how: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce in place over these axes of a mesh, and count what it sends. Collective."""
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, how, group=mesh.get_group(axis))
            traffic.add(purpose, reduced_bytes(tensor.numel() * tensor.element_size(), mesh.size(axis)))


def copy_from_first_rank(tensor: torch.Tensor, mesh: Any) -> None:
    """Write the first rank's values into the tensor on all ranks. Collective."""
    value = tensor.detach()
    if value.numel() == 0:
        return
    buffer = value.contiguous()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
    if buffer.data_ptr() != value.data_ptr():
        value.copy_(buffer)
