"""Moves parameters to the ranks that own them, and back, in place: the objects that model and optimizer hold stay."""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from moebius.lowering.distribution.agree import agree, copy_from_first_rank
from moebius.lowering.distribution.errors import PlacementError
from moebius.lowering.distribution.plan import Plan
from moebius.lowering.distribution.reduce import release, watch_again
from moebius.lowering.distribution.sharded import Sharded, keep_grad_sharded, local_rows, own_rows, shard_rows, sharded
from moebius.lowering.distribution.torch_private import drop_empty_hooks, references, stage_within, swap
from moebius.lowering.torch_private import has_gradient_hooks

STAYING: dict[int, weakref.ref[torch.Tensor]] = {}  # by id: what could not move, on all ranks


def stays_whole(parameter: torch.Tensor) -> bool:
    """Whether it was to move, and could not. A later capture does not try again: it may be one rank's alone."""
    known = STAYING.get(id(parameter))
    return known is not None and known() is parameter


@torch.inference_mode(False)
def place_parameters(
    experts: Iterable[torch.nn.Parameter], mesh: DeviceMesh, plan: Plan
) -> list[torch.nn.Parameter]:
    """Split expert parameters over ``plan.axis`` of the mesh by their first axis.

    experts: parameters whose first axis counts experts. Each becomes a :class:`Sharded` under the same identity (and so
        does its ``.grad``); rank r keeps rows ``chunk_span(E, ranks, r)``, and the memory of the rest is freed.
    Returns the parameters that moved in this call ([] if all were placed before: calling again is free). Collective.
    Raises PlacementError, on every rank and with nothing moved, where a parameter cannot move on some rank: a live
    autograd graph or a backward hook holds it, or it is a view or no leaf.
    """
    moving = _unique(p for p in experts if not isinstance(p, Sharded))
    if not moving:
        return []
    for parameter in moving:
        release(parameter)
    try:
        _agree(moving, mesh)
    except PlacementError:
        STAYING.update((id(parameter), weakref.ref(parameter)) for parameter in moving)
        raise
    stage_within(Sharded, shards_of)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[plan.axis_index(mesh)] = Shard(0)
    with torch.no_grad():
        for parameter in moving:
            copy_from_first_rank(parameter, mesh)
            _take_place(parameter, _split(parameter, mesh, placements))
            if parameter.requires_grad:
                keep_grad_sharded(parameter)
    return moving


@torch.inference_mode(False)
def collect_parameters(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Undo :func:`place_parameters`: every sharded parameter among these becomes an ordinary whole one. Collective.

    Returns those that moved. Optimizer state is left as it is: this is for saving a model and for handing it on.
    """
    moving = _unique(p for p in parameters if isinstance(p, Sharded))
    if moving:
        _agree(moving, moving[0].shards.device_mesh)
    for parameter in moving:
        release(parameter)
        if parameter.leaf_hook is not None:
            parameter.leaf_hook.remove()
        whole = torch.nn.Parameter(parameter.shards.full_tensor(), parameter.requires_grad)
        if parameter.grad is not None:
            whole.grad = parameter.grad.shards.full_tensor()
        _take_place(parameter, whole)
        del parameter.shards, parameter.leaf_hook, parameter.whole_copy
        watch_again(parameter)
    return moving


@torch.inference_mode(False)
def place_state(optimizer: torch.optim.Optimizer) -> None:
    """Split the state that an optimizer already holds for parameters that were placed after it had taken steps."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Sharded):
            for name, value in state.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, Sharded)
                if plain and value.shape == parameter.shape:
                    state[name] = shard_rows(value, parameter.shards)


def to_graph_input(tensor: Any, conversion: str) -> Any:
    """What a lowered graph gets for one input, connected to autograd. conversion: see :func:`input_conversions`.

    "as is": the value itself. "shard→local": this rank's rows. "shard→full": the whole tensor (collective).
    Raises PlacementError where a graph wants this rank's rows of a tensor that was not placed.
    """
    if conversion == "shard→local":
        if not isinstance(tensor, Sharded):
            raise PlacementError("a graph that takes this rank's experts was given a whole parameter; place it first")
        return local_rows(tensor)
    return tensor.full_tensor() if conversion == "shard→full" and isinstance(tensor, Sharded) else tensor


def shards_of(parameter: Sharded) -> DTensor:
    return parameter.shards


def _split(parameter: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.nn.Parameter:
    axis = placements.index(Shard(0))
    whole = parameter.detach()
    inner = DTensor.from_local(
        own_rows(whole, mesh.size(axis), mesh.get_local_rank(axis)), mesh, placements, run_check=False,
        shape=whole.shape, stride=torch.empty(whole.shape, dtype=whole.dtype, device="meta").stride(),
    )
    split = torch.nn.Parameter(sharded(inner), parameter.requires_grad)
    if parameter.grad is not None:
        split.grad = shard_rows(parameter.grad, inner)
    return split


def _take_place(parameter: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    attributes = {name: value for name, value in vars(parameter).items() if name not in vars(new)}
    drop_empty_hooks(parameter)
    swap(parameter, new)
    vars(parameter).update(attributes)  # what users hang on a parameter (a mark for weight decay, a name) stays on it


def _agree(parameters: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Raise PlacementError on every rank of the mesh if a parameter cannot move on one of them. Collective."""
    obstacles = [text for text in map(_obstacle, parameters) if text]
    what = f"moving the parameters of shapes {[tuple(parameter.shape) for parameter in parameters]}"
    if not agree(mesh, what, int(bool(obstacles))):
        raise PlacementError("; ".join(obstacles) or "an expert parameter cannot move on another rank, which says why")
    if obstacles:
        raise PlacementError("; ".join(obstacles))


def _obstacle(parameter: torch.Tensor) -> str | None:
    what = f"the expert parameter of shape {tuple(parameter.shape)}"
    if not parameter.is_leaf:
        return f"{what} is not a leaf tensor; only parameters can be placed"
    if not isinstance(parameter, Sharded) and has_gradient_hooks(parameter):
        return f"{what} has a backward hook, which would be lost; register it after the first captured call"
    if references(parameter) > 1:
        return (
            f"{what} is held by a live autograd graph, or by DistributedDataParallel around the model; free the losses "
            f"of earlier calls before the first captured one, and do not wrap the model"
        )
    return None


def _unique(tensors: Iterable[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())
