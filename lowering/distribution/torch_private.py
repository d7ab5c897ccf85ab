"""Every private torch name that distribution uses, in one place. Checked on torch 2.13.0 (CPU, Python 3.11)."""
from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives  # noqa: F401 (it has their fakes)
from torch._dynamo.eval_frame import set_eval_frame, skip_code
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._local_tensor import enabled_local_tensor_mode as enabled_ranks
from torch.distributed._local_tensor import local_tensor_mode as simulated_ranks
from torch.distributed._local_tensor import maybe_run_for_local_tensor as for_each_rank
from torch.distributed._local_tensor._c10d import _prepare_collective_groups as collective_groups
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [  # torch's, as they are
    "LocalTensor", "LocalTensorMode", "collective_groups", "enabled_ranks", "for_each_rank", "simulated_ranks",
    "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
]

all_to_all_single: Any = torch.ops._c10d_functional.all_to_all_single.default
wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default
LONG = timedelta(days=365)
T = TypeVar("T", bound=torch.Tensor)
F = TypeVar("F", bound=Callable[..., Any])


def wrapper_tensor(cls: type[T], like: torch.Tensor) -> T:
    """A tensor of class ``cls`` with the metadata of ``like`` and no storage (torch's "Extending" page has it)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, layout=like.layout
    )


def runs_at_once(tensor: torch.Tensor) -> bool:
    """Whether an operator on it computes, and nobody sees it: nothing is traced, nor simulated."""
    return type(tensor) is torch.Tensor and not torch._C._len_torch_dispatch_stack()


def by_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor as each rank has it that runs in this process: one, where none are simulated."""
    return list(tensor._local_tensors.values()) if isinstance(tensor, LocalTensor) else [tensor]


def local_tensor(tensor: Any, rank: int) -> torch.Tensor:
    """What a rank has of a tensor under LocalTensorMode."""
    return tensor._local_tensors[rank]


def parameters_of(operator: Any) -> list[str]:
    """The names of an operator's parameters."""
    return [argument.name for argument in operator._schema.arguments]


def local_sizes(size: torch.SymInt) -> dict[int, int]:
    """A size under LocalTensorMode, by rank."""
    return dict(getattr(size.node, "_local_ints", {}))


def same_on_all(size: int | torch.SymInt) -> int:
    """A number under LocalTensorMode that is the same on all ranks."""
    return size if isinstance(size, int) else int(size.node.maybe_as_int())


def drop_empty_hooks(tensor: torch.Tensor) -> None:
    """Let the tensor be as if no backward hook had ever been registered, where all were removed: the dict of hooks
    belongs to the Python object, and is not looked at once the object is another tensor's (swap)."""
    if tensor._backward_hooks is not None and not tensor._backward_hooks:
        tensor._backward_hooks = None


def references(tensor: torch.Tensor) -> int:
    """How many owners the C++ tensor has: 1 is the Python object; a gradient accumulator and saved uses add to it."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange what two tensor objects are: class, attributes, content. Raises RuntimeError with nothing changed.

    ``torch.utils.swap_tensors``, but for two things: it refuses an object that has weak references, which here shall
    see the new content (they are captured graphs' ways to a parameter), and it changes classes before it can fail.
    """
    torch._C._swap_tensor_impl(a, b)
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    for name in getattr(type(a), "__slots__", ()):  # (of ranks that are simulated)
        held = [(one, getattr(one, name)) for one in (a, b) if hasattr(one, name)]
        for one, _ in held:
            delattr(one, name)
        for one, value in held:
            setattr(a if one is b else b, name, value)


def backward_number() -> int:
    """Which backward pass runs in this thread: a number of its own for each, nested ones too. -1: none."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function once the backward pass that runs now is through, and the one that it is nested in (a reentrant
    checkpoint's); what it raises, ``backward()`` raises."""
    def ended() -> None:
        outer: Any = torch._C._current_autograd_node()
        above = [] if outer is None else [node for node, _ in outer.next_functions if node is not None]
        if above:  # what comes next is of the outer pass, which takes a function while it is the one that runs
            handles.extend(node.register_prehook(go_up) for node in above)
        else:
            function()

    def go_up(grads: Any) -> None:
        while handles:
            handles.pop().remove()
        at_end_of_backward(function)

    handles: list[Any] = []
    torch.autograd.Variable._execution_engine.queue_callback(ended)


def surround_backward(around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let each ``backward()`` that begins from now on, and is nested in none, run in such a context."""
    run: Any = torch.autograd._engine_run_backward

    @functools.wraps(run)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with around() if kwargs.get("accumulate_grad") and backward_number() == -1 else contextlib.nullcontext():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = surrounded


@functools.cache
def stage_within(kind: type[torch.Tensor], inner: Callable[[Any], torch.Tensor]) -> None:
    """Let ``torch.distributed.checkpoint.async_save`` copy, of a tensor of this kind, what is in it."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager  # (costs time, and not all need it)

    stager: Any = StateDictStager
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def staged(self: Any, tensor: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(tensor, kind):
            return offload(self, tensor, memo, non_blocking)
        memo[id(tensor)] = copy = self.deepcopy_with_tensor_offload(inner(tensor), memo, non_blocking=non_blocking)
        return copy

    stager._offload_tensor = staged


class Nobody:
    """In the place of what DistributedDataParallel asks to reduce gradients, and to log that: does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def stand_aside(module: Any) -> None:
    """From now on a DistributedDataParallel calls what it wraps, and no more; it holds no parameter by itself."""
    module.reducer._remove_autograd_hooks()
    module.reducer = module.logger = Nobody()
    module._use_python_reducer = True  # what its forward asks before it asks the reducer


def reduces_in_its_own_way(module: Any) -> str:
    """What a DistributedDataParallel does beside averaging all gradients, in words."""
    asked = {"by a communication hook": module._comm_hooks, "in mixed precision": module.mixed_precision,
             "later, with delay_all_reduce_named_params": module._delay_all_reduce_params}  # fmt: skip
    return next((words for words, found in asked.items() if found), "")


def fully_sharded(module: Any) -> tuple[list[torch.Tensor], set[int]]:
    """Parameters that FSDP2 reduces for a module that it wraps, split and as forward sees them; over which ranks."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return [], set()
    found = [getattr(one, name, None) for one in group.fsdp_params for name in ("sharded_param", "_unsharded_param")]
    return [one for one in found if one is not None], set(group.mesh_info.mesh.mesh.flatten().tolist())


def has_body(operator: Any) -> bool:
    """Whether an operator runs graphs that are among its arguments."""
    return isinstance(operator, torch._ops.HigherOrderOperator)


def default_store() -> Any:
    """The store through which the process groups of this process found one another."""
    return torch.distributed.distributed_c10d._get_default_store()


def register_group(name: Any, group: torch.distributed.ProcessGroup) -> None:
    """Let functional collectives find the group by this name, whichever they found before."""
    torch._C._distributed_c10d._unregister_process_group(name)
    torch._C._distributed_c10d._register_process_group(name, group)


def never_destroy(group: torch.distributed.ProcessGroup) -> None:
    """A reference that nobody lets go of. gloo's destructor joins the threads of the group: it waits for a collective
    that has not ended until its timeout, and a process that ends so would hold up those that wait for its end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def never_time_out() -> None:
    """Let the collectives and the look-ups that this process begins from now on wait for as long as it takes."""
    if not torch.distributed.is_initialized():
        return
    for group in [*torch.distributed.distributed_c10d._world.pg_map]:
        group.set_timeout(LONG)
    default_store().set_timeout(LONG)


def begun_collectives() -> dict[str, tuple[list[int], int]]:
    """By name of a group that this rank is in: its ranks, and how many collectives this rank has begun in it."""
    world: Any = torch.distributed.distributed_c10d._world  # (another thread may be about to make a group)
    return {
        str(group.group_name): (list(world.pg_group_ranks.get(group, ())), group._get_sequence_number_for_group())
        for group, (backend, _) in [*world.pg_map.items()] if backend == "gloo"
    }


def accumulates(parameter: torch.Tensor) -> bool:
    """Whether the backward pass that runs now, and reaches a leaf, writes into its ``.grad``: not so autograd.grad."""
    try:
        with torch.enable_grad():  # (get_gradient_edge takes a view, for which ranks that share a tensor communicate)
            history: Any = torch.ops.aten.alias.default(parameter).grad_fn
        return bool(torch._C._will_engine_execute_node(history.next_functions[0][0]))
    except RuntimeError:  # it says that it cannot be asked of a leaf within autograd.grad
        return False


def dtensor_rules() -> dict[Any, Callable[..., Any]]:
    """What DTensor runs for operators in the place of its sharding rules: a dict that takes more. Empty where this
    torch has none."""
    return getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})


def uncompiled(function: F) -> F:
    """The function, left alone by ``torch.compile`` around the call, with all that it calls."""
    def call(*args: Any, **kwargs: Any) -> Any:
        compiling = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(compiling)

    skip_code(call.__code__)
    return functools.wraps(function)(call)  # type: ignore[return-value]
