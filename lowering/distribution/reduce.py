"""Gradients of a mesh's ranks, averaged where each backward ends: by DDP's convention, the mean over the ranks.

Where: ``.grad``, after autograd has accumulated into it, whoever used the parameter and in whichever graph, or in none.
Averaging what is equal already changes nothing, so that several backward passes may accumulate. Whole parameters are
averaged over all axes of the mesh. Of a sharded one, backward has taken the sum over the ranks that share the experts
already, and has divided it (sharded.py); what remains are the axes with replicas.
"""
from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moebius.lowering.distribution.agree import agree, all_reduce, copy_from_first_rank
from moebius.lowering.distribution.errors import DistributionError
from moebius.lowering.distribution.exchange import join_all
from moebius.lowering.distribution.plan import data_axes
from moebius.lowering.distribution.program import same_program
from moebius.lowering.distribution.rendezvous import Call, group_of
from moebius.lowering.distribution.sharded import Sharded, unscale_together, zeros_sharded
from moebius.lowering.distribution.torch_private import (
    accumulates,
    at_end_of_backward,
    backward_number,
    by_rank,
    fully_sharded,
    reduces_in_its_own_way,
    stand_aside,
    surround_backward,
    tree_leaves,
)
from moebius.lowering.distribution.weights import Weights, digest, here, window
from moebius.lowering.step.gradients import Elsewhere
from moebius.lowering.step.hooks import RankHook, is_looked_at, ranks_first
from moebius.lowering.torch_private import hooks_of_accumulation, version_of
from moebius.lowering.values import certain

BUCKET = 1 << 25  # bytes of gradients that travel together


@dataclass
class Known:
    """A parameter whose gradient is averaged. name: for messages of this rank. hook: the handle of what tells that
    backward reached it."""

    parameter: weakref.ref[torch.Tensor]
    name: str = ""
    hook: Any = None

    def told(self) -> str:
        """In words, for messages of this rank."""
        parameter = self.parameter()
        what = f"the parameter {self.name}" if self.name else "a parameter"
        return what if parameter is None else f"{what} of shape {tuple(parameter.shape)}"


@dataclass
class Reducer:
    """All that a mesh averages. known: in the order in which they were met, the same on all ranks; what has died keeps
    its place. touched: places of those that backward has reached since the last time. written: how often each of those
    had been written in place when it was reached. running: backward passes whose end this waits for. signature: of all
    that was ever met. iteration: how many backward passes have ended. ever: places that
    backward has reached on some rank. nodes_have_hooks: on some that accumulate, when the last pass first came here."""

    mesh: Any
    axis: int
    known: list[Known] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    written: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    signature: int = 0
    iteration: int = 0
    ever: set[int] = field(default_factory=set)
    nodes_have_hooks: bool = False

    def place_of(self, parameter: torch.Tensor) -> int | None:
        """Where a parameter stands in ``known``."""
        place = PLACES.get(id(parameter))
        if place is None or place[0] is not self or self.known[place[1]].parameter() is not parameter:
            return None
        return place[1]

    def watch(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], names: dict[int, str]) -> bool:
        """From now on these parameters' gradients are averaged. New ones, and buffers, get the first rank's values.
        names: by id of the parameter. Whether there are new ones."""
        new = [parameter for parameter in parameters if self.place_of(parameter) is None]
        more = zlib.crc32(repr([(tuple(t.shape), str(t.dtype)) for t in (*new, *buffers)]).encode())
        if new and not agree(self.mesh, "the first use of parameters", more):
            raise DistributionError(
                f"rank {self.mesh.get_rank()} has met {len(new)} new parameters ({self.first_few(new, names)}), and "
                f"other ranks other ones; build the same model on every rank"
            )
        with torch.no_grad():
            for tensor in (*new, *(buffers if new else ())):
                if not isinstance(tensor, Sharded):
                    copy_from_first_rank(here(tensor), self.mesh)
        for parameter in new:
            PLACES[id(parameter)] = (self, len(self.known))
            one = Known(weakref.ref(parameter), names.get(id(parameter), ""))
            for axis in range(self.mesh.ndim):
                group_of(self.mesh.get_group(axis)).names[len(self.known)] = one.name
            self.known.append(one)
        self.signature = (self.signature * 31 + more) % (1 << 62) if new else self.signature
        for parameter in parameters:
            place = certain(self.place_of(parameter))
            self.hook(place, parameter)
            if isinstance(parameter, Sharded):
                parameter.whole_copy.called = f"parameter {place}"
        return bool(new)

    @staticmethod
    def first_few(parameters: Sequence[torch.Tensor], names: dict[int, str]) -> str:
        each = [f"{names.get(id(parameter), '')} {tuple(parameter.shape)}".strip() for parameter in parameters]
        return ", ".join(each[:3] + ["..."] * (len(each) > 3))

    def hook(self, place: int, parameter: torch.Tensor) -> None:
        """Let backward tell that it reaches the parameter."""
        if parameter.requires_grad and self.known[place].hook is None:
            self.known[place].hook = parameter.register_hook(RankHook(functools.partial(self.reached, place)))
            ranks_first(parameter)

    def reached(self, place: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Backward is about to accumulate into a parameter. What other hooks get to see is averaged already: they may
        clip it. Collective then; at the end of the pass the mean of what is equal changes nothing."""
        number = backward_number()
        if number not in self.running:
            parameter = self.known[place].parameter()
            if parameter is not None and not accumulates(parameter):
                raise DistributionError(
                    "torch.autograd.grad of a parameter gives the gradient of this rank's loss alone; with mesh=..., "
                    "call backward(), whose gradients are averaged over the ranks"
                )
            if not self.running:
                there = [leaf for one in self.known if (leaf := one.parameter()) is not None]
                self.nodes_have_hooks = hooks_of_accumulation(there)
            self.running.add(number)
            at_end_of_backward(self.passed)
        self.touched.add(place)
        if (leaf := self.known[place].parameter()) is None:
            return None
        self.written.setdefault(place, version_of(leaf))
        refused = grad.layout is not torch.strided or grad.requires_grad
        if refused or not is_looked_at(leaf, self.nodes_have_hooks):
            return None
        agree(self.mesh, f"the gradient of parameter {place}, which has hooks")
        mean = grad.detach().clone()
        with torch.no_grad():
            self.average([here(mean)], self.axes_of(mean))
        return mean

    def axes_of(self, grad: torch.Tensor) -> Sequence[int]:
        """Those over which the mean of a gradient is still to be taken."""
        return data_axes(self.mesh, self.axis) if isinstance(grad, Sharded) else range(self.mesh.ndim)

    def passed(self) -> None:
        """The end of a backward pass that this waited for, and of those that were nested in it."""
        if self.running:
            self.finish()

    def finish(self) -> None:
        """The end of backward(): average what it reached on any rank. Collective."""
        self.running.clear()
        touched, self.touched = self.touched, set()
        written, self.written = self.written, {}
        for place, one in enumerate(self.known):  # what was frozen when it was met, and is no more
            parameter = one.parameter()
            if one.hook is None and parameter is not None and parameter.requires_grad and parameter.grad is not None:
                touched.add(place)
        with torch.no_grad():
            mine = zlib.crc32(repr(sorted(touched)).encode()) ^ self.signature
            values = self.digests(self.sampled(touched), mine)
            alike = agree(self.mesh, "the end of backward()", values, self.trouble(touched, written))
            if not alike:
                touched = self.reached_anywhere(touched)
                self.compare_weights(self.sampled(touched))
            Elsewhere.news = not alike and not touched <= self.ever
            self.ever |= touched
            self.iteration += 1
            found: dict[tuple[bool, torch.dtype], list[torch.Tensor]] = {}
            for place in sorted(touched):
                parameter = self.known[place].parameter()
                if parameter is None:
                    raise DistributionError("a parameter that other ranks train was deleted on this rank")
                if parameter.grad is None:
                    shape = parameter.shards if isinstance(parameter, Sharded) else None
                    parameter.grad = torch.zeros_like(parameter) if shape is None else zeros_sharded(shape)
                grad = parameter.grad
                if isinstance(grad, Sharded):
                    grad.whole_copy.called = f"the gradient of parameter {place}"
                found.setdefault((isinstance(grad, Sharded), grad.dtype), []).append(grad)
            for _, grads in sorted(found.items(), key=lambda item: item[0][0]):  # whole ones first
                self.average([*map(here, grads)], self.axes_of(grads[0]))

    def trouble(self, touched: set[int], written: dict[int, int]) -> str:
        """Why gradients that are there cannot be averaged."""
        for place in touched:
            parameter = self.known[place].parameter()
            if parameter is not None and version_of(parameter) != written.get(place, version_of(parameter)):
                return (
                    f"{self.known[place].told()} was written while backward() ran (by an optimizer "
                    f"that steps within it?), before its gradient was averaged; step after backward()"
                )
            grad = None if parameter is None else parameter.grad
            if parameter is None or grad is None:
                continue
            what = f"the gradient of {self.known[place].told()}"
            if grad.layout is not torch.strided:
                return f"{what} is sparse, and is not averaged over the ranks of a mesh; use sparse=False"
            if grad.requires_grad:
                return f"{what} was asked for with create_graph=True, which does not reach through the mesh's average"
        return ""

    def sampled(self, touched: set[int]) -> list[Weights]:
        """Some of these parameters: of those that all ranks have alike, and of those that replicas have."""
        places = window(sorted(touched), self.iteration)
        iteration = self.iteration * len(places) // max(len(touched), 1)
        found = [self.known[place].parameter() for place in places]
        whole = [None if isinstance(weight, Sharded) else weight for weight in found]
        local = [weight if isinstance(weight, Sharded) else None for weight in found]
        along = [*range(self.mesh.ndim)], data_axes(self.mesh, self.axis)
        return [Weights(whole, iteration, along[0]), Weights(local, iteration, along[1])]

    def digests(self, weights: list[Weights], value: int = 0) -> dict[int, int]:
        """Of ``value``, and of what the ranks along each axis of the mesh have alike."""
        return {axis: digest(weights, axis, value) for axis in (*data_axes(self.mesh, self.axis), self.axis)}

    def compare_weights(self, weights: list[Weights]) -> None:
        """Raise, on all ranks, where they are apart. Collective."""
        if not agree(self.mesh, "the weights", self.digests(weights)):
            for held in weights:
                held.compare(self.mesh)

    def reached_anywhere(self, touched: set[int]) -> set[int]:
        """The places that backward reached on any rank. Collective. All ranks have met the same parameters."""
        if not agree(self.mesh, "which parameters there are", self.signature):
            raise DistributionError("the ranks have met different parameters; build the same model on every rank")
        bits = torch.zeros(len(self.known), dtype=torch.int32, device=self.mesh.device_type)
        bits[sorted(touched)] = 1
        all_reduce(bits, self.mesh, range(self.mesh.ndim), "header")
        return set(bits.nonzero()[:, 0].tolist())

    def average(self, grads: list[torch.Tensor], axes: Iterable[int]) -> None:
        """Write the mean over the ranks of these axes into gradients of one dtype. Collective."""
        axes = [axis for axis in axes if self.mesh.size(axis) > 1]
        ranks = 1
        for axis in axes:
            ranks *= self.mesh.size(axis)
        while axes and grads:
            size, count = 0, 0
            most = [max(part.nbytes for part in by_rank(grad)) for grad in grads]
            while count < len(grads) and (not count or size + most[count] <= BUCKET):
                size += most[count]
                count += 1
            bucket, grads = grads[:count], grads[count:]
            flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(ranks)  # first: a sum may overflow
            all_reduce(flat, self.mesh, axes, "reduce")
            for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))


@contextlib.contextmanager
def to_its_end() -> Iterator[None]:
    """Around each ``backward()``. In a captured call all ranks meet where it ends, those too whose batch had nothing
    that leads to a parameter."""
    before = {key: found.iteration for key, found in REDUCERS.items() if found.mesh == Call.mesh}
    yield
    for key, iteration in before.items():
        if REDUCERS[key].iteration == iteration:
            REDUCERS[key].finish()


REDUCERS: dict[tuple[Any, int], Reducer] = {}
MODULES: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # that a mesh has met
ASIDE: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # whose gradients a mesh averages
FSDP_MODULES: weakref.WeakSet[FSDPModule] = weakref.WeakSet()  # that a mesh has met
FSDP_PARAMETERS: dict[int, weakref.ref[torch.Tensor]] = {}  # of those, by id
PLACES: dict[int, tuple[Reducer, int]] = {}  # by id of the parameter


def average_gradients(
    modules: Iterable[torch.nn.Module], tensors: Iterable[Any], mesh: Any, plan: Any,
    optimizers: Iterable[torch.optim.Optimizer] = (), program: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """From now on each backward averages the gradients of these modules' parameters, and of the parameters among
    ``tensors``, over the mesh; they become equal on all ranks, and so does what these optimizers hold for them. Calling
    again is free. Collective where any is new. program: what has to be alike on all ranks then (program.py).

    Raises RanksDisagreeError where the program differs, DistributionError for what reduces its gradients itself
    (DTensor), in a way of its own or over other ranks (DistributedDataParallel, FSDP2).
    """
    modules = list(modules)
    axis = plan.axis_index(mesh)
    inner = [inner for outer in modules for inner in outer.modules()]
    for module in inner:
        if isinstance(module, DistributedDataParallel) and module not in ASIDE:
            take_over(module, mesh)
    found = [*(p for module in modules for p in module.parameters()), *tensors]
    MODULES.update(inner)
    leave_to_fsdp(inner, mesh)
    parameters = [p for p in found if isinstance(p, torch.nn.Parameter) and not is_left_to_fsdp(p)]
    parameters = list({id(p): p for p in parameters}.values())
    split = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not all(is_split_beside(parameter, mesh) for parameter in split):
        raise DistributionError(
            "a parameter is a DTensor over ranks of mesh=... itself (of parallelize_module or distribute_tensor?), "
            "whose data is their own; tensor parallelism takes an axis of its own beside those of mesh=... (from one "
            "init_device_mesh: parallelize_module(model, all['tp'], ...), capture(step, mesh=all['dp', 'ep']))"
        )
    if split or FSDP_MODULES:
        unscale_together()
    buffers = list({id(b): b for module in modules for b in module.buffers()}.values())
    if not REDUCERS:
        surround_backward(to_its_end)
    reducer = REDUCERS.pop((mesh, axis), None) or Reducer(mesh, axis)
    reducer.mesh, REDUCERS[mesh, axis] = mesh, reducer  # (the last one is what was met last)
    mine = [parameter for parameter in parameters if _belongs_to(parameter, reducer)]
    names: dict[int, str] = {}
    for module in modules:  # the outermost has the longest name
        for name, parameter in module.named_parameters():
            names[id(parameter)] = max(names.get(id(parameter), ""), name, key=len)
    if any(reducer.place_of(parameter) is None for parameter in mine):
        same_program(mesh, program())
    if reducer.watch(mine, buffers, names):
        join_all(mesh)
        share_state(optimizers, mesh)


def take_over(module: DistributedDataParallel, mesh: Any) -> None:
    """From now on the mesh averages the gradients of what DistributedDataParallel wraps, and that no more. Raises
    DistributionError where it would do so in another way."""
    ranks, own = set(dist.get_process_group_ranks(module.process_group)), reduces_in_its_own_way(module)
    if own or ranks != set(mesh.mesh.flatten().tolist()):
        raise DistributionError(
            f"DistributedDataParallel averages {own or f'over the ranks {sorted(ranks)}'}, and mesh=... averages "
            f"plainly, over all of its ranks: do not wrap the model, or pass what is wrapped (its .module)"
        )
    stand_aside(module)
    ASIDE.add(module)


def leave_to_fsdp(modules: Iterable[torch.nn.Module], mesh: Any) -> None:
    """Gradients of parameters that FSDP2 splits are averaged by it. Raises DistributionError where it does so over
    other ranks than the mesh has."""
    FSDP_MODULES.update(module for module in modules if isinstance(module, FSDPModule))
    for module in list(FSDP_MODULES):
        parameters, ranks = fully_sharded(module)
        if parameters and ranks != set(mesh.mesh.flatten().tolist()):
            raise DistributionError(
                f"fully_shard averages over the ranks {sorted(ranks)}, and mesh=... has other ones; give it a mesh of "
                f"all of them"
            )
        for parameter in parameters:  # what forward sees is made in the first one
            FSDP_PARAMETERS[id(parameter)] = weakref.ref(parameter)


def is_split_beside(parameter: DTensor, mesh: Any) -> bool:
    """Whether the ranks that have parts of a parameter have one batch: this one is all that they and a mesh share."""
    return set(parameter.device_mesh.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist()) == {dist.get_rank()}


def is_left_to_fsdp(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 averages the gradient of a parameter that was met."""
    known = FSDP_PARAMETERS.get(id(parameter))
    return known is not None and known() is parameter


def share_state(optimizers: Iterable[torch.optim.Optimizer], mesh: Any) -> None:
    """Give all ranks what the first one's optimizers hold from steps that were taken before. Collective."""
    held: list[Any] = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            held += [place, *tree_leaves([(str(name), state[name]) for name in sorted(state, key=str)])]
    tensors = [value for value in held if isinstance(value, torch.Tensor) and not isinstance(value, Sharded)]
    tensors = [value for value in tensors if not isinstance(value, DTensor) or is_split_beside(value, mesh)]
    plain = (int, float, str, type(None))
    form = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v if isinstance(v, plain) else type(v) for v in held]
    if not agree(mesh, "the state of optimizers", zlib.crc32(repr(form).encode())):
        raise DistributionError(
            "the optimizer holds state of other steps on another rank; load the checkpoint on every rank, or on none"
        )
    with torch.no_grad():
        for tensor in map(here, tensors):
            there = tensor.to(mesh.device_type)  # a count of steps may be on the CPU
            copy_from_first_rank(there, mesh)
            if there is not tensor:
                tensor.copy_(there)


def _belongs_to(parameter: torch.Tensor, reducer: Reducer) -> bool:
    """Whether this reducer is to average it. Another mesh of the same ranks does it as well."""
    other, place = PLACES.get(id(parameter), (reducer, -1))
    if other is reducer or other.known[place].parameter() is not parameter:
        return True
    if set(other.mesh.mesh.flatten().tolist()) == set(reducer.mesh.mesh.flatten().tolist()):
        return False
    raise DistributionError("a parameter's gradient is averaged over another mesh, with other ranks; use one mesh")


def reducer_of(parameter: torch.Tensor) -> Reducer | None:
    """What averages this parameter's gradient, if anything does."""
    reducer, place = PLACES.get(id(parameter), (None, -1))
    return reducer if reducer is not None and reducer.known[place].parameter() is parameter else None


def training_meshes() -> list[Any]:
    """Those over which gradients are averaged, of parameters that there are."""
    return [found.mesh for found in REDUCERS.values() if any(one.parameter() is not None for one in found.known)]


def averaging_mesh() -> Any:
    """The mesh over which gradients are averaged, of parameters that there are; None where there is none. Of several
    the one that was met last: what died of an older one may still be there, on some ranks. Raises DistributionError
    where there are meshes of other ranks."""
    known = training_meshes() if dist.is_initialized() else []
    if len({frozenset(mesh.mesh.flatten().tolist()) for mesh in known}) > 1:
        raise DistributionError("gradients are averaged over meshes of other ranks; call it in the captured function")
    return known[-1] if known else None


def number_of(parameter: Any) -> int | None:
    """Which of the parameters that a mesh averages it is: the same number on all ranks."""
    reducer = reducer_of(parameter)
    return None if reducer is None else reducer.place_of(parameter)


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether some mesh averages this parameter's gradient, or FSDP2 over the ranks of one."""
    return reducer_of(parameter) is not None or is_left_to_fsdp(parameter)


def are_of_a_mesh(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether some of them live on ranks, or are in modules that a mesh has met: in the place of others, by now."""
    met = {id(parameter) for module in list(MODULES) for parameter in module.parameters(recurse=False)}
    placed = any(isinstance(parameter, Sharded) for parameter in parameters) and bool(training_meshes())
    return placed or any(id(parameter) in met for parameter in parameters)


def release(parameter: torch.Tensor) -> None:
    """Take the hook of :meth:`Reducer.watch` away, until the parameter is met again: it is about to move."""
    if reducer_of(parameter) is not None:
        reducer, place = PLACES[id(parameter)]
        if (hook := reducer.known[place].hook) is not None:
            hook.remove()
            reducer.known[place].hook = None


def watch_again(parameter: torch.Tensor) -> None:
    """Average the gradient of a parameter that was released, and has moved."""
    if reducer_of(parameter) is not None:
        reducer, place = PLACES[id(parameter)]
        reducer.hook(place, parameter)
