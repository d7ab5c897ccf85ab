"""What a rank says of its variables: of a tensor that lives on the ranks, which rows it has."""
from __future__ import annotations

import reprlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moebius.lowering.distribution.sharded import Sharded, split_axis
from moebius.lowering.planner.traffic import chunk_span

LEFT_OUT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def listing(variables: Mapping[str, Any]) -> str:
    """A line for each variable but modules, functions and classes."""
    shown = {name: value for name, value in variables.items() if not isinstance(value, LEFT_OUT) and name[:2] != "__"}
    return "\n".join(f"{name} = {words(value)}" for name, value in shown.items()) or "no variables yet"


def words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f"{type(value).__name__} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return kind + (", requires grad" if value.requires_grad else "") + (f"; {rows}" if (rows := own(value)) else "")
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}(...)"
    return " ".join(reprlib.repr(value).split())


def own(tensor: torch.Tensor) -> str:
    """Which part of a tensor this rank has; "" if all."""
    if (span := span_of(tensor)) is not None:
        return f"rows {span[0]} to {span[1] - 1} are on this rank" if span[0] < span[1] else "no row is on this rank"
    return f"on this rank {list(tensor.to_local().shape)}" if isinstance(tensor, DTensor) else ""


def span_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The rows that this rank has of a tensor whose first axis is split, as experts' weights are."""
    if not isinstance(tensor, Sharded):
        return None
    axis, mesh = split_axis(tensor.shards), tensor.shards.device_mesh
    return chunk_span(tensor.shape[0], mesh.size(axis), mesh.get_local_rank(axis))


def whole(value: Any) -> Any:
    """Collective, where it is spread over the ranks."""
    if not isinstance(value, Sharded | DTensor):
        return value
    with torch.no_grad():
        return value.full_tensor()


def expert(value: Any, number: int, rank: int) -> str:
    """Row ``number`` of what is stacked over experts, or "" where it is on another rank."""
    span = span_of(value) if isinstance(value, Sharded) else None
    if span is None:
        return f"expert {number}, which each rank has: {value[number]!r}"
    if not span[0] <= number < span[1]:
        return ""
    return f"expert {number} of rank {rank}: {value.local[number - span[0]]!r}"
