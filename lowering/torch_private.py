"""Every private torch name that lowering uses, in one place. Checked on torch 2.13.0 (CPU, Python 3.11)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo import list_backends
from torch._dynamo import lookup_backend as find_dynamo_backend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._sympy.functions import FloorDiv, Max
from torch.utils.flop_counter import flop_registry

__all__ = ["DispatchMode", "FakeTensor", "FakeTensorMode", "split_module"]  # torch's, as they are

set_grad_enabled = torch._C._set_grad_enabled
IN_C = tuple(getattr(torch._C, name) for name in ("_linalg", "_fft", "_special", "_nn"))  # torch.linalg's and others'
TENSORS = frozenset({"Tensor", "List[Tensor]"})  # types of arguments and results in schemas
assert_holds = torch._assert_async  # raises at once on a CPU; on a GPU when the kernel runs, without a synchronisation


def version_of(tensor: torch.Tensor) -> Any:
    """How often the tensor was written to in place, as autograd counts. Checked on torch 2.13.

    Of a tensor of inference mode autograd counts nothing. The fakes of a trace count by storage (``writes``). Else
    nobody does: NaN, a new one, which is unlike any number and unlike itself: it has changed for all who compare.
    """
    if not tensor.is_inference():
        return tensor._version
    writes = getattr(getattr(tensor, "fake_mode", None), "writes", None)
    return float("nan") if writes is None else writes[storage_of(tensor)]


def backend_names() -> list[str]:
    """Names that torch.compile takes as backends, debugging ones included."""
    return list(list_backends(None))


def foreach_operators() -> dict[str, Callable[..., Any]]:
    """What optimizers call on lists of tensors, by name: the foreach operators and the fused steps."""
    holder = torch._C._VariableFunctions
    return {n: getattr(torch, n) for n in dir(holder) if n.startswith(("_foreach_", "_fused_")) and hasattr(torch, n)}


def custom_operator_name(target: Any) -> str | None:
    """``library::operator.overload`` of an operator of torch.ops, None for anything else."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default if "default" in target.overloads() else None
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, _, rest = target.name().partition("::")
    return f"{namespace}::{rest}" if "." in rest else f"{namespace}::{rest}.default"


def storage_of(tensor: torch.Tensor) -> int:
    """What two tensors have in common exactly if they share storage."""
    return tensor.untyped_storage()._cdata


def made_code(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module, its Python code made now if it was to be made at its first call."""
    _LazyGraphModule.force_recompile(gm)
    return gm


def unbacked_symbols(value: Any) -> set[Any]:
    """The symbols in a fake's sizes, or in a number, that only the running step knows."""
    symbolic = isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
    return set(free_unbacked_symbols(value)) if symbolic else set()


def nobody_looks() -> bool:
    """Whether no mode of the program's sees the operators that run now."""
    return not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack()


def transforms_are_active() -> bool:
    """Whether torch.func transforms, or derivatives forward, go through the operators that run now."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def flops_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> float:
    """Operations of an overload of torch.ops, as torch counts them: products and attention; 0 for all others. A causal
    mask leaves half of an attention, which torch counts whole. (A CPU's attention has its own name, and no formula.)"""
    packet = operator.overloadpacket
    like = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), packet)
    formula = flop_registry.get(like)
    if formula is None:
        return 0.0
    named = dict(zip((a.name for a in operator._schema.arguments), args, strict=False), **kwargs)
    return float(formula(*args, **kwargs, out_val=found)) / (2 if named.get("is_causal") is True else 1)


def is_view(operator: Any) -> bool:
    """Whether an overload of torch.ops gives nothing but views of what it is given."""
    returns = operator._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def node_of_line(gm: torch.fx.GraphModule, line: int) -> int | None:
    """Which of the graph's nodes a line of its generated code is about, by position; None if it is about none."""
    lines: dict[int, int | None] = gm._lineno_map or {}
    return lines.get(line - gm._prologue_start)


def overloads_in(target: Any) -> list[Any]:
    """The overloads of an operator of torch.ops, one or several; none of what is no such operator."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


def takes_out(overload: Any) -> bool:
    return any(argument.is_out for argument in overload._schema.arguments)


def may_write(target: Any) -> bool | None:
    """Whether an operator of torch.ops writes into its arguments, by its schema; None for what is no such operator."""
    every = overloads_in(target)
    # which overload runs is decided by the call; those with out= are told apart by their caller
    return any(o._schema.is_mutable for o in every if o is target or not takes_out(o)) if every else None


def written_by_schema(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those of an operator's arguments that one of its overloads says it writes into. target: of torch.ops, or none."""
    return annotated(target, args, kwargs, lambda alias: alias.is_write)


def shared_by_schema(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Those that its result shares storage with, it says. (Where it says none it may share with all, as einsum may.)"""
    return annotated(target, args, kwargs, lambda alias: True)


def annotated(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], asked: Callable[[Any], bool]
) -> list[Any]:
    found: dict[int | str, Any] = {}
    for overload in overloads_in(target):
        for place, argument in enumerate(overload._schema.arguments):
            of_another = argument.is_out and overload is not target
            if of_another or argument.alias_info is None or not asked(argument.alias_info):
                continue
            if place < len(args) and not argument.kwarg_only:
                found[place] = args[place]
            elif argument.name in kwargs:
                found[argument.name] = kwargs[argument.name]
    return list(found.values())


def overloads_of(name: str) -> list[Any]:
    """Those of torch's operator of that name; or of Python's, which torch has by its method (``operator.or_``)."""
    named = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"__{name.rstrip('_')}__", None)
    return overloads_in(named)


def draws_numbers(name: str) -> bool:
    """Whether torch's operator of that name, by its tags, draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads_of(name))


def only_reads(name: str) -> bool:
    """Whether torch's operator of that name, by its schemas, writes into no argument and draws no random numbers."""
    plain = [one for one in overloads_of(name) if not takes_out(one)]
    return bool(plain) and not draws_numbers(name) and not any(one._schema.is_mutable for one in plain)


@functools.cache
def returns_new(name: str) -> bool:
    """Whether torch's operator of that name, by its schemas, gives tensors with storages of their own, or lists of
    them. (One that is made of other operators may hand on an argument of its own and not say so.)"""
    found = [one for one in overloads_of(name) if torch._C._dispatch_has_kernel(one.name())]
    found = [one for one in found if is_of_tensors(one)]
    of_torchs_own = name.startswith(("_", "unsafe")) and not name.startswith("_foreach_")
    return bool(found) and not of_torchs_own and all(map(gives_new, found))


def is_of_tensors(overload: Any) -> bool:
    """Not an overload that numbers take in TorchScript, nor one of named dimensions, nor with ``out``."""
    kinds = [str(argument.type) for argument in overload._schema.arguments]
    tensors = any(kind in TENSORS for kind in kinds)
    return tensors and not takes_out(overload) and not any("Dimname" in kind for kind in kinds)


def gives_new(overload: Any) -> bool:
    returns = overload._schema.returns
    made = returns and all(str(one.type) in TENSORS and one.alias_info is None for one in returns)
    return made and not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def returns_nothing(target: Any) -> bool:
    """Whether an operator of torch.ops has no result."""
    return any(not one._schema.returns for one in overloads_in(target))


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are certainly equal; asking adds no guard."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        first = a.node.expr if isinstance(a, torch.SymInt) else a
        second = b.node.expr if isinstance(b, torch.SymInt) else b
        if first == second:
            return True
        # 2 * (s // 2) is s, where the trace found s to be even (asked where it can matter: it takes long)
        divided = any(isinstance(one, sympy.Basic) and one.has(FloorDiv) for one in (first, second))
        return divided and statically_known_true(a == b)
    return bool(a == b)


def same_stride(a: Any, b: Any) -> bool:
    """The same of strides, which matter where there are rows: torch writes ``Max(1, rows)`` for what they multiply."""

    def plain(stride: Any) -> Any:
        if not isinstance(stride, torch.SymInt):
            return stride
        return stride.node.expr.replace(lambda e: isinstance(e, Max) and 1 in e.args, lambda e: Max(*{*e.args} - {1}))

    return bool(plain(a) == plain(b))


def sizes_key(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes for a set or dict: a symbolic one has no hash, its expression has, and equal ones are certainly equal."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def fake_mode_of(values: Sequence[Any]) -> AbstractContextManager:
    """The fake mode that these values belong to, or a context that does nothing when none of them is fake."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return nullcontext()


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """While operators are tried on fakes that they may not take: torch logs each failure with its traceback."""
    log = logging.getLogger(FakeTensor.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def compiling_with(examples: Sequence[Any]) -> Iterator[None]:
    """What a backend of torch.compile finds around it: a tracing context with the fake mode of its example inputs.

    Numbers that were read from fakes before wait to be bound to a node, which torch's tracing asks of its own nodes;
    and so do those of a trace that failed.
    """
    mode = fake_mode_of(examples)
    if not isinstance(mode, FakeTensorMode):
        yield
        return
    forget_pending_symbols(mode)
    try:
        with tracing(TracingContext(mode)):
            yield
    finally:
        forget_pending_symbols(mode)


def traced_by_operators(function: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """The operators that a function runs on fakes, its backward written out. Tensors that it holds are constants."""
    from torch.fx.experimental.proxy_tensor import make_fx  # (a second to import)

    mode: Any = fake_mode_of(examples)
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        return make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    finally:
        mode.allow_non_fake_inputs = before


def forget_pending_symbols(mode: FakeTensorMode) -> None:
    if mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


def lookup_backend(name: str) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """The torch.compile backend of that name."""
    return find_dynamo_backend(name)


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The tensor's own dict of gradient hooks, which autograd reads as it is when it calls them (torch/_tensor.py)."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks


def hooks_after_accumulation(tensor: torch.Tensor) -> dict[int, Any] | None:
    """The tensor's own dict of hooks after accumulation, which autograd reads as it is (torch/_tensor.py)."""
    hooks: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return hooks


class AtLeaves(torch.autograd.Function):
    """Its node leads to the nodes that accumulate into its inputs, and no operator sees them."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu")


def changes_nothing(*_: Any) -> None:
    """A hook. (Another thread's backward may be there just then.)"""


def hooks_of_accumulation(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether one of these leaves has hooks on the autograd node that accumulates its gradient, as ZeRO registers them.

    Torch lists them nowhere, but a new handle knows the dict of all (torch/csrc/autograd/python_cpp_function.cpp). That
    takes longer than all else that is asked of a leaf: ask once for many."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    with torch.inference_mode(False), torch.enable_grad():
        result = AtLeaves.apply(*wanted) if wanted else None  # (up to torch 2.12 the node dies with it)
        nodes = () if result is None else result.grad_fn.next_functions
    found = False
    for node, _ in nodes:
        for register in (node.register_hook, node.register_prehook):
            handle = register(changes_nothing)
            known = handle.hooks_dict_ref()
            handle.remove()
            found = found or bool(known)
    return found


def has_history(tensor: torch.Tensor) -> bool:
    """Whether autograd recorded how it was made. (Torch refuses to say so of a view made without history, once what it
    views has been written.)"""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def has_gradient_hooks(*tensors: torch.Tensor) -> bool:
    """Whether any hook sees the gradient of one of these."""
    return any(gradient_hooks(t) or hooks_after_accumulation(t) for t in tensors) or hooks_of_accumulation(tensors)


def default_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The innermost (pack, unpack) of ``torch.autograd.graph.saved_tensors_hooks`` around this point, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
