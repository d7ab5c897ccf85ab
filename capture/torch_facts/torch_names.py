"""The private names of torch's that moebius uses, and what for. Each exists in every torch of ``versions.TORCHES``, but
for those of EXISTS_IN and ONLY_SOME.

They are used in torch_private.py, torch_fakes.py, torch_flags.py, torch_known.py, torch_pointwise.py, torch_sizes.py,
torch_scripts.py, torch_warnings.py of this room and in two torch_private.py of lowering. What another torch lacks is
answered there, by asking whether it is there. Held to by tests/cli/test_torch_names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

NAMES = {
    # what a captured program may ask or switch
    "torch._C._InferenceMode": "inference mode as an object",
    "torch._C._accelerator_getAccelerator": "a reader of global state, which is guarded",
    "torch._C._are_functorch_transforms_active": "whether a transform of torch.func runs",
    "torch._C._cuda_getDeviceCount": "a reader of global state",
    "torch._C._cuda_isCurrentStreamCapturing": "what only the running step can ask",
    "torch._C._functorch.maybe_current_level": "a reader of global state",
    "torch._C._functorch.peek_interpreter_stack": "a reader of global state",
    "torch._C._get_deterministic_algorithms": "a reader of global state",
    "torch.autograd.forward_ad._current_level": "whether forward-mode gradients are on, which ours has not",
    "torch._C._get_privateuse1_backend_name": "a reader of global state",
    "torch._C._get_warnAlways": "a setting that tracing changes for itself",
    "torch._C._get_tracing_state": "whether torch.jit.trace runs",
    "torch._C._is_autocast_available": "a reader of global state",
    "torch._C._is_torch_function_mode_enabled": "a reader of global state",
    "torch._C._is_tracing": "whether torch.jit.trace runs; a module's call asks it since 2.15",
    "torch._C._log_api_usage_once": "logging of torch's, which tracing leaves out",
    "torch._C._set_grad_enabled": "a switch that is a node of the graph",
    **{f"torch._C._set_sdp_use_{name}": "a switch that is a node of the graph"
       for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")},
    **{f"torch._C._get_{name}_sdp_enabled": "what that switch is"
       for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")},
    "torch._C._get_sdp_priority_order": "what that switch is",
    "torch._C._set_sdp_priority_order": "a switch that is a node of the graph",
    "torch._C._xpu_isCurrentStreamCapturing": "what only the running step can ask",
    "torch._is_all_true": "what distributions ask of their arguments",
    # modes, overrides, hooks
    "torch._C._TorchDispatchModeKey.FAKE": "whether operators run on fakes",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "the program's hooks on saved tensors, off while tracing",
    "torch._C._autograd._push_saved_tensors_default_hooks": "the same, put back",
    "torch._C._autograd._top_saved_tensors_default_hooks": "the same, read",
    "torch._C._disabled_torch_function_impl": "how a class says that it overrides no operator",
    "torch._C._get_dispatch_mode": "whether operators run on fakes",
    "torch._C._get_dispatch_stack_at": "the program's modes",
    "torch._C._get_function_stack_at": "the program's modes",
    "torch._C._has_torch_function": "whether an argument overrides operators",
    "torch._C._has_torch_function_unary": "the same",
    "torch._C._has_torch_function_variadic": "the same",
    "torch._C._len_torch_dispatch_stack": "the program's modes",
    "torch._C._len_torch_function_stack": "the program's modes",
    "torch._C._jit_pass_constant_propagation": "what a compiled function does beside computing its result",
    "torch._C._jit_pass_dce": "the same",
    "torch.jit._state": "which function a compiled one was compiled from",
    "torch.jit._state._try_get_jit_cached_function": "the same",
    "torch.fx.experimental._config": "whether sizes that vary may be 1",
    "torch._refs": "operators in Python, for numbers that vary where those in C take today's",
    "torch.utils._device.DeviceContext": "a default device is a mode, too",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees each operator that runs on fakes",
    "torch.utils.checkpoint.SAC_IGNORED_OPS": "what selective checkpointing passes over",
    "torch.utils.checkpoint._CachedTorchDispatchMode": "a context of selective checkpointing",
    "torch.utils.checkpoint._CachingTorchDispatchMode": "a context of selective checkpointing",
    "torch.utils.hooks.BackwardHook._apply_on_tensors": "hooks of modules on gradients",
    "torch.nn.modules.module._global_forward_hooks_always_called": "hooks that run after an error",
    "torch.nn.Module._call_impl": "the code that runs those hooks",
    # operators
    "torch._C._VariableFunctions": "torch's operators as Python has them",
    "torch._assert_async": "holds the running step to what the graph relies on",
    "torch._neg_view": "a sample for the guards' C code",
    "torch._VF._pack_padded_sequence": "an operator whose fake is made of lengths",
    "torch._C._nn.pad_sequence": "an operator whose fake asks which sequence is the longest",
    "torch._VF._pad_packed_sequence": "the way back, whose fake asks for a count",
    "torch._ops.HigherOrderOperator": "what a dispatch mode is shown",
    "torch._ops.OpOverload": "what a dispatch mode is shown",
    "torch._ops.OpOverload._schema": "what an operator writes and returns",
    "torch._ops.OpOverloadPacket": "torch.ops.x.y",
    "torch._ops._OpNamespace": "torch.ops.x",
    "torch._ops._Ops": "torch.ops",
    # tensors and symbolic sizes
    "torch.Tensor._backward_hooks": "a tensor's gradient hooks",
    "torch.Tensor._base": "what a tensor is a view of",
    "torch.Tensor._cdata": "a tensor's address, for the guards' C code",
    "torch.Tensor._post_accumulate_grad_hooks": "a tensor's hooks after accumulation",
    "torch.Tensor._make_wrapper_subclass": "tensors of a class without storage, for sharded parameters",
    "torch.Tensor._use_count": "who else owns a tensor",
    "torch.Tensor._version": "how often a tensor was written to in place",
    "torch.UntypedStorage._cdata": "which tensors share storage",
    "torch._C._swap_tensor_impl": "a parameter becomes its rank's part",
    "torch._C._current_graph_task_id": "which backward pass runs: gradients are averaged over ranks at its end",
    "torch._C._current_autograd_node": "whether a backward pass that has ended was nested in another",
    "torch.autograd._engine_run_backward": "what each backward() calls: in a captured call ranks meet at its end",
    "torch._C._will_engine_execute_node": "whether it accumulates gradients, or gives them back",
    "torch.autograd.profiler._is_profiler_enabled": "whether a profiler runs, without a call",
    "torch.autograd.Variable._execution_engine": "what runs backward passes, and a function at the end of one",
    "torch._C._dispatch_keys": "a tensor's keys, for the guards' C code",
    "torch._C._dispatch_has_kernel": "whether an overload is more than TorchScript's",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether an operator is made of others",
    "torch._dispatch.python.enable_python_dispatcher": "operators whose C++ form takes no symbolic sizes",
    "torch._guards.TracingContext": "what backends of torch.compile find around them",
    "torch._guards.tracing": "the same",
    "torch._dynamo.source.LocalSource": "names of symbolic sizes",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "an answer depends on numbers in a tensor",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "a shape depends on numbers in a tensor",
    "torch._subclasses.fake_tensor.FakeTensor": "tensors without data",
    "torch._subclasses.fake_tensor.FakeTensor._has_symbolic_sizes_strides": "whether sizes are symbolic",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tensors without data",
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": "runs an operator on fakes",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_clear": "what torch remembers of fakes",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": "an operator has no form for fakes",
    "torch.nn.parameter._ParameterMeta": "asks fakes for ``_is_param``: whether they are parameters",
    "torch.fx.experimental.sym_node.SymNode": "a symbolic scalar's expression",
    "torch.fx.experimental.sym_node.SymNode._expr": "the same, before replacements",
    "torch.fx.experimental.sym_node.SymNode._hint": "the same, its number of today",
    "torch.fx.experimental.symbolic_shapes.DimDynamic": "which sizes are symbolic",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode": "Python asks for a number that nobody knows",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": "symbolic sizes",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._maybe_guard_rel": "what is taken to be so of sizes",
    "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext": "which sizes are symbolic",
    "torch.fx.experimental.symbolic_shapes._constrain_range_for_size": "a number that is a size",
    "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols": "numbers that only the running step knows",
    "torch.fx.experimental.symbolic_shapes.statically_known_true": "what holds whatever sizes are",
    **{f"torch.utils._pytree.tree_{name}": "tensors in nested arguments"
       for name in ("flatten", "leaves", "map", "unflatten")},
    "torch.utils._sympy.functions.FloorDiv": "sizes that are halved and doubled",
    "torch.utils._sympy.functions.Identity": "roundings in between",
    "torch.utils._sympy.functions.Max": "strides where there may be no rows",
    "torch.utils._sympy.functions.Min": "the size of a slice",
    "torch.utils._sympy.interp.handlers": "roundings in between",
    "torch.utils._sympy.interp.sympy_interp": "expressions of sizes as nodes",
    "torch.utils._sympy.printers.PythonPrinter": "expressions of sizes as text",
    "torch.utils._sympy.printers.PythonPrinter._print": "a part of one",
    "torch.utils._sympy.reference.PythonReferenceAnalysis": "expressions of sizes as nodes",
    # many ranks in one process, for simulation
    "torch.distributed.distributed_c10d._get_default_store": "ranks that have come to different places say where",
    "torch.distributed.distributed_c10d._world": "which groups this rank is in; its collectives in each",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "the same",
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": "GradScaler over mixed lists",
    "torch._C._distributed_c10d.Reducer._remove_autograd_hooks": "ends DistributedDataParallel's averages",
    "torch.nn.parallel.DistributedDataParallel._use_python_reducer": "the same",
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": "what it does in place of averages",
    "torch.nn.parallel.DistributedDataParallel._delay_all_reduce_params": "what it averages later",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "whose gradients FSDP2 averages",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": "the same",
    "torch.ops.aten._unique2": "counts the values of a tensor",
    "torch.ops._c10d_functional": "functional collectives",
    "torch.distributed._functional_collectives": "the fakes of functional collectives",
    "torch._C._distributed_c10d._register_process_group": "a group that a functional collective finds by its name",
    "torch._C._distributed_c10d._unregister_process_group": "the same",
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor": "what async_save copies: of "
    "experts on ranks this rank's rows",
    "torch.distributed._local_tensor.LocalTensor": "a tensor of all ranks",
    "torch.distributed._local_tensor.LocalTensor._local_tensors": "what each rank has of one",
    "torch.distributed._local_tensor.LocalTensorMode": "operators on such",
    "torch.distributed._local_tensor._c10d._prepare_collective_groups": "the groups along an axis of a mesh",
    "torch.distributed._local_tensor.enabled_local_tensor_mode": "and operators run for all of them",
    "torch.distributed._local_tensor.local_tensor_mode": "whether ranks are simulated",
    "torch.distributed._local_tensor.maybe_run_for_local_tensor": "what Python does for each rank",
    # torch.compile
    "torch._C._dynamo.guards.GlobalStateGuard": "torch's global switches, in one guard",
    "torch._dynamo.decorators.graph_break": "asks torch.compile for a break, which is nothing here",
    "torch._dynamo.decorators._set_dim_range": "what marking tensors for torch.compile calls",
    "torch._dynamo.decorators.mark_static": "marks tensors for torch.compile",
    "torch._dynamo.decorators.maybe_mark_dynamic": "marks tensors for torch.compile",
    "torch._dynamo.eval_frame.set_eval_frame": "torch.compile's own frame hook",
    "torch._dynamo.eval_frame.skip_code": "keeps torch.compile from our code",
    "torch._dynamo.list_backends": "backends by name",
    "torch._dynamo.lookup_backend": "backends by name",
    "torch._dynamo.mutation_guard.GenerationTracker.tag": "torch.compile tags modules as they are made",
    # graphs
    "torch.fx.GraphModule._lineno_map": "which node a line of a graph's code is about",
    "torch.fx.GraphModule._prologue_start": "the same",
    "torch.fx._lazy_graph_module._LazyGraphModule.force_recompile": "a graph's code, made now",
    "torch.fx._lazy_graph_module._make_graph_module": "a graph's code, made when it is wanted",
    "torch.fx._lazy_graph_module._use_lazy_graph_module": "the same",
    "torch.fx.graph_module._loader": "texts of graphs' code, let go with the graph",
    "torch.fx.node._get_qualified_name": "the name that fx writes for a function",
    "torch.fx.passes.split_module.split_module": "a graph in parts",
    # optimizers, loaders
    "torch.optim.Adam._init_group": "makes an optimizer's state",
    "torch.optim.Optimizer._accelerator_graph_capture_health_check": "looks at CUDA graphs, which are not",
    "torch.optim.optimizer._use_grad_for_differentiable": "what runs an optimizer's step",
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype": "how optimizers group parameters",
    "torch.utils._foreach_utils._has_foreach_support": "what optimizers ask of their tensors",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "iterators over a DataLoader",
}  # fmt: skip
# The first and last version with a name, for those that came or went.
EXISTS_IN: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch._dynamo.decorators._set_dim_range": ((2, 15), (2, 15)),
}
ONLY_SOME = frozenset({  # builds have these: those for a GPU. They are asked for before they are used
    "torch._C._cuda_getDeviceCount", "torch._C._cuda_isCurrentStreamCapturing",
    "torch._C._xpu_isCurrentStreamCapturing",
})  # fmt: skip


def example_of_node() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv().create_unbacked_symint().node


def example_of_graph() -> Any:
    import torch

    graph = torch.fx.Graph()
    graph.output(None)
    return torch.fx.GraphModule({}, graph)


def example_of_operator() -> Any:
    import torch

    return torch.ops.aten.mm.default


def example_of_ddp() -> Any:
    """With the attributes that its methods name: it needs processes to be made."""
    from torch.nn.parallel import DistributedDataParallel

    codes = [method.__code__ for method in vars(DistributedDataParallel).values() if isinstance(method, FunctionType)]
    bare = object.__new__(DistributedDataParallel)
    bare.__dict__ |= {name: name for code in codes for name in code.co_names}
    return bare


# Classes whose objects have attributes that the class does not show.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "torch._ops.OpOverload": example_of_operator,
    "torch.fx.GraphModule": example_of_graph,
    "torch.fx.experimental.sym_node.SymNode": example_of_node,
    "torch.nn.parallel.DistributedDataParallel": example_of_ddp,
}


def resolve(name: str) -> Any:
    """What a dotted name leads to. AttributeError or ImportError where it leads nowhere."""
    path, *rest = name.split(".")
    value: Any = import_module(path)
    for part in rest:
        owner, path = path, f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif isinstance(value, type) and owner in EXAMPLES:
            value = getattr(EXAMPLES[owner](), part)
        elif isinstance(value, type(import_module)) or not hasattr(value, "__path__"):
            raise AttributeError(f"{owner} has no attribute {part}")
        else:
            value = import_module(path)
    return value


def missing() -> list[str]:
    """Those that the torch that runs lacks. Attributes of objects only where all else is there: the objects are made
    with that."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for name in NAMES:
        try:
            resolve(name)
        except Exception:  # (an example of what has changed may fail in any way)
            if name not in ONLY_SOME and name not in EXISTS_IN:
                found[name.rpartition(".")[0] in EXAMPLES].append(name)
    return found[False] or found[True]
