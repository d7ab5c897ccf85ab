"""A tensor whose rows live on the ranks, in a form that can take the place of an existing parameter.

Why not a plain DTensor: no parameter can be turned into one in place (DTensor has ``__slots__``, so the two object
layouts differ), and putting new objects into the model would leave stale every list of parameters that the optimizer or
the user holds. :class:`Sharded` has a parameter's layout, so it can take its place, and it hands every operator to the
DTensor inside: DTensor stays the engine that knows how operators and shards go together.
"""
from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from moebius.lowering.distribution.agree import AgreeFirst, agree, all_reduce, copy_from_first_rank
from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.torch_private import (
    LocalTensor,
    by_rank,
    dtensor_rules,
    for_each_rank,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    uncompiled,
    wrapper_tensor,
)
from moebius.lowering.planner.traffic import chunk_span
from moebius.lowering.step.hooks import RankHook
from moebius.lowering.torch_private import is_view, may_write, written_by_schema

NO_ADDRESS = (
    "the values of a parameter that lives on the ranks have no address of their own (what asks for it, safetensors or "
    "a kernel of your own, would read or write memory that is something else's); give it full_tensor(), to be read "
    "(save_pretrained: as state_dict=...), or call collect_parameters(model.parameters()) first, on all ranks"
)
LONG = 120  # letters of what a tensor is called
UNSCALE: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclass(eq=False)
class WholeCopy:
    """The whole of a tensor, gathered to be read, as long as nothing is written: ranks may read it unequally often.
    keeps: whether it may be kept (a parameter is written by its operators, or in a captured call, alone). writes: how
    often anything was written that shares its memory. base, view: of a view, what it is one of, and how. called: what
    it is the whole of, in words that are the same on all ranks."""

    keeps: bool = False
    writes: list[int] = field(default_factory=lambda: [0])
    held: torch.Tensor | None = None
    as_of: int = -1
    base: Sharded | None = None
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    called: str = ""

    def is_there(self) -> bool:
        if (base := self.base) is not None:
            return base.whole_copy.is_there()
        return self.held is not None and self.as_of == self.writes[0]

    def read(self, shards: DTensor) -> torch.Tensor:
        """Collective, where it is not there."""
        if (base := self.base) is not None and self.view is not None:
            return self.view(base.whole_copy.read(base.shards))
        if self.held is None or not self.is_there():
            with torch.inference_mode(False), torch.no_grad():  # (it may be read for training later)
                whole: torch.Tensor = shards.full_tensor()
            if not self.keeps:
                return whole
            self.held, self.as_of = whole, self.writes[0]
            COPIES.add(self)
        return self.held


COPIES: weakref.WeakSet[WholeCopy] = weakref.WeakSet()


def forget_copies() -> None:
    """Let go of whole copies of parameters. On all ranks, or on none."""
    for copy in COPIES:
        copy.held = None
    COPIES.clear()


if TYPE_CHECKING:
    Base = torch.Tensor
else:
    Base = object


class Readable(Base):
    """What reads the memory of a tensor that is not all in this rank's: its values, gathered, to read alone."""

    def values(self) -> torch.Tensor:
        """All of it, as an ordinary tensor."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """The values, gathered, as an array that cannot be written into. Collective."""
        found = self.values().detach().requires_grad_(self.requires_grad).numpy(force=force)
        found.flags.writeable = False
        return found

    def tolist(self) -> Any:
        """The values, gathered. Collective."""
        return self.values().tolist()

    def data_ptr(self, **how: Any) -> Any:
        """Raises DistributionError: nowhere is there memory that has the tensor."""
        raise DistributionError(NO_ADDRESS)

    storage = __dlpack__ = data_ptr


class Sharded(Readable):
    """A tensor whose first axis is split over the ranks of one mesh axis; its meaning is that of the whole tensor.

    Shape, strides and dtype are the whole tensor's. A result stays sharded where each of its rows depends on the same
    rows alone (optimizers, clipping). With other tensors (activations: each rank has its own) the whole is gathered and
    each rank computes alone. So uncaptured use is right as well, provided that all ranks do it; ranks that do not do
    the same raise RanksDisagreeError. Ordinary tensors that are written into a sharded one must be equal on all ranks.

    Its gradient is that of the mean of the losses of the ranks that share it.
    """

    shards: DTensor
    leaf_hook: Any = None
    whole_copy: WholeCopy

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows: an ordinary tensor that shares memory with the shard, with no autograd history."""
        return self.shards.to_local().detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, gathered from all ranks; its gradient flows back to the shards. Collective."""
        return _Gather.apply(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of this rank's rows: what a count of bytes wants to see."""
        return self.local.untyped_storage()

    @property
    def _is_param(self) -> bool:
        """What torch sets where a tensor of another class becomes a parameter (``load_state_dict(assign=True)``)."""
        return bool(vars(self).get("is_parameter"))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        vars(self)["is_parameter"] = self.whole_copy.keeps = value

    def values(self) -> torch.Tensor:
        """The whole tensor to read, unknown to autograd. Collective, where it is not there."""
        if not self.whole_copy.is_there():
            agree(self.shards.device_mesh, f"reading {called([self])}")
        return self.whole_copy.read(self.shards)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Sharded(shape={tuple(self.shape)}, local={tuple(self.local.shape)}, mesh={self.shards.device_mesh})"

    @property
    def data(self) -> torch.Tensor:
        """The same values, unknown to autograd, as for any tensor; assigning writes them in place."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.dtype, value.shape, value.device) != (self.dtype, self.shape, self.device):
            raise DistributionError(
                f"a parameter that lives on the ranks is {self.dtype}, {tuple(self.shape)}, {self.device} and cannot "
                f"become {value.dtype}, {tuple(value.shape)}, {value.device}; convert the model before its first "
                f"captured call, or call collect_parameters(model.parameters()) first"
            )
        with torch.no_grad():
            self.copy_(value)

    def __setitem__(self, key: Any, value: Any) -> None:
        whole = gather(self.shards, f"writing into {called([self])}")
        whole[key] = value.detach() if isinstance(value, torch.Tensor) else value
        self.copy_(whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is saved is whole, and can be loaded anywhere: a file of one rank's rows would lack the rest.
        whole: torch.Tensor = gather(self.shards, f"saving {called([self])}")
        if isinstance(self, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, self.requires_grad)
        return whole.__reduce_ex__(protocol)

    # What torch.distributed.checkpoint asks of a tensor that is spread over ranks (of a DTensor too).

    def __create_write_items__(self, fqn: str, tensor: Any) -> Any:
        return self.shards.__create_write_items__(fqn, self.shards)

    def __create_chunk_list__(self) -> Any:
        return self.shards.__create_chunk_list__()

    def __get_tensor_shard__(self, index: Any) -> Any:
        return self.shards.__get_tensor_shard__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            twin: Any = sharded(self.shards.clone())  # type: ignore[arg-type]
            if isinstance(self, torch.nn.Parameter):
                twin = torch.nn.Parameter(twin, self.requires_grad)
            if self.requires_grad:
                keep_grad_sharded(twin.requires_grad_())
            if self.grad is not None:
                twin.grad = self.grad.clone()
            memo[id(self)] = twin
        return memo[id(self)]

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_lost_writes(func, args, kwargs or {})
        if func is UNSCALE:
            return _unscale(*args)
        flat, spec = tree_flatten((args, kwargs or {}))
        flat = [value.whole if isinstance(value, Gathered) else value for value in flat]
        writes = tree_leaves(written_by_schema(func, args, kwargs or {}))
        for value in writes:
            if isinstance(value, Sharded):
                value.whole_copy.writes[0] += 1
        if _steps_number_by_number(func, args):
            mine_args, mine_kwargs = tree_unflatten([v.local if isinstance(v, Sharded) else v for v in flat], spec)
            return func(*mine_args, **mine_kwargs)
        first = next(value for value in flat if isinstance(value, Sharded))
        mesh = first.shards.device_mesh
        replicate = [Replicate()] * mesh.ndim
        split = {value.shape for value in writes if isinstance(value, Sharded)}
        owners: dict[int, torch.Tensor] = {}  # id of the DTensor that went in -> the tensor that it stood for

        def lower(value: Any) -> Any:
            if isinstance(value, Sharded):
                owners[id(value.shards)] = value
                return value.shards
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                if value.shape in split and all(value is not one for one in writes):
                    return shard_rows(value, first.shards).shards  # (DTensor splits none over more ranks than rows)
                inner = DTensor.from_local(value, mesh, replicate, run_check=False)
                owners[id(inner)] = value
                return inner
            return value

        def lift(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            if id(value) in owners:  # an operator that works in place gave back its argument
                return owners[id(value)]
            return sharded(value, WholeCopy(called=made)) if _split_by_rows(value) else value.full_tensor()

        def seal(value: Any) -> Any:
            # What torch calls a view is a copy here. Autograd forbids writes into it, but only where it keeps watch.
            guarded = torch.is_grad_enabled() and any(a.requires_grad for a in flat if isinstance(a, Sharded))
            return Gathered(value) if isinstance(value, torch.Tensor) and is_view(func) and not guarded else value

        told = f"{func} of {called(flat)}"
        made = shortened(told) if torch.Tag.pointwise in func.tags else ""

        def on_whole_tensors() -> Any:
            held, reads = [value for value in flat if isinstance(value, Sharded)], not may_write(func)
            if not (reads and all(value.whole_copy.is_there() for value in held)):
                agree(mesh, f"reading {called(flat)}" if reads else told)
            whole = {id(v): v.whole_copy.read(v.shards) if reads else v.shards.full_tensor() for v in held}
            inner_args, inner_kwargs = tree_unflatten([whole.get(id(value), value) for value in flat], spec)
            out = func(*inner_args, **inner_kwargs)
            for value in writes:
                if isinstance(value, Sharded):
                    if torch.Tag.nondeterministic_seeded in func.tags:
                        copy_from_first_rank(whole[id(value)], mesh)
                    value.shards.to_local().copy_(shard_rows(whole[id(value)], value.shards).local)
            back = {id(whole[key]): value for key, value in ((id(v), v) for v in flat) if key in whole}
            return tree_map(lambda value: back[id(value)] if id(value) in back else seal(value), out)

        if torch.Tag.nondeterministic_seeded in func.tags:
            return on_whole_tensors()  # every rank draws for all rows; where they are kept, the first rank's are
        if _with_own_data(func, flat):
            return on_whole_tensors()
        if is_view(func):
            found = _views_of_rows(func, flat, spec, first)
            return on_whole_tensors() if found is None else found
        if not may_write(func) and _fails_without_rows(func, flat, spec):
            return on_whole_tensors()
        inner_args, inner_kwargs = tree_unflatten([lower(value) for value in flat], spec)
        try:
            with AgreeFirst(mesh, told):
                return tree_map(lift, _summed_together(func(*inner_args, **inner_kwargs)))
        except (DistributionError, torch.OutOfMemoryError):
            raise
        except NotImplementedError:
            return on_whole_tensors()  # DTensor has no rule for this operator
        except RuntimeError:
            if may_write(func):
                raise
            return on_whole_tensors()  # nor one for uneven rows


class ShardedTensor(Sharded, torch.Tensor):
    """In the place of an ordinary tensor."""


class SimulatedShardedTensor(Sharded, torch.Tensor):
    """In the place of a tensor with what each of many simulated ranks has, whose layout this is."""

    __slots__ = tuple(LocalTensor.__slots__)


def sharded(shards: DTensor, copy: WholeCopy | None = None) -> Sharded:
    """A tensor whose rows these are."""
    kind: Any = SimulatedShardedTensor if isinstance(shards.to_local(), LocalTensor) else ShardedTensor
    self: Sharded = wrapper_tensor(kind, shards)
    self.shards, self.whole_copy = shards, copy or WholeCopy()
    return self


def _views_of_rows(func: Any, flat: list[Any], spec: Any, base: Sharded) -> Any:
    """What a view gives, this rank's rows of it, each viewed where it lies; None where some of it is not laid out by
    rows."""
    def view(whole: torch.Tensor) -> Any:
        args, kwargs = tree_unflatten([whole if value is base else value for value in flat], spec)
        return func(*args, **kwargs)

    metas, form = tree_flatten(view(torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")))
    each = [_rows_of_each(meta, base) for meta in metas]
    if 0 in each:
        return None
    made = []
    for place, (meta, count) in enumerate(zip(metas, each, strict=True)):
        local = _rows_viewed(base.shards.to_local(), count, meta.shape[1:], meta.stride(), meta.storage_offset())
        shards, copy = _laid_out_as(local, meta.shape, meta.stride(), base.shards), base.whole_copy
        if (meta.shape, meta.stride()) != (base.shape, base.stride()):
            one = functools.partial(lambda whole, place: tree_leaves(view(whole))[place], place=place)
            copy = WholeCopy(copy.keeps, copy.writes, base=base, view=one)
        made.append(sharded(shards, copy))
    return tree_unflatten(made, form)


def _rows_of_each(view: torch.Tensor, base: Sharded) -> int:
    """How many rows of a view lie within each row of what it views, one after the other; 0 where they do not."""
    rows, stride, like = base.shape[0], base.stride(0), base.shards
    count = view.shape[0] // rows if view.dim() and rows else 0
    if not count or view.shape[0] != count * rows or view.stride(0) * count != stride or not view.numel():
        return 0
    reach = zip((count, *view.shape[1:]), view.stride(), strict=True)
    within = view.storage_offset() + sum((size - 1) * step for size, step in reach) < stride
    even = count == 1 or rows % like.device_mesh.size(split_axis(like)) == 0
    plain = view.dtype == base.dtype and not (view.is_conj() or view.is_neg())
    alike = all(_strides_fit(part, base.stride()) for part in by_rank(like.to_local()))
    return count if within and even and plain and alike else 0


def _strides_fit(part: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a rank's rows lie as the whole tensor would: the rank may have one of them, or none."""
    each = zip(part.shape, part.stride(), strides, strict=True)
    return not part.numel() or all(mine == whole for size, mine, whole in each if size > 1)


@for_each_rank
def _rows_viewed(
    local: torch.Tensor, count: int, shape: torch.Size, stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    return local.as_strided((len(local) * count, *shape), stride, local.storage_offset() + offset)


def _fails_without_rows(func: Any, flat: list[Any], spec: Any) -> bool:
    """Whether an operator fails on a rank that has no rows (the greatest of none), where there is one. The same on all
    ranks."""
    like = next(value for value in flat if isinstance(value, Sharded)).shards
    ranks = like.device_mesh.size(split_axis(like))
    low, high = chunk_span(like.shape[0], ranks, ranks - 1)
    if low < high:
        return False
    none = list(flat)
    for i, v in enumerate(flat):
        if isinstance(v, Sharded):
            none[i] = torch.empty((0, *v.shape[1:]), dtype=v.dtype, device=v.device)
    args, kwargs = tree_unflatten(none, spec)
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError):
        return True
    return False


def _with_own_data(func: Any, flat: list[Any]) -> bool:
    """Whether an operator computes something new of a sharded tensor and of one that each rank may have its own of."""
    if may_write(func) or func.name().startswith("aten::_foreach"):
        return False
    plain = [v for v in flat if isinstance(v, torch.Tensor) and not isinstance(v, Sharded | DTensor)]
    return any(value.dim() > 0 for value in plain)


def _steps_number_by_number(func: Any, args: tuple) -> bool:
    """Whether this is an optimizer's fused step, and what belongs to a parameter on ranks is there too, all of it."""
    if not (func.name().startswith("aten::_fused_") and may_write(func)):
        return False
    each = zip(*(arg for arg in args if isinstance(arg, list | tuple) and arg), strict=True)
    return all(len({isinstance(v, Sharded) for v in held if v.dim()}) <= 1 for held in each)


def called(flat: list[Any]) -> str:
    """Which the sharded tensors among arguments are, in words that are the same on all ranks, and not for others."""
    held = [value for value in flat if isinstance(value, Sharded)]
    owners = [value if value.whole_copy.base is None else value.whole_copy.base for value in held]
    first, *others = [owner.whole_copy.called or "a parameter" for owner in owners]
    more = f" and {len(others)} more ({zlib.crc32(repr(others).encode()):08x})" if others else ""
    return f"{first} of shape {tuple(held[0].shape)}{more}"


def shortened(words: str) -> str:
    """The end of them, and what tells them from others with that end."""
    return words if len(words) <= LONG else f"{words[-LONG:].lstrip()} ({zlib.crc32(words.encode()):08x})"


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """GradScaler's operator, of gradients that are split in any ways: what overflows on one rank has overflowed on
    all. (DTensor's rule takes no mixed lists.) Collective."""
    shards = [grad.shards if isinstance(grad, Sharded) else grad for grad in grads]
    held = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in shards]
    UNSCALE(held, found_inf, inverse_scale)
    for mesh in dict.fromkeys(grad.device_mesh for grad in shards if isinstance(grad, DTensor)):
        agree(mesh, "unscaling gradients")
        all_reduce(found_inf, mesh, range(mesh.ndim), "reduce", dist.ReduceOp.MAX)


def unscale_together() -> None:
    """Let GradScaler take lists in which DTensors of others come before ours."""
    rule = dtensor_rules().get(UNSCALE)
    if rule is not None and not isinstance(rule, MixedRule):
        dtensor_rules()[UNSCALE] = MixedRule(rule)


@dataclass
class MixedRule:
    """DTensor's rule for an operator of lists of DTensors alone; ours for others."""

    rule: Any

    def __call__(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if all(isinstance(grad, DTensor) for grad in args[0]):
            self.rule(operator, args, kwargs)
        else:
            _unscale(*args)


class Gathered(Readable, torch.Tensor):
    """A gathered copy of what would be a view into a parameter, had one rank all of it: to read, not to write into."""

    whole: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Gathered:
        self = wrapper_tensor(cls, whole)
        self.whole = whole
        return self

    def values(self) -> torch.Tensor:
        return self.whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({self.whole!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_lost_writes(func, args, kwargs or {})
        flat, spec = tree_flatten((args, kwargs or {}))
        inner_args, inner_kwargs = tree_unflatten([v.whole if isinstance(v, Gathered) else v for v in flat], spec)
        out = func(*inner_args, **inner_kwargs)
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, out) if is_view(func) else out


def _refuse_lost_writes(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, Gathered) for value in tree_leaves(written_by_schema(func, args, kwargs))):
        raise DistributionError(
            "this writes into a view of a parameter that lives on the ranks, where it would be lost; assign by index "
            "(parameter[i] = value), or call collect_parameters(model.parameters()) first"
        )


def _split_by_rows(value: DTensor) -> bool:
    """Whether a result is laid out as parameters are: by its first axis over one mesh axis, whole on the others."""
    return [p for p in value.placements if not p.is_replicate()] == [Shard(0)]


def shard_rows(full: torch.Tensor, like: DTensor) -> Sharded:
    """This rank's rows, copied, of an ordinary tensor that is equal on all ranks; laid out as ``like``."""
    axis = split_axis(like)
    mine = own_rows(full.detach(), like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis))
    return _sharded(mine, full.shape, like)


@for_each_rank
def own_rows(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """A copy of a rank's rows of what all ranks have."""
    low, high = chunk_span(whole.shape[0], ranks, rank)
    return whole[low:high].clone(memory_format=torch.contiguous_format)


def _sharded(local: torch.Tensor, shape: torch.Size, like: DTensor) -> Sharded:
    return sharded(_laid_out_as(local, shape, torch.empty(shape, dtype=local.dtype, device="meta").stride(), like))


def _laid_out_as(local: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], like: DTensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def gather(value: Any, why: str) -> torch.Tensor:
    """The whole of a value that is spread over ranks, or summed over them. Collective, but for what each rank has."""
    with AgreeFirst(value.device_mesh, why):
        whole: torch.Tensor = value.full_tensor()
    return whole


def _summed_together(out: Any) -> Any:
    """What an operator gave back, its sums over ranks taken in one exchange: the norms of many tensors, say."""
    flat, spec = tree_flatten(out)
    alike: dict[Any, list[int]] = {}
    for place, value in enumerate(flat):
        parts = value.placements if isinstance(value, DTensor) else ()
        if any(part.is_partial() for part in parts) and not any(part.is_shard() for part in parts):
            alike.setdefault((value.shape, value.dtype, value.placements), []).append(place)
    for (_, _, placements), places in alike.items():
        if len(places) > 1:
            mesh, held = flat[places[0]].device_mesh, torch.stack([flat[place].to_local() for place in places])
            whole = DTensor.from_local(held, mesh, placements, run_check=False).full_tensor()
            for place, value in zip(places, whole.unbind(), strict=True):
                flat[place] = value
    return tree_unflatten(flat, spec)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Sharded) -> torch.Tensor:
        ctx.like = tensor.shards
        return gather(ctx.like, f"the whole of {called([tensor])}")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Sharded:
        return mean_rows(grad, ctx.like)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Sharded) -> torch.Tensor:
        ctx.like = tensor.shards
        return tensor.local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Sharded:
        like = ctx.like
        return _sharded((grad / like.device_mesh.size(split_axis(like))).contiguous(), like.shape, like)


def local_rows(tensor: Sharded) -> torch.Tensor:
    """This rank's rows, connected to autograd: their gradient, which is of the sum of the losses of the ranks that
    share the tensor, becomes the (sharded) gradient of ``tensor``, of their mean."""
    return _Local.apply(tensor)


def split_axis(like: DTensor) -> int:
    """The mesh axis whose ranks share the rows."""
    return next(i for i, placement in enumerate(like.placements) if placement.is_shard())


def mean_rows(grad: torch.Tensor, like: DTensor) -> Sharded:
    """This rank's rows of the mean over the ranks that share a tensor of whole gradients. Collective."""
    agree(like.device_mesh, f"the gradient of a parameter of shape {tuple(like.shape)}")
    mean = grad.detach().contiguous() / like.device_mesh.size(split_axis(like))
    all_reduce(mean, like.device_mesh, [split_axis(like)], "reduce")
    return shard_rows(mean, like)


def zeros_sharded(like: DTensor) -> Sharded:
    """Zeros in the layout of ``like``."""
    return _sharded(torch.zeros_like(like.to_local()), like.shape, like)


def keep_grad_sharded(leaf: Any) -> None:
    """From now on ``leaf.grad`` is sharded too: of whole gradients (uncaptured use), this rank's rows of the mean."""
    like = leaf.shards
    hook = RankHook(lambda grad: grad if isinstance(grad, Sharded) else mean_rows(grad, like))
    leaf.leaf_hook = leaf.register_hook(hook)
