"""Gradient hooks: ``tensor.register_hook(f)`` in the step, and hooks that parameters brought with them.

A hook is interpreted when a backward of the step would call it, with what Python's variables hold then, into a graph of
its own, which autograd calls in the hook's place (``lowering.step.hooks``). A hook that changes Python state, or that
needs the gradient's values in Python, is a graph break. What is registered on a tensor that lives on after the segment
is registered there as well.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from moebius.interpreter import is_kind
from moebius.lowering.step import RankHook
from moebius.lowering.torch_private import gradient_hooks, hooks_after_accumulation, hooks_of_accumulation

from ..guards.sources import Source, part
from ..python import natives
from ..python.parts import Parts
from ..python.substitutes import module_hook
from ..tensors.interfaces import Hooked
from ..values.residual_program import Residual, method
from ..values.values import Break, CannotRebuild, TensorProxy
from .subgraphs import SubgraphTracer

REASON = "gradient hook"


def run_hooks(registered: list[dict[int, Callable[[Any], Any]]], gradient: Any) -> Any:
    """What autograd does with a tensor's hooks (torch/csrc/autograd/python_hook.cpp); interpreted."""
    for hooks in registered:
        for hook in list(hooks.values()):
            result = hook(gradient)
            if result is not None:
                gradient = result
    return gradient


def run_after_accumulation(hooks: dict[int, Callable[[Any], Any]], tensor: Any) -> None:
    """The same for hooks that are called once the gradient is accumulated."""
    for hook in list(hooks.values()):
        if hook(tensor) is not None:
            gives_something()


def gives_something() -> None:
    """Stands where autograd would raise an error."""


@natives.replaced(gives_something)
def refuse_result() -> None:
    raise Break(REASON, "one that is called after accumulation gives something", "the error is raised natively")


@natives.replaced(module_hook)
def refuse_module_hook() -> None:
    raise Break(
        "module backward hook",
        "it is called between the gradients of the module's output and of its input",
        "a hook on its output, which a forward hook can register (output.register_hook), stays in the graph",
    )


@dataclass
class Registered:
    """The hooks that the step registers on one tensor. history: what autograd knew it by when the first was registered.

    waiting: no backward has freed the tensor's graph since.
    """

    tensor: TensorProxy
    hooks: dict[int, Any]
    history: Any
    waiting: bool = True

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since: the hooks stay with what it was."""
        return self.tensor.fake.grad_fn is not self.history


def users_hooks(tensor: torch.Tensor) -> list[Any]:
    """A tensor's gradient hooks, but for those of a mesh."""
    return [hook for hook in (gradient_hooks(tensor) or {}).values() if not is_kind(hook, RankHook)]


class NoHooks:
    """A guard: leaves without hooks of one kind have got none. A hook takes its number from torch's count: where that
    is as it was, those that are the same at each call are not asked. leaves: these; others are given."""

    def __init__(self, asked: Callable[[torch.Tensor], Any]):
        self.asked = asked
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self.count = RemovableHandle.next_id

    def __call__(self, *given: torch.Tensor) -> bool:
        if self.count != (count := RemovableHandle.next_id):
            if any((leaf := ref()) is not None and self.asked(leaf) for ref in self.leaves.values()):
                return False
            self.count = count
        return not any(map(self.asked, given))


class GradientHooks(SubgraphTracer):
    """All gradient hooks in one trace."""

    what = REASON
    where = "the hook"
    hint = "backward runs natively between two graphs; what changes no Python object, or reads .grad after it, stays in"

    def __init__(self, domain: Parts, call: Callable[..., Any]):
        super().__init__(domain, call)
        self.registered: dict[TensorProxy, Registered] = {}
        self.interpreting = False
        self.accumulated: TensorProxy | None = None  # the leaf whose hooks after accumulation are interpreted
        self.guards = self.tensors.guards
        self.none: dict[Any, NoHooks] = {}  # what is guarded, by what asks a tensor for its hooks
        self.objects.after_effects.append(self.leave)

    def register(self, tensor: TensorProxy, hook: Any) -> Any:
        """``tensor.register_hook(hook)``, as torch/_tensor.py does it."""
        if not tensor.fake.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        if tensor.real is not None and not tensor.real.is_leaf:
            raise Break(REASON, f"on {tensor.describe()}, which lives longer than the step", self.hint)
        if not self.tensors.runs_once:
            raise Break(REASON, "one is registered in an expert loop or in a checkpointed call", self.hint)
        self.objects.note("gradient hook")
        entry = self.registered.get(tensor)
        if entry is None:
            hooks = self.objects.made(OrderedDict())
            entry = self.registered[tensor] = Registered(tensor, hooks, tensor.fake.grad_fn)
        self.refuse_changed(entry)
        entry.waiting = True
        handle = self.objects.made(RemovableHandle(entry.hooks))
        for value in vars(handle).values():
            self.objects.made(value)
        entry.hooks[handle.id] = hook
        return handle

    def are_registered(self) -> bool:
        """Whether the step has registered hooks that are still there."""
        return any(entry.hooks for entry in self.registered.values())

    def holds(self, hooks: Any) -> bool:
        """Whether it is the dict of a tensor's hooks, to which handles have weak references; autograd keeps it."""
        return any(entry.hooks is hooks for entry in self.registered.values())

    def refuse_changed(self, entry: Registered) -> None:
        if entry.changed:
            raise Break(REASON, "its tensor was changed in place afterwards", self.hint)

    def none_reached(self, what: str, leaves: Iterable[TensorProxy], reached: set[Any]) -> None:
        """A graph break if there are hooks that ``what`` calls, which goes back to these leaves through these nodes."""
        known = set(map(id, leaves))
        for entry in self.registered.values():
            if entry.hooks and (entry.history in reached or id(entry.tensor) in known):
                raise Break(REASON, f"{what} calls it", self.hint)

    def none_come_later(self, leaf: TensorProxy, asked: Callable[[torch.Tensor], Any] = users_hooks) -> None:
        """What a backward reaches has no hooks of a kind: a guard."""
        if leaf.real is None or leaf.source is None:
            return
        text = "has no hooks that backward calls"
        if not leaf.source.static:
            self.guards.holds(leaf.source.name, text, NoHooks(asked), leaf.source)
            return
        if asked not in self.none:
            self.none[asked] = NoHooks(asked)
            self.guards.holds("each parameter", text, self.none[asked])
        self.none[asked].leaves[id(leaf.real)] = weakref.ref(leaf.real)

    def in_backward(
        self, leaves: Iterable[TensorProxy], reached: set[Any], enter: Callable[[Any, Source], Any]
    ) -> Hooked:
        """For each tensor with hooks that a backward through these nodes may call: the tensor, their graph, and what
        that takes besides the gradient."""
        found = []
        for entry in self.registered.values():
            if entry.hooks and entry.tensor.real is None and (entry.history is None or entry.history in reached):
                self.refuse_changed(entry)
                found.append((entry.tensor, *self.graph_of(entry.tensor, [entry.hooks])))
        for leaf in leaves:
            hooks = getattr(leaf.real, "_backward_hooks", None)
            all_hooks = []
            theirs = [is_kind(hook, RankHook) for hook in (hooks or {}).values()]
            if any(theirs) and not all(theirs):
                raise Break(REASON, "on a parameter of several ranks", self.hint)
            if hooks and leaf.source is not None and not all(theirs):
                all_hooks.append(enter(hooks, part(leaf.source, "attr", "_backward_hooks")))
            else:
                self.none_come_later(leaf)
            if leaf.real is not None and (here := self.registered.get(leaf)) is not None and here.hooks:
                all_hooks.append(here.hooks)
            if all_hooks:
                found.append((leaf, *self.graph_of(leaf, all_hooks)))
        return found

    def after_accumulation(self, leaves: Iterable[TensorProxy], enter: Callable[[Any, Source], Any]) -> Hooked:
        """For each leaf with ``register_post_accumulate_grad_hook``: the leaf, their graph, and what that takes."""
        leaves, found = list(leaves), []
        if hooks_of_accumulation([leaf.real for leaf in leaves if is_kind(leaf.real, torch.Tensor)]):
            hint = "parameter.register_post_accumulate_grad_hook stays in the graph"
            raise Break(REASON, "on the autograd node that accumulates a parameter's gradient", hint)
        for leaf in leaves:
            hooks = getattr(leaf.real, "_post_accumulate_grad_hooks", None)
            if hooks and leaf.source is not None:
                entered = enter(hooks, part(leaf.source, "attr", "_post_accumulate_grad_hooks"))
                found.append((leaf, *self.graph_after(leaf, entered)))
            else:
                self.none_come_later(leaf, hooks_after_accumulation)
        return found

    def graph_after(self, leaf: TensorProxy, hooks: dict[int, Any]) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The leaf's own ``.grad`` may be read and dropped in them; of another's nobody knows whether it is there."""
        with self.scope() as scope, self.gradients.accumulating(leaf):
            self.run(run_after_accumulation, hooks, leaf, after=leaf)
            scope.graph.output(None)
            module = self.writer.module()
        return self.body("gradient_hook", module), tuple(self.writer.own(node) for node in scope.lifted)

    def run(self, function: Callable[..., Any], *args: Any, after: TensorProxy | None = None) -> Any:
        """Hooks, interpreted. after: the leaf whose gradient is accumulated by then."""
        self.gradients.refuse_sparse()
        self.interpreting, self.accumulated = True, after
        try:
            return self.domain.call_function(self.domain.calls.substitute(function), list(args), {})
        finally:
            self.interpreting, self.accumulated = False, None

    def graph_of(self, tensor: TensorProxy, hooks: list[dict[int, Any]]) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        with self.scope() as scope:
            gradient = self.gradient("gradient", tensor.fake)
            result = self.run(run_hooks, self.objects.made(hooks), gradient)
            if not is_kind(result, TensorProxy):
                raise Break(REASON, f"it gives a {type(result).__name__}", "the error is raised natively")
            if result.fake.shape != tensor.fake.shape or result.fake.dtype != tensor.fake.dtype:
                raise Break(REASON, f"it gives {result.describe()}, and took another", "the error is raised natively")
            scope.graph.output(self.writer.argument(result))
            module = self.writer.module()
        return self.body("gradient_hook", module), tuple(self.writer.own(node) for node in scope.lifted)

    def done(self, reached: set[Any], kept: bool) -> None:
        """A backward has run through these nodes. kept: with its graph retained."""
        for entry in self.registered.values():
            entry.waiting &= kept or entry.history not in reached

    def leave(self, emitter: Residual) -> None:
        """The end of the segment: the hooks of what lives on."""
        lives_on = any(is_kind(o, TensorProxy) and o.fake.requires_grad for o in emitter.outputs)
        for entry in self.registered.values():
            if entry.hooks and (entry.waiting or lives_on or entry.tensor.real is not None):
                if entry.changed:
                    raise CannotRebuild("a gradient hook belongs to what a tensor was before it was changed in place")
                name = emitter.value(entry.tensor)
                for hook in entry.hooks.values():
                    emitter.lines.append(method(name, "register_hook", emitter.value(hook)))

