"""Every private torch name that capture uses, but for those of fakes (``torch_fakes``) and sizes (``torch_sizes``).

Checked on torch 2.13.0 (CPU with Python 3.11, CUDA with 3.12 and 3.13). Nothing else in capture/ may reach into
``torch._*``; what other versions spell differently is to be answered here, once.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._C import _disabled_torch_function_impl as disabled_torch_function
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import decorators
from torch._dynamo.decorators import graph_break, mark_static, maybe_mark_dynamic
from torch._dynamo.eval_frame import set_eval_frame, skip_code
from torch._dynamo.mutation_guard import GenerationTracker
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.fx.graph_module import _loader as fx_sources
from torch.fx.node import _get_qualified_name as qualified_name
from torch.optim.optimizer import _use_grad_for_differentiable
from torch.utils import checkpoint as checkpointing
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as group_tensors_by_device_and_dtype
from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

from moebius.lowering.autocast import autocast_now, depth_of_autocast, leave_to_depth
from moebius.lowering.step.filters import blocks, leave_to
from moebius.lowering.torch_private import storage_of as storage_of
from moebius.lowering.torch_private import version_of as tensor_version

from . import random_state
from .torch_warnings import ON_FAKES as ON_FAKES
from .torch_warnings import fakes_without_warning as fakes_without_warning

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "LoaderIterator",
    "disabled_torch_function",
    "free_unbacked_symbols",
    "graph_break",
    "group_tensors_by_device_and_dtype",
    "has_foreach_support",
    "set_eval_frame",
    "tree_leaves",
    "tree_map",
    "skip_code",
]

# What a fake operator raises when its answer depends on the numbers in a tensor.
DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# What marks tensors for torch.compile: attributes on them, which plain Python sets and does not read.
# (``mark_dynamic`` has an object with a hash of its own in a set: a graph break.)
MARKING = frozenset({maybe_mark_dynamic, mark_static, getattr(decorators, "_set_dim_range", mark_static)})

# Where torch's operators live at the Python level (torch.add, torch.nn.functional.linear, ...).
variable_functions = torch._C._VariableFunctions
OPERATOR_KINDS = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)  # what a dispatch mode is shown
operator_text = torch._ops.OpOverload.__str__  # (it asks a C object, of which nobody knows what it does)
PACK_PADDED = torch._VF._pack_padded_sequence
PAD_PACKED = torch._VF._pad_packed_sequence
PAD_ROWS = torch._C._nn.pad_sequence
OPERATOR_OBJECTS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # what torch.ops.x.y and its overloads are
LEGACY_TYPE = type(torch.FloatTensor)  # the metaclass of torch's old tensor types, whose isinstance() asks the dtype
# torch.ops, torch.ops.x and torch.ops.x.y find what is asked of them when it is first asked, and keep it.
OPERATOR_LIBRARIES = (torch._ops._Ops, torch._ops._OpNamespace, torch._ops.OpOverloadPacket)
VARIABLE_FUNCTION_MODULES = frozenset(
    ("torch._C._nn", "torch._C._special", "torch._C._fft", "torch._C._linalg", "torch._C._sparse")
)


log_api_usage = torch._C._log_api_usage_once
set_grad_enabled = torch._C._set_grad_enabled
InferenceGuard = torch._C._InferenceMode
has_torch_function = torch._C._has_torch_function
# the same question of arguments, not of a tuple of them
HAVE_TORCH_FUNCTION = (torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic)
# Whether torch.func.grad, vmap or another of their kind runs, and the modules that make them. Checked on torch 2.13.
in_function_transform = torch._C._are_functorch_transforms_active
FUNCTION_TRANSFORMS = frozenset({"torch._functorch.eager_transforms", "torch._functorch.vmap"})
TRANSFORM_READERS = (
    in_function_transform,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._functorch.maybe_current_level,
)
# torch.compile tags each module that is made; what the step makes is nobody's to tag.
tag_module = getattr(GenerationTracker.tag, "__func__", GenerationTracker.tag)
# Whether a profiler runs: an attribute of this module, read in each warm call.
PROFILER, PROFILES = torch.autograd.profiler, "_is_profiler_enabled"
can_ask_for_profiler = hasattr(PROFILER, PROFILES)
# C functions that answer from torch's global state, which is guarded as a whole.
STATE_READERS = (
    torch._C._accelerator_getAccelerator,
    torch._C._get_privateuse1_backend_name,
    torch._C._get_tracing_state,
    torch._C._is_tracing,  # which a module's call asks since 2.15
    torch._C._len_torch_function_stack,
    torch._C._is_autocast_available,
    torch._C._is_torch_function_mode_enabled,
    *TRANSFORM_READERS,
    torch._C._cuda_getDeviceCount if hasattr(torch._C, "_cuda_getDeviceCount") else torch._C._get_tracing_state,
)
STATE_OF_ALL = (
    torch.get_default_dtype, torch.are_deterministic_algorithms_enabled, torch._C._get_deterministic_algorithms,
)  # fmt: skip
# C functions that change torch's global state; each is kept as a node, in order.
STATE_WRITERS = (
    torch._C._set_grad_enabled,
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled,
    torch.clear_autocast_cache,
    torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting,
)

AUTOCAST_EXIT = torch.amp.autocast.__exit__.__code__

# Those of its switches that no guard looks at, and what reads each. Checked on torch 2.13.
SWITCHES: dict[Callable[..., Any], tuple[Callable[[], Any], ...]] = {
    torch.set_anomaly_enabled: (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled),
    **{
        getattr(torch._C, f"_set_sdp_use_{name}"): (getattr(torch._C, f"_get_{name}_sdp_enabled"),)
        for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")
    },
    torch._C._set_sdp_priority_order: (torch._C._get_sdp_priority_order,),
}

# What the step can only ask: whether a CUDA graph is recorded. (A build without the device has a class in its place,
# which raises.) Checked on torch 2.13.
ASKED = tuple(
    function
    for name in ("_cuda_isCurrentStreamCapturing", "_xpu_isCurrentStreamCapturing")
    if isinstance(function := getattr(torch._C, name, None), types.BuiltinFunctionType)
)

STATE_MAKER = "_init_group"  # the method with which torch's optimizers make a parameter's state, in its first step
health_check = torch.optim.Optimizer._accelerator_graph_capture_health_check
module_hook_on_tensors = torch.utils.hooks.BackwardHook._apply_on_tensors
# What runs an optimizer's step(): its finally clause puts back the gradient mode. What calls a module that has hooks:
# its handler runs those hooks that these dicts name, the global one and the module's. Checked on torch 2.13.
SWITCHED_GRADIENTS = _use_grad_for_differentiable(torch.is_grad_enabled).__code__
MODULE_CALL = torch.nn.Module._call_impl.__code__
CALLED_ON_ERRORS = ("_global_forward_hooks_always_called", "_forward_hooks_always_called")

# What distributions ask of their arguments. Checked on torch 2.13.
IS_ALL_TRUE = torch._is_all_true

# The two contexts of selective checkpointing, and the operators that they pass over. Checked on torch 2.13.
SELECTIVE_MODES = (checkpointing._CachingTorchDispatchMode, checkpointing._CachedTorchDispatchMode)
PASSED_OVER = checkpointing.SAC_IGNORED_OPS


def argument_names(operator: Any) -> list[str]:
    """The names of the arguments of an operator that a dispatch mode is shown."""
    return [argument.name for argument in operator._schema.arguments]


def forget_source_with(gm: torch.fx.GraphModule) -> None:
    """fx keeps the text of each graph's code for as long as the process lives: let it go with the graph."""
    name = gm.forward.__code__.co_filename
    if name.startswith("<eval_with_key>"):
        weakref.finalize(gm, forget_source, name)


def forget_source(name: str) -> None:
    linecache.cache.pop(name, None)
    fx_sources.eval_cache.pop(name, None)


def version_of(value: Any) -> Any:
    """How often a tensor was written to in place; 0 of anything else."""
    return tensor_version(value) if isinstance(value, torch.Tensor) else 0


def state_maker(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's function that makes state: ``(optimizer, group, *lists that it fills)``."""
    return getattr(type(optimizer), STATE_MAKER)


def unwrapped(function: Any) -> Any:
    """What ``torch._disable_dynamo`` wrapped."""
    return getattr(function, "__wrapped__", function)


def under_compile_switch(function: Any, compiling: bool) -> types.CellType | None:
    """The cell with what ``torch.compiler.disable`` wrapped: a program's function, or a method of torch's optimizers.

    The wrapper holds torch.compile off while the function runs, and does nothing else: nothing to be kept, unless
    something of torch.compile's is running (``compiling``). What else of torch's it wraps is not to be in a graph.
    """
    if function.__code__.co_qualname != "DisableContext.__call__.<locals>._fn":
        return None
    cell: types.CellType = function.__closure__[function.__code__.co_freevars.index("fn")]
    module = str(getattr(cell.cell_contents, "__module__", None))
    programs = module.split(".")[0] != "torch" and not compiling
    return cell if programs or module.startswith("torch.optim") else None


def compiles(file: str, name: str) -> bool:
    """Whether a function of this file and name is ``torch.compile``, or what calls compiled code."""
    folder = os.path.dirname(torch.__file__)
    return file.startswith(os.path.join(folder, "_dynamo", "")) or (
        name == "compile" and file == os.path.join(folder, "__init__.py")
    )


def found_by_name(function: Any) -> bool:
    """fx writes torch's functions into a graph's code by name: whether that name still leads to this function."""
    if not callable(function) or str(getattr(function, "__module__", None)).split(".")[0] not in ("torch", "None"):
        return True
    found: Any = sys.modules
    try:
        first, *rest = qualified_name(function).split(".")
        found = sys.modules.get(first)
        for name in rest:
            found = getattr(found, name, None)
    except RuntimeError:
        return False  # torch's, but none of its modules has it (torch._VF.unique_dim)
    except (AttributeError, KeyError, AssertionError):
        return True  # it has no such name: fx keeps the object
    return found is function or found is None


def makes_transform(function: Any) -> bool:
    """Whether it is a function of torch.func's that turns functions into others, or runs one of those."""
    return function.__globals__.get("__name__") in FUNCTION_TRANSFORMS and function.__name__ != "_check_randomness_arg"


def kept_out(function: Any) -> bool:
    """Whether torch itself wraps a function to keep it out of graphs (``torch._disable_dynamo``)."""
    return function.__code__.co_qualname == "_disable_dynamo.<locals>.inner"


def is_symbolic(value: object) -> bool:
    """Whether the value is one of torch's symbolic scalars."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_made_of(value: Any, symbols: set[Any]) -> bool:
    """Whether a number that values decide is computed of these alone."""
    found = free_unbacked_symbols(value) if is_symbolic(value) else set()
    return bool(found) and found <= symbols


def order_of_groups(keys: tuple[tuple[torch.device, torch.dtype], ...]) -> tuple[int, ...]:
    """The order in which ``_group_tensors_by_device_and_dtype`` gives groups that it met in this one."""
    found = group_tensors_by_device_and_dtype([[torch.empty(0, device=place, dtype=kind) for place, kind in keys]])
    return tuple(keys.index(key) for key in found)


def depends_on_values(value: Any) -> bool:
    """Whether a fake tensor or symbolic scalar has sizes that only the running program will know."""
    return (is_symbolic(value) or isinstance(value, torch.Tensor)) and bool(free_unbacked_symbols(value))


def is_certain(condition: Any) -> bool:
    """Whether a comparison of sizes holds whatever they are; nothing is guarded."""
    return statically_known_true(condition)


def expression(value: Any) -> Any:
    """The sympy expression of a symbolic scalar, after the replacements known so far; a plain number as itself."""
    return value.node.expr if is_symbolic(value) else sympy.sympify(value)


def equal_where(a: Any, b: Any, condition: Any, truth: bool) -> bool:
    """Whether two integers are certainly equal where a condition on integers has this truth: ``n == 0`` has ``s + n``
    equal to ``s``, and so has ``n <= 0`` of a count."""
    relation = expression(condition)
    if not isinstance(condition, torch.SymBool):
        relation = sympy.Ne(relation, 0)
    if not truth:
        relation = sympy.Not(relation)
    if isinstance(relation, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):  # zero <= 0
        zero = sympy.expand(relation.lts - relation.gts + (1 if isinstance(relation, sympy.Lt | sympy.Gt) else 0))
        if not condition.node.shape_env.bound_sympy(zero).lower >= 0:
            return False
    elif isinstance(relation, sympy.Eq):
        zero = sympy.expand(relation.lhs - relation.rhs)
    else:
        return False
    apart = sympy.expand(expression(a) - expression(b))
    return any(sympy.expand(apart + times * zero) == 0 for times in (-1, 0, 1))


def constant_of(value: Any) -> Any:
    """The Python number that a symbolic scalar is certain to equal, or None."""
    expr = expression(value)
    if type(value) is torch.SymFloat:  # (sympy's 0 and infinity are no Floats)
        return float(expr) if expr.is_number else None
    if expr.is_Integer:
        return int(expr)
    return bool(expr) if expr in (sympy.true, sympy.false) else None


def switches() -> dict[str, Any]:
    """torch's global switches that a graph may throw, as ``throw_switches`` takes them."""
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")},
        "cache": torch.is_autocast_cache_enabled(),
        "others": tuple(tuple(read() for read in readers) for readers in SWITCHES.values()),
    }


def modes() -> tuple[Any, ...]:
    """Those of the switches that no read of is logged, to be compared."""
    found = switches()
    return found["grad"], tuple(found["autocast"].items()), found["cache"]


def throw_switches(wanted: dict[str, Any]) -> None:
    torch._C._set_grad_enabled(wanted["grad"])
    for device, (enabled, dtype) in wanted["autocast"].items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(wanted["cache"])
    for (write, readers), values in zip(SWITCHES.items(), wanted["others"], strict=True):
        if values != tuple(read() for read in readers):
            write(*values)


class NotWhileTracing(logging.Filter):
    """FakeTensorMode logs each operator that fails, as an error (2.13). A trace expects such: the user's own operator
    fails when the graph runs, and a ``try`` around it may be why it stands there."""

    threads: list[int] = []  # that trace now

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread not in self.threads


logging.getLogger("torch._subclasses.fake_tensor").addFilter(NotWhileTracing())


def close_unwanted_trace_log() -> None:
    """torch's log of traces makes one record, by the program's own record factory, before it finds that nobody set
    TORCH_TRACE and goes (2.13). It goes at once."""
    log = logging.getLogger("torch.__trace")
    for handler in [*log.handlers]:
        if getattr(handler, "root_dir", "") is None and hasattr(torch.version, "git_version"):
            log.removeHandler(handler)


close_unwanted_trace_log()


@contextlib.contextmanager
def fakes_without_log() -> Iterator[None]:
    thread = threading.get_ident()
    NotWhileTracing.threads.append(thread)
    try:
        yield
    finally:
        NotWhileTracing.threads.remove(thread)


@contextlib.contextmanager
def autocast_as(state: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    """Inside, autocast is on for these devices with these dtypes, and for no others."""
    before, wanted = switches(), dict(state)
    now = {d: (d in wanted, wanted.get(d, dtype)) for d, (_, dtype) in before["autocast"].items()}
    throw_switches(before | {"autocast": now})
    try:
        yield
    finally:
        throw_switches(switches() | {name: before[name] for name in ("autocast", "cache")})


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """The user's hooks on tensors saved for backward see the graph's tensors when it runs, and no fake ones before."""
    autograd, hooks = torch._C._autograd, []
    while (hook := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(hook)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hook in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*hook)


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Whatever tracing does to torch's global switches, random state and the warnings' filters is undone at the end."""
    before, depth = switches(), len(blocks())
    inference = torch.is_inference_mode_enabled()
    nesting = depth_of_autocast()
    try:
        with random_state.preserved(), fakes_without_warning(), fakes_without_log(), without_saved_tensor_hooks():
            yield
    finally:
        throw_switches(before)
        leave_to(depth)
        assert torch.is_inference_mode_enabled() == inference
        leave_to_depth(nesting)
        if nesting == 0 and not autocast_now():  # (switched on without a block, it holds copies of the user's)
            torch.clear_autocast_cache()  # of copies of fakes


def user_mode() -> Any:
    """The innermost mode that sees each operator and is no default device or simulated rank, None if there is none."""
    for count, at in (
        (torch._C._len_torch_dispatch_stack(), torch._C._get_dispatch_stack_at),
        (torch._C._len_torch_function_stack(), torch._C._get_function_stack_at),
    ):
        for position in reversed(range(count)):
            if not isinstance(mode := at(position), DeviceContext) and not is_simulation(mode):
                return mode
    return None


def local_tensors() -> Any:
    """torch's module of ranks in one process, if the program has such ranks."""
    return sys.modules.get("torch.distributed._local_tensor")


def is_simulation(mode: Any) -> bool:
    """Whether a mode runs each operator for all ranks of a mesh."""
    return (module := local_tensors()) is not None and type(mode) is module.LocalTensorMode


@contextlib.contextmanager
def as_first_rank() -> Iterator[None]:
    """Operators are those of one rank, where the program simulates many."""
    module = local_tensors()
    with contextlib.nullcontext() if module is None else module.maybe_disable_local_tensor_mode():
        yield


def is_simulated(tensor: Any) -> bool:
    """Whether a tensor holds what each of many ranks has, where the program simulates those."""
    return (module := local_tensors()) is not None and type(tensor) is module.LocalTensor


def dims_by_rank(tensor: Any) -> set[int]:
    """The axes along which a simulated tensor's size is another one on some ranks."""
    return {d for d, size in enumerate(tensor.shape) if type(size) is not int} if is_simulated(tensor) else set()


def of_one_rank(tensor: Any) -> torch.Tensor:
    """A simulated tensor as a rank has it, and where sizes differ, as a rank with the largest has it, of 2 at least:
    all ranks have one graph, in which those vary. Any other tensor as it is."""
    if not is_simulated(tensor):
        return tensor
    each = list(tensor._local_tensors.values())
    if not (varies := dims_by_rank(tensor)):
        return each[0]
    sizes = [max(2, *(one.shape[d] for one in each)) if d in varies else n for d, n in enumerate(each[0].shape)]
    return each[0].new_empty(sizes)


def asked_of_one_rank(predicate: Callable[..., bool]) -> Callable[..., bool]:
    """A question about sizes that takes simulated tensors too."""
    return lambda *tensors: predicate(*map(of_one_rank, tensors))


def is_default_device(device: torch.device) -> bool:
    """Whether tensors are made on this device anyhow: on the CPU, where no other is the default (that is a mode)."""
    return device == torch.device("cpu") and not torch._C._len_torch_function_stack()


def saving_is_seen(by_checkpoints_alone: bool = False) -> bool:
    """Whether hooks on saved tensors are on that see which these are, or run the program's code between operators:
    ``torch.utils.checkpoint``'s, which compares what it saves twice, and all that are not torch's own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # True: also where torch itself traces
    if hooks is None:
        return False
    if hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    own = (type(hook) is not types.FunctionType or not hook.__module__.startswith("torch.") for hook in hooks)
    return not by_checkpoints_alone and any(own)


READERS: dict[str, Callable[[], Any]] = {
    "number of function modes": torch._C._len_torch_function_stack,
    "number of dispatch modes": torch._C._len_torch_dispatch_stack,
    "inference mode": torch.is_inference_mode_enabled,
    "jit.trace": torch._C._is_tracing,
    "func transform": in_function_transform,
}


def global_state() -> tuple[tuple[Callable[[], Any], Any], ...]:
    """Functions of torch's, and what they answer as long as torch's global switches are what they are now.

    Covers grad mode, inference mode, autocast, default dtype, determinism flags, tf32, thread count, and that no torch
    function or dispatch mode was entered (a default device is such a mode), nor a transform of ``torch.func`` or
    ``torch.jit.trace``.
    """
    return ((GlobalStateGuard().check, True), *((reader, reader()) for reader in READERS.values()))


def other_state(ask: Callable[[], Any], then: Any) -> Iterator[tuple[str, Any, Any]]:
    """Of a function of ``global_state`` that answers otherwise by now: what it is about, what that was and is."""
    if not isinstance(before := getattr(ask, "__self__", None), GlobalStateGuard):
        yield from ((name, then, ask()) for name, reader in READERS.items() if reader is ask)
        return
    was, now = (json.loads(state.__getstate__()) for state in (before, GlobalStateGuard()))  # type: ignore[arg-type]
    for name in before.reason().split():
        known = type(now.get(name)) is bool or name == "num_threads"
        if (found := re.fullmatch(r"autocast\((\w+)\)_enabled", name)) is not None:
            known, now[name] = True, torch.is_autocast_enabled(found[1])
            was[name] = not now[name]
        yield name, *((was[name], now[name]) if known else ("one", "another"))


def raw_symbol(value: Any) -> Any:
    """The symbol that an input's size was given, whatever it was found equal to since; None if it is not a symbol."""
    symbol = value.node._expr
    return symbol if symbol.is_Symbol else None


def uncompiled(owner: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A GraphModule whose Python code is made when somebody first wants it."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(owner, graph)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another. Checked on torch 2.13."""
    return tensor._base is not None


def owns_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def is_fake(tensor: Any) -> bool:
    """Whether it is a fake tensor with a strided layout, nothing derived from one."""
    return type(tensor) in (FakeTensor, torch.nn.Parameter) and tensor.layout is torch.strided


class Joined(torch.autograd.Function):
    """A tensor that is, for autograd, some function of others."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("fakes have no gradients")


def joined(mode: FakeTensorMode, like: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """A new fake tensor with the metadata of ``like`` whose gradient flows to ``sources``; none: it needs none."""
    if any(is_symbolic(s) for s in (*like.shape, *like.stride())):
        with mode:
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    else:
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        made = FakeTensor(mode, meta, like.device)
    if not sources:
        return made
    with torch.enable_grad():
        return Joined.apply([made], *sources)
