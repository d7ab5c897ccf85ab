"""Backward inside the graph: ``backward()`` is a node, and ``.grad`` is followed through reads and writes.

``backward()`` runs when the graph runs, on the real tensors, so what it leaves in ``.grad`` is autograd's own. Tracing
only needs to know which leaves it reaches. The fakes have an autograd graph of their own, which says so: its
AccumulateGrad nodes (torch/csrc/autograd/functions/accumulate_grad.h) name the leaves.

``.grad`` of a leaf is one of: unread (what it was before the call), a traced value that the step put there, or
``Accumulated`` (backward added to what was there, and nobody has asked yet which of the two cases it was).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.graph import expert_loop
from moebius.lowering.step import (
    autocast_now,
    backward_with_hooks,
    gradient_of,
    keep,
    require_accumulated,
    require_given,
    require_gradients,
    require_known,
    set_gradient,
    treats_each_alone,
)
from moebius.lowering.step.optimizer_steps import counted_by, trained_on_ranks
from moebius.lowering.torch_private import has_gradient_hooks, hooks_after_accumulation

from ..guards.sources import Source, part
from ..heap.heap import Heap
from ..regions.autograd_joins import refuse_doubt
from ..values.values import Break, TensorProxy
from .applied import Applied
from .deferred_state import StateAtCapture
from .interfaces import Hooks, TensorOperators

Enter = Callable[[Any, Source], Any]
UNREAD = object()
NATIVELY = "it runs natively; the graph goes on after it"
# The autograd nodes of fakes that know what a tensor came from, and not how; in words for the report.
STAND_INS = {
    "JoinedBackward": "a module like one before",
    "CarriedOnBackward": "a loop over experts",
    "PooledBackward": "a pooling over windows that vary",
    "FunctionHistoryBackward": "an autograd.Function",
}


# Autograd nodes that can give a sparse gradient -> where they keep whether they do (tools/autograd/derivatives.yaml).
SPARSE_OPTIONS = {
    "EmbeddingBackward0": "_saved_sparse",
    "EmbeddingBagBackward0": "_saved_sparse",
    "GatherBackward0": "_saved_sparse_grad",
}


CHANGED = "what its backward reads is changed after the call"


class Accumulated:
    """The gradient after a backward that reached the leaf. before: None, or UNREAD for what the call began with."""

    __slots__ = ("before",)

    def __init__(self, before: Any):
        self.before = before


def histories_of(fakes: Iterable[torch.Tensor]) -> dict[Any, None]:
    """The autograd nodes that a backward of all these would reach, in order."""
    met, pending = dict[Any, None](), []
    for fake in fakes:
        with suppress(RuntimeError):  # of a view of what was written: a backward raises the same
            pending.append(fake.grad_fn)
    while pending:
        if (function := pending.pop()) is not None and function not in met:
            met[function] = None
            pending += [inner for inner, _ in function.next_functions]
    return met


class Gradients:
    """Everything that one trace does with ``.grad``. inside: whether backward may be a node (our own backends)."""

    def __init__(self, tensors: TensorOperators, inside: bool):
        self.tensors, self.writer, self.inside = tensors, tensors.writer, inside
        self.outside = ("it runs between two graphs", NATIVELY)  # why, where it may not, and what to do
        self.casts = [autocast_now(), ()]  # the autocast that backward of an autograd.Function may run under
        self.unmet_casts: set[Any] = set()  # what it did run under, and was not interpreted for
        self.functions: list[Applied] = []  # the calls of such functions
        self.natively: set[str] = set()  # names of those that are to run natively
        self.strict: set[str] = set()  # names of checkpointed calls that may change nothing older
        self.changed: set[str] = set()  # the same, as this trace has found
        self.waited: set[str] = set()  # the same, if the break that ended this trace stays
        self.heap = Heap()
        self.switched: Callable[[], None] = lambda: None  # told before a tensor begins or ceases to require gradients
        self.of: dict[TensorProxy, Any] = {}  # what is known of each leaf's .grad
        self.check: fx.Node | None = None  # that the gradients are there which are read after the last backward
        self.made_state: list[StateAtCapture] = []  # of optimizers, for gradients that are expected
        self.on_ranks: set[int] = set()  # ids of parameters that a backward on another rank may have reached
        self.was_set: dict[str, bool] = {}  # by source: what the call began with
        self.retained: dict[TensorProxy, Any] = {}  # the tensors that keep their gradients, with their autograd nodes
        self.needs_history = False  # whether a gradient went through a module that was not interpreted by itself
        self.sparse = False  # whether an operator of the step gives a sparse gradient (an embedding that asks for one)
        self.asked_by_others = False  # whether code other than torch's optimizers asked for what backward left
        self.may_miss = False  # whether data decides which gradients the last backward left
        # what Python would go on with from here, where the trace knows it; whether that is held, and is wanted
        self.live: Callable[[], tuple] = lambda: ()
        self.holds_live = self.needs_live = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.hooks: Hooks  # these two come with the domain
        self.enter: Enter
        self.found_before: dict[str, Any] = {}  # the same, for a trace that is made after the graph has run a part

    # ------------------------------------------------------------------------------------------------------------------
    # Backward
    # ------------------------------------------------------------------------------------------------------------------

    def backward(
        self,
        outputs: list[TensorProxy],
        gradients: Any = None,
        retain_graph: Any = None,
        create_graph: Any = False,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward(outputs, gradients, ...)`` as a node; one gradient or None for each output."""
        self.heap.note("backward")
        kept = bool(create_graph if retain_graph is None else retain_graph)
        with self.between_graphs(kept):
            self.require()
            leaves, reached = self.reached(outputs)
        if self.writer.is_inner:
            hint = "torch.autograd.grad in its place stays in the graph"
            raise Break("Tensor.backward", "inside an autograd.Function or a gradient hook", hint)
        given = list(gradients) if is_kind(gradients, list | tuple) else [gradients] * len(outputs)
        for output, gradient in zip(outputs, given, strict=True):
            if not output.fake.requires_grad or (gradient is None and output.fake.numel() != 1):
                raise Break("Tensor.backward", "backward() of this tensor raises", "the error is raised natively")
        wanted = None if inputs is None else list(inputs) if is_kind(inputs, list | tuple) else [inputs]
        renewals = self.look_again(reached, kept)
        if wanted is not None:
            leaves = [p for p in leaves if p in wanted]
        options = {"retain_graph": retain_graph, "inputs": wanted}
        options = {name: value for name, value in options.items() if value is not None}
        if create_graph:
            self.backward_with_history(outputs, given, leaves, reached, options, renewals)
            return
        self.wants_python()  # the rest after an earlier one has another backward in it
        hooked = self.hooks.in_backward(leaves, reached, self.enter)
        for leaf in leaves:
            self.heap.write(leaf, "grad")
            before = self.of.get(leaf, UNREAD if leaf.real is not None else None)
            if before is None or before is UNREAD:
                self.of[leaf] = Accumulated(before)
            # a tensor that is there is added to in place, grad mode being off: the same value goes on standing for it
        on_ranks = self.reached_elsewhere(leaves)
        after = self.hooks.after_accumulation(leaves, self.enter)
        for write in renewals:
            write()
        node = self.backward_node(outputs, None if gradients is None else given, options, hooked, after)
        if after:
            self.writer.call(require_accumulated, node)
        if on_ranks:
            self.writer.call(require_known)
        self.check = self.writer.call(require_gradients)
        self.may_miss = on_ranks or bool(STAND_INS.keys() & {type(function).__name__ for function in reached})
        if self.may_miss:
            self.hold_live()
        for tensor in self.retained:
            if tensor.fake.grad_fn in reached:
                self.of[tensor] = Accumulated(self.of.get(tensor))
        self.hooks.done(reached, kept=bool(retain_graph))

    def reached_elsewhere(self, leaves: list[TensorProxy]) -> bool:
        """What backward on other ranks may reach, and this one does not: it gets a gradient as well. Whether ranks
        average what this backward gives."""
        trained = trained_on_ranks()
        here = {id(leaf.real) for leaf in leaves}
        self.on_ranks |= trained.keys()
        for proxy in [p for p in self.tensors.inputs if id(p.real) in trained.keys() - here]:
            self.heap.write(proxy, "grad")
            if self.of.get(proxy, UNREAD) is None:
                self.of[proxy] = Accumulated(None)
        return bool(counted_by([leaf.real for leaf in leaves if is_kind(leaf.real, torch.Tensor)]))

    def backward_with_history(
        self, outputs: list[TensorProxy], given: list[Any], leaves: list[TensorProxy], reached: set[Any],
        options: dict[str, Any], renewals: list[Callable[[], None]],
    ) -> None:  # fmt: skip
        """``backward(create_graph=True)``: what it leaves in ``.grad`` has a history, which autograd on fakes gives."""
        hint = "torch.autograd.grad(..., create_graph=True) stays in the graph"
        if self.hooks.are_registered() or has_gradient_hooks(*(p.real for p in leaves if p.real is not None)):
            raise Break("Tensor.backward", "create_graph=True, and gradient hooks", hint)
        for leaf in leaves:
            self.hooks.none_come_later(leaf)
            self.hooks.none_come_later(leaf, hooks_after_accumulation)
        if any(tensor.fake.grad_fn in reached for tensor in self.retained):
            raise Break("Tensor.backward", "create_graph=True, and retain_grad()", hint)
        for leaf in leaves:
            before = self.of.get(leaf, UNREAD)
            if before is not None and (before is not UNREAD or self.before_the_call(leaf, self.enter) is not None):
                raise Break("Tensor.backward", "create_graph=True, and a gradient is there already", hint)
        self.refuse_stand_ins("Tensor.backward", "create_graph=True", reached)
        asked = {"grad_outputs": given, "create_graph": True, "retain_graph": True}
        found = self.tensors.on_fakes(torch.autograd.grad, (outputs, leaves), asked)
        options |= {"create_graph": True} | ({} if all(g is None for g in given) else {"grad_tensors": given})
        for write in renewals:
            write()
        self.writer.call(torch.autograd.backward, tuple(outputs), **options)
        self.check = self.writer.call(require_gradients)
        for leaf, gradient in zip(leaves, found, strict=True):
            self.heap.write(leaf, "grad")
            with self.tensors.mode, torch.enable_grad():  # (``clone_obey_contract``: the strides are the leaf's)
                fake = torch.empty_like(leaf.fake).requires_grad_(False).copy_(gradient)
            self.check.args = (*self.check.args, leaf.node)
            self.of[leaf] = self.tensors.record("call_function", gradient_of, (leaf,), {}, fake)

    def applied(self, function: Applied) -> None:
        """Such a function was called."""
        self.functions.append(function)

    @property
    def in_a_hook(self) -> bool:
        """Whether a gradient hook is interpreted."""
        return self.hooks.interpreting

    def refuse_stand_ins(self, what: str, asked: str, functions: set[Any]) -> None:
        """A graph break where a gradient goes through what is known by its name only."""
        unknown = STAND_INS.keys() & {type(function).__name__ for function in functions}
        if unknown == {"JoinedBackward"}:
            self.needs_history = True  # the step is traced again, with each module interpreted
        if unknown:
            through = ", ".join(STAND_INS[name] for name in sorted(unknown))
            raise Break(what, f"{asked}, through {through}", NATIVELY)

    def backward_node(
        self, outputs: list[TensorProxy], gradients: list[Any] | None, options: dict[str, Any], hooked: list[Any],
        after: list[Any],
    ) -> fx.Node:  # fmt: skip
        call = self.writer.call
        if hooked or after:
            options |= {} if gradients is None else {"grad_tensors": gradients}
            made = call(backward_with_hooks, outputs, options)
            for found in (hooked, after):
                tensors, bodies, captures = zip(*found, strict=True) if found else ((), (), ())
                made.args = (*made.args, self.writer.argument(tensors), bodies, captures)
            return made
        if len(outputs) > 1:
            options |= {} if gradients is None else {"grad_tensors": gradients}
            return call(torch.autograd.backward, tuple(outputs), **options)
        options = ({} if gradients is None else {"gradient": gradients[0]}) | options
        return call("backward", outputs[0], **options)

    def switch(self, tensor: TensorProxy, requires_grad: bool = True) -> TensorProxy:
        """``tensor.requires_grad_(requires_grad)``; the fake raises what torch raises."""
        refuse_doubt(tensor.fake, "requires_grad_", self.writer.scope)
        if tensor.fake.requires_grad == requires_grad:
            return tensor  # nothing changes
        if self.writer.in_loop or self.writer.recomputed or not self.inside:
            raise Break("Tensor.requires_grad_", "in an expert loop or in a checkpointed call", "call it outside")
        tensors = self.tensors
        tensors.aliases.switch(tensor)
        self.heap.write(tensor, "requires_grad")
        self.switched()
        with tensors.mode:
            tensor.fake.requires_grad_(requires_grad)
        self.writer.call("requires_grad_", tensor, requires_grad)
        return tensor

    def retain(self, tensor: TensorProxy) -> None:
        """``tensor.retain_grad()``."""
        if not tensor.fake.requires_grad:
            raise RuntimeError("can't retain_grad on Tensor that has requires_grad=False")
        if tensor.fake.is_leaf:
            return
        if self.writer.is_inner or self.writer.recomputed or not self.inside:
            raise Break("Tensor.retain_grad", "in an expert loop or in a checkpointed call", "call it outside")
        self.heap.note("gradient")
        self.retained.setdefault(tensor, tensor.fake.grad_fn)
        self.writer.call("retain_grad", tensor)

    def derive(self, outputs: list[Any], inputs: list[Any], grad_outputs: Any, options: dict[str, Any]) -> Any:
        """``torch.autograd.grad(outputs, inputs, grad_outputs)``: a node that gives one gradient for each input.

        The fakes' own autograd gives the gradients' metadata, says which of them are None, and, with ``create_graph``,
        is their history. Where a fake has a history in name only (``STAND_INS``), these are not to be had.
        """
        self.heap.note("gradient")
        create_graph, retain_graph = bool(options.get("create_graph")), options.get("retain_graph")
        kept = create_graph if retain_graph is None else bool(retain_graph)
        with self.between_graphs(kept):
            self.require()
        if options.get("is_grads_batched"):
            raise Break("torch.autograd.grad", "batched gradients", "it runs natively")
        if not all(is_kind(p, TensorProxy) for p in (*outputs, *inputs)):
            raise Break("torch.autograd.grad", "of something that is no tensor", "the error is raised natively")
        with self.between_graphs(kept):
            leaves, functions = self.reached(outputs)
        renewals = self.look_again(functions, kept)
        if any(getattr(p.real, "_backward_hooks", None) for p in inputs):
            raise Break("torch.autograd.grad", "a parameter has gradient hooks", "it runs natively")
        for leaf in inputs:
            self.hooks.none_come_later(leaf)
        if any(p.fake.grad_fn in functions for p in self.retained):
            raise Break("torch.autograd.grad", "it sets what retain_grad() keeps", "call retain_grad() after it")
        self.hooks.none_reached("torch.autograd.grad", leaves, functions)
        kwargs = {name: value for name, value in options.items() if value is not None and name != "only_inputs"}
        if grad_outputs is not None:
            kwargs["grad_outputs"] = grad_outputs
        unknown = STAND_INS.keys() & {type(function).__name__ for function in functions}
        if unknown == {"JoinedBackward"}:
            self.needs_history = True  # the step is traced again, with each module interpreted
        if not unknown:
            result = self.tensors.on_fakes(torch.autograd.grad, (outputs, inputs), kwargs | {"retain_graph": True})
        elif create_graph or options.get("allow_unused") or options.get("materialize_grads"):
            asked = "create_graph=True" if create_graph else "allow_unused=True: the data says which gradients are None"
            self.refuse_stand_ins("torch.autograd.grad", asked, functions)
        elif not all(p in leaves for p in inputs):
            raise Break("torch.autograd.grad", "an input is not a leaf that is reached", NATIVELY)
        else:
            result = tuple(self.fake_gradient(p) for p in inputs)
        for write in renewals:
            write()
        node = self.writer.node("call_function", torch.autograd.grad, (outputs, inputs), kwargs)
        found = self.tensors.wrap(result, node)
        if node.graph.find_nodes(op="call_function", target=expert_loop, sort=False):
            self.hold_iterations(node, inputs, result)
        return found

    def hold_iterations(self, node: fx.Node, inputs: list[Any], result: Any) -> None:
        """The fakes have seen one iteration of each loop over experts: the real step has several, or none."""
        found = [(p, g) for p, g in zip(inputs, result, strict=True) if g is not None]
        if any(g.stride() != self.fake_gradient(p).stride() for p, g in found):
            raise Break("torch.autograd.grad", "through a loop over experts the gradient's strides vary", NATIVELY)
        if node.kwargs.get("allow_unused"):
            expected = tuple(g is not None for g in result)
            self.writer.call(require_given, node, expected)
            self.needs_live = True
            self.hold_live()

    def hold_live(self) -> None:
        """What Python may go on with after a check of gradients lives until then."""
        if self.holds_live and (live := self.live()):
            self.writer.call(keep, *live)

    def look_again(self, reached: set[Any], kept: bool) -> list[Callable[[], None]]:
        """Before a backward: the user's code that it runs is what it was taken for, or what the graph is told before it
        by what this gives. Else the step is traced again. kept: whether another backward may run it after this one."""
        now = autocast_now()
        renewals: list[Callable[[], None]] = []
        for applied in list(self.functions):
            if not applied.histories & reached:
                continue
            self.unmet_casts |= set() if applied.casts is None or now in applied.casts else {now}
            if applied.is_unchanged():
                applied.unseen, applied.ran = False, not kept
            elif (renewal := applied.renew()) is not None:
                renewals.append(partial(self.renewed, applied, renewal, kept))
            else:
                if applied.copied:
                    self.needs_history = True  # the step is traced again, with each module interpreted
                elif not applied.unseen:
                    self.changed.add(applied.name)
                raise Break("autograd.Function", CHANGED, NATIVELY)
        return renewals

    def renewed(self, applied: Applied, write: Callable[[], None], kept: bool) -> None:
        write()
        applied.unseen, applied.ran = False, not kept

    def waiting(self) -> list[Applied]:
        """The calls that a backward after this graph may run."""
        return [applied for applied in self.functions if applied.histories and not applied.ran]

    @contextmanager
    def between_graphs(self, kept: bool) -> Iterator[None]:
        """Where a backward breaks the graph it runs natively at once, what waits for it as it stands here. (That of a
        body that is recorded runs natively if the data says so.)"""
        try:
            yield
        except Break:
            for applied in [] if self.writer.is_inner or self.writer.in_loop else self.waiting():
                applied.ran = not kept and applied.is_unchanged()
            raise

    def left(self) -> None:
        """The graph ends in a break: whatever runs then may change what a waiting call reads."""
        self.waited |= {applied.name for applied in self.waiting()}

    def returned(self, outputs: tuple[Any, ...] | None) -> None:
        """The graph ends with the function: a backward of what it leaves (None: of anything) runs whenever its caller
        calls it."""
        asked = self.waiting()
        if outputs is not None:
            met = histories_of(proxy.fake for proxy in outputs if is_kind(proxy, TensorProxy))
            asked = [applied for applied in asked if applied.histories & met.keys()]
        for applied in asked:
            if applied.reads_state or (applied.read is not None and not applied.read.stays()):
                self.waited.add(applied.name)
            else:
                applied.ask_later(applied)

    def unseen(self) -> set[str]:
        """Names of the calls that a trace after this one is to take another way."""
        return {applied.name for applied in self.functions if applied.unseen}

    def require(self) -> None:
        if not self.inside:
            raise Break("Tensor.backward", *self.outside)
        if self.writer.in_loop:
            raise Break("Tensor.backward", "inside an expert loop", "call backward after the loop")
        if self.writer.recomputed:
            raise Break("Tensor.backward", "inside a checkpointed call", "call backward after it")

    def reached(self, outputs: list[TensorProxy]) -> tuple[list[TensorProxy], set[Any]]:
        """The leaves whose ``.grad`` a backward from these outputs reaches, each once, and the autograd nodes."""
        found = {id(o): o for o in outputs if o.fake.grad_fn is None and o.fake.requires_grad}
        met = histories_of(output.fake for output in outputs)
        for function in met:
            variable = getattr(function, "variable", None)
            if variable is not None:
                leaf = self.tensors.of_fake.get(id(variable))
                if leaf is None or (is_kind(leaf.real, torch.Tensor) and not leaf.real.is_leaf):
                    raise Break(
                        "Tensor.backward",
                        "what it goes back through was computed before an earlier graph break",
                        "remove the graph breaks before this call, or move what breaks there behind it",
                    )
                found[id(leaf)] = leaf
        return list(found.values()), {*met}

    @contextmanager
    def accumulating(self, leaf: TensorProxy) -> Iterator[None]:
        """Inside, hooks run on the leaf, whose gradient has been accumulated. What they read of it they keep to
        themselves; whether they drop it is known after."""
        check, self.check = self.check, None  # nothing is read after a backward yet
        then = self.of[leaf]
        try:
            yield
        finally:
            self.check = check
        self.of[leaf] = None if self.of[leaf] is None else then

    # ------------------------------------------------------------------------------------------------------------------
    # .grad
    # ------------------------------------------------------------------------------------------------------------------

    def read(self, proxy: TensorProxy, enter: Enter) -> Any:
        """``proxy.grad``."""
        self.heap.read("gradient", proxy, "grad", None)
        if self.hooks.interpreting and proxy is not self.hooks.accumulated:
            raise Break("gradient hook", "it reads a tensor's .grad", self.hooks.hint)
        now = self.of.get(proxy, UNREAD)
        if now is UNREAD and id(proxy.real) in self.on_ranks:
            now = Accumulated(UNREAD)
        if now is UNREAD:
            now = None if proxy in self.retained else self.before_the_call(proxy, enter)
        elif self.check is not None:  # there was a backward: until then the gradient is the one that code here set
            self.others_ask()
        if is_kind(now, Accumulated):
            if proxy in self.retained and now.before is not None:
                raise Break("Tensor.grad", "a gradient that was read is added to", "read it after the last backward")
            before = None if now.before is None else self.before_the_call(proxy, enter)
            now = before if before is not None else self.made_by_backward(proxy)
        self.of[proxy] = now
        return now

    def others_ask(self) -> None:
        """The step asks what may depend on which gradients there are."""
        self.asked_by_others |= not treats_each_alone(self.writer.where()[-1][0])
        if self.asked_by_others:
            self.wants_python()

    def wants_python(self) -> None:
        """Where the last backward left out a gradient, Python may have to go on from there."""
        self.needs_live |= self.may_miss

    def before_the_call(self, proxy: TensorProxy, enter: Enter) -> Any:
        if not is_kind(proxy.real, torch.Tensor) or proxy.source is None:
            if proxy.real is None and proxy.fake.is_leaf:
                return None
            raise Break(
                "Tensor.grad",
                "the gradient of an intermediate tensor is read",
                "call retain_grad() and read it after the step",
            )
        if not proxy.real.is_leaf:
            raise Break(
                "Tensor.grad", "the gradient of a tensor that is not a leaf is read", "read the gradients of parameters"
            )
        source = part(proxy.source, "attr", "grad")
        gradient = self.found_before.get(source.name, proxy.real.grad)
        self.was_set[source.name] = gradient is not None
        return enter(gradient, source)

    def made_by_backward(self, proxy: TensorProxy) -> TensorProxy:
        if self.writer.in_loop:
            raise Break("Tensor.grad", "read in a branch on values, or in an expert loop", "read it before that")
        fake = self.fake_gradient(proxy)
        if self.check is not None and proxy.node not in self.check.args:
            self.check.args = (*self.check.args, proxy.node)
        return self.tensors.record("call_function", gradient_of, (proxy,), {}, fake)

    def refuse_sparse(self) -> None:
        """A graph break where Python reads a gradient that would be a sparse tensor: tracing has a dense one."""
        if self.sparse:
            raise Break(
                "sparse gradient",
                "an embedding with sparse=True, or gather with sparse_grad=True, gives one",
                "what reads it runs natively; with sparse=False it stays in the graph",
            )

    def owners(self) -> dict[str, str]:
        """The inputs of the graph that are an optimizer's state -> the inputs that are their parameters."""
        names = {id(p.real): p.node.name for p in self.tensors.inputs if is_kind(p.real, torch.Tensor)}
        return {
            names[id(value)]: names[id(parameter)]
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for value in state.values()
            if id(value) in names and id(parameter) in names
        }

    def fake_gradient(self, proxy: TensorProxy) -> torch.Tensor:
        """Autograd gives a gradient the strides of a dense leaf (``GradLayoutContract``, torch/csrc/autograd)."""
        self.refuse_sparse()
        with self.tensors.mode, torch.no_grad():
            return torch.empty_like(proxy.fake).requires_grad_(False)

    def write(self, proxy: TensorProxy, value: Any) -> None:
        """``proxy.grad = value``, as a node, so that it stays in order with the backward nodes."""
        self.heap.write(proxy, "grad")
        if not self.inside:
            raise Break("attribute of a tensor is set", f"{proxy.describe()}.grad = …", "it is set natively")
        if self.writer.is_inner and (value is not None or proxy is not self.hooks.accumulated):
            raise Break("Tensor.grad", "a gradient is set inside an expert loop or a hook", "set it after the loop")
        if self.writer.recomputed:
            raise Break("Tensor.grad", "a gradient is set in a checkpointed call", "set it after the call")
        if value is not None and not is_kind(value, TensorProxy):
            raise TypeError(
                f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}"
            )
        if value is not None and (value.fake.shape != proxy.fake.shape or value.fake.dtype != proxy.fake.dtype):
            raise Break("Tensor.grad", "a gradient of another shape or dtype is set", "the error is raised natively")
        self.writer.call(set_gradient, proxy, value)
        self.of[proxy] = value


def gives_sparse_gradient(function: Any) -> bool:
    """Whether an autograd node, of a fake, is of an operator that was asked for a sparse gradient."""
    option = SPARSE_OPTIONS.get(type(function).__name__)
    return option is not None and getattr(function, option) is True
