"""A tensor whose rows live on the ranks, in a form that can take the place of an existing parameter.

Why not a plain DTensor: ``torch.utils.swap_tensors`` cannot turn a parameter into one (DTensor has ``__slots__``, so the
two object layouts differ), and putting new objects into the model would leave stale every list of parameters that the
optimizer or the user holds. :class:`Sharded` has a parameter's layout, so it can take its place, and it hands every
operator to the DTensor inside: DTensor stays the engine that knows how operators and shards go together.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.plan import chunk_span
from moebius.lowering.distribution.torch_private import (
    is_mutable,
    tree_flatten,
    tree_map,
    tree_unflatten,
    wrapper_tensor,
)


class Sharded(torch.Tensor):
    """A tensor whose first axis is split over the ranks of one mesh axis; its meaning is that of the whole tensor.

    Shape, strides and dtype are the whole tensor's. A result stays sharded where each of its rows depends on the same
    rows alone (optimizers, clipping); any other result is an ordinary tensor, equal on every rank, for which whatever
    it needs was gathered. So uncaptured use is right as well, provided that all ranks do it. Ordinary tensors that take
    part must be equal on all ranks.
    """

    shards: DTensor
    leaf_hook: Any = None

    @staticmethod
    def __new__(cls, shards: DTensor, requires_grad: bool = False) -> Sharded:
        self = wrapper_tensor(cls, shards, requires_grad)
        self.shards = shards
        return self

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows: an ordinary tensor that shares memory with the shard, with no autograd history."""
        return self.shards.to_local().detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered from all ranks; its gradient flows back to the shards. Collective."""
        return _Gather.apply(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Sharded(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, mesh={self.shards.device_mesh})"

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same values, unknown to autograd, as for any tensor; assigning writes them in place."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.dtype, value.shape, value.device) != (self.dtype, self.shape, self.device):
            raise DistributionError(
                f"a parameter that lives on the ranks is {self.dtype}, {tuple(self.shape)}, {self.device} and cannot become "
                f"{value.dtype}, {tuple(value.shape)}, {value.device}; convert the model before its first captured call, "
                f"or call collect_parameters(model.parameters()) first"
            )
        with torch.no_grad():
            self.copy_(value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shards.detach().__reduce_ex__(protocol)  # loads as a DTensor, which checkpoint tools know

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            twin: Any = Sharded(self.shards.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, self.requires_grad)
            if self.requires_grad:
                keep_grad_sharded(twin.requires_grad_())
            if self.grad is not None:
                twin.grad = self.grad.clone()
            memo[id(self)] = twin
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        mesh = next(a.shards.device_mesh for a in flat if isinstance(a, Sharded))
        replicate = [Replicate()] * mesh.ndim
        owners: dict[int, torch.Tensor] = {}  # id of the DTensor that went in -> the tensor that it stood for

        def lower(value: Any) -> Any:
            if isinstance(value, Sharded):
                owners[id(value.shards)] = value
                return value.shards
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                inner = DTensor.from_local(value, mesh, replicate, run_check=False)
                owners[id(inner)] = value
                return inner
            return value

        def lift(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            if id(value) in owners:  # an operator that works in place gave back its argument
                return owners[id(value)]
            return Sharded(value) if _split_by_rows(value) else value.full_tensor()

        inner_args, inner_kwargs = tree_unflatten([lower(value) for value in flat], spec)
        try:
            return tree_map(lift, func(*inner_args, **inner_kwargs))
        except (NotImplementedError, RuntimeError):
            if is_mutable(func):
                raise
            # DTensor has no rule for this operator (unbind of the split axis, say): do it on whole tensors.
            whole = [value.shards.full_tensor() if isinstance(value, Sharded) else value for value in flat]
            inner_args, inner_kwargs = tree_unflatten(whole, spec)
            return func(*inner_args, **inner_kwargs)


def _split_by_rows(value: DTensor) -> bool:
    """Whether a result is laid out as parameters are: by its first axis over one mesh axis, whole on the others."""
    return [p for p in value.placements if not p.is_replicate()] == [Shard(0)]


def shard_rows(full: torch.Tensor, like: DTensor) -> Sharded:
    """This rank's rows of an ordinary tensor that is equal on all ranks, laid out as ``like``. Copies: ``full`` can go."""
    axis = next(i for i, placement in enumerate(like.placements) if placement.is_shard())
    low, high = chunk_span(full.shape[0], like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis))
    return _sharded(full.detach()[low:high].clone(), full.shape, like)


def _sharded(local: torch.Tensor, shape: torch.Size, like: DTensor) -> Sharded:
    stride = torch.empty(shape, device="meta").stride()
    return Sharded(
        DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Sharded) -> torch.Tensor:
        ctx.like = tensor.shards.detach()
        return tensor.shards.full_tensor()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Sharded:  # type: ignore[override]
        return shard_rows(grad, ctx.like)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Sharded) -> torch.Tensor:
        ctx.like = tensor.shards.detach()
        return tensor.local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Sharded:  # type: ignore[override]
        return _sharded(grad.contiguous(), ctx.like.shape, ctx.like)


def local_rows(tensor: Sharded) -> torch.Tensor:
    """This rank's rows, connected to autograd: their gradient becomes the (sharded) gradient of ``tensor``."""
    return _Local.apply(tensor)


def keep_grad_sharded(leaf: Any) -> None:
    """From now on ``leaf.grad`` is sharded too: of a whole gradient (uncaptured use), this rank's rows are kept."""
    like = leaf.shards
    leaf.leaf_hook = leaf.register_hook(lambda grad: grad if isinstance(grad, Sharded) else shard_rows(grad, like))
