"""Backward inside the graph: ``backward()`` is a node, and ``.grad`` is followed through reads and writes.

``backward()`` runs when the graph runs, on the real tensors, so what it leaves in ``.grad`` is autograd's own. Tracing
only needs to know which leaves it reaches. The fakes have an autograd graph of their own, which says so: its
AccumulateGrad nodes (torch/csrc/autograd/functions/accumulate_grad.h) name the leaves.

``.grad`` of a leaf is one of: unread (what it was before the call), a traced value that the step put there, or
``Accumulated`` (backward added to what was there, and nobody has asked yet which of the two cases it was).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from moebius.lowering.step import gradient_of, require_gradients, set_gradient

from ..sources import Source, part
from .values import Break, TensorProxy

if TYPE_CHECKING:
    from .tensors import TensorOperations

Enter = Callable[[Any, Source], Any]
UNREAD = object()


class Accumulated:
    """The gradient after a backward that reached the leaf. before: None, or UNREAD for what the call began with."""

    __slots__ = ("before",)

    def __init__(self, before: Any):
        self.before = before


class Gradients:
    """Everything that one trace does with ``.grad``. inside: whether backward may be a node (our own backends)."""

    def __init__(self, tensors: TensorOperations, inside: bool):
        self.tensors, self.inside = tensors, inside
        self.note: Callable[[str], None] = lambda what: None
        self.of: dict[TensorProxy, Any] = {}  # what is known of each leaf's .grad
        self.check: fx.Node | None = None  # that the gradients are there which are read after the last backward
        self.was_set: dict[str, bool] = {}  # by source: what the call began with
        self.found_before: dict[str, Any] = {}  # the same, for a trace that is made after the graph has run a part

    # ------------------------------------------------------------------------------------------------------------------
    # Backward
    # ------------------------------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: TensorProxy,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: Any = False,
        inputs: Any = None,
    ) -> None:
        """``loss.backward(...)`` as a node."""
        self.note("backward")
        self.require(create_graph)
        if not loss.fake.requires_grad or (gradient is None and loss.fake.numel() != 1):
            raise Break("Tensor.backward", "backward() of this tensor raises", "the error is raised natively")
        wanted = None if inputs is None else list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        leaves = self.leaves((loss,)) if wanted is None else [p for p in self.leaves((loss,)) if p in wanted]
        given = {"gradient": gradient, "retain_graph": retain_graph, "inputs": wanted}
        kwargs = {name: value for name, value in given.items() if value is not None}
        node = self.tensors.writer.node("call_method", "backward", (loss,), kwargs)
        node.meta["val"] = None
        self.check = self.tensors.writer.node("call_function", require_gradients, (), {})
        self.check.meta["val"] = None
        for leaf in leaves:
            before = self.of.get(leaf, UNREAD if leaf.real is not None else None)
            if before is None or before is UNREAD:
                self.of[leaf] = Accumulated(before)
            # a tensor that is there is added to in place, grad mode being off: the same value goes on standing for it

    def derive(self, outputs: Any, inputs: Any, grad_outputs: Any, options: dict[str, Any]) -> Any:
        """``torch.autograd.grad(outputs, inputs, grad_outputs)``: a node that gives one gradient for each input."""
        self.require(options.pop("create_graph", False))
        if options.pop("is_grads_batched", False) or options.pop("materialize_grads", False):
            raise Break("torch.autograd.grad", "batched or materialized gradients", "it runs natively")
        outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        inputs = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
        if not all(isinstance(p, TensorProxy) for p in (*outputs, *inputs)):
            raise Break("torch.autograd.grad", "of something that is no tensor", "the error is raised natively")
        reached = self.leaves(outputs)
        if not all(p in reached for p in inputs):
            raise Break("torch.autograd.grad", "an input is not a leaf that is reached", "it runs natively")
        kwargs = {name: value for name, value in options.items() if value is not None and name != "only_inputs"}
        if grad_outputs is not None:
            kwargs["grad_outputs"] = grad_outputs
        result = tuple(self.fake_gradient(p) for p in inputs)
        return self.tensors.record("call_function", torch.autograd.grad, (outputs, inputs), kwargs, result)

    def require(self, create_graph: Any) -> None:
        if not self.inside:
            raise Break(
                "Tensor.backward",
                "a foreign backend compiles forward graphs; backward runs between two of them",
                "use backend='moebius' or 'eager' for one graph of the whole step",
            )
        if create_graph:
            raise Break("Tensor.backward", "create_graph=True", "gradients of gradients are not in a graph yet")
        if self.tensors.writer.scope.parent is not None:
            raise Break("Tensor.backward", "inside an expert loop", "call backward after the loop")
        if self.tensors.writer.recomputed:
            raise Break("Tensor.backward", "inside a checkpointed call", "call backward after it")

    def leaves(self, outputs: Iterable[TensorProxy]) -> list[TensorProxy]:
        """The leaves whose ``.grad`` a backward from these outputs reaches, each once."""
        found: dict[int, TensorProxy] = {}
        pending, seen = [], set()
        for output in outputs:
            if output.fake.grad_fn is None and output.fake.requires_grad:
                found[id(output)] = output
            pending.append(output.fake.grad_fn)
        while pending:
            function = pending.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            pending.extend(inner for inner, _ in function.next_functions)
            variable = getattr(function, "variable", None)
            if variable is not None:
                leaf = self.tensors.of_fake.get(id(variable))
                if leaf is None or (isinstance(leaf.real, torch.Tensor) and not leaf.real.is_leaf):
                    raise Break(
                        "Tensor.backward",
                        "the autograd graph reaches back beyond this graph",
                        "nothing to do: backward runs between two graphs",
                    )
                self.refuse_hooks(leaf)
                found[id(leaf)] = leaf
        return list(found.values())

    def refuse_hooks(self, leaf: TensorProxy) -> None:
        real = leaf.real
        if isinstance(real, torch.Tensor) and (
            real._backward_hooks or getattr(real, "_post_accumulate_grad_hooks", None)
        ):
            raise Break(
                "Tensor.backward",
                "a parameter has gradient hooks, Python code that backward calls",
                "nothing to do: backward runs between two graphs",
            )

    # ------------------------------------------------------------------------------------------------------------------
    # .grad
    # ------------------------------------------------------------------------------------------------------------------

    def read(self, proxy: TensorProxy, enter: Enter) -> Any:
        """``proxy.grad``."""
        self.note("gradient")
        now = self.of.get(proxy, UNREAD)
        if now is UNREAD:
            now = self.before_the_call(proxy, enter)
        elif isinstance(now, Accumulated):
            before = None if now.before is None else self.before_the_call(proxy, enter)
            now = before if before is not None else self.made_by_backward(proxy)
        self.of[proxy] = now
        return now

    def before_the_call(self, proxy: TensorProxy, enter: Enter) -> Any:
        if not isinstance(proxy.real, torch.Tensor) or proxy.source is None:
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
        fake = self.fake_gradient(proxy)
        if self.check is not None and proxy.node not in self.check.args:
            self.check.args = (*self.check.args, proxy.node)
        return self.tensors.record("call_function", gradient_of, (proxy,), {}, fake)

    def fake_gradient(self, proxy: TensorProxy) -> torch.Tensor:
        """Autograd gives a gradient the strides of a dense leaf (``GradLayoutContract``, torch/csrc/autograd)."""
        with self.tensors.world.mode, torch.no_grad():
            return torch.empty_like(proxy.fake).requires_grad_(False)

    def write(self, proxy: TensorProxy, value: Any) -> None:
        """``proxy.grad = value``, as a node, so that it stays in order with the backward nodes."""
        self.note("gradient")
        if not self.inside:
            raise Break("attribute of a tensor is set", f"{proxy.describe()}.grad = …", "it is set natively")
        if self.tensors.writer.scope.parent is not None:
            raise Break("Tensor.grad", "a gradient is set inside an expert loop", "set it after the loop")
        if value is not None and not isinstance(value, TensorProxy):
            raise TypeError(
                f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}"
            )
        if value is not None and (value.fake.shape != proxy.fake.shape or value.fake.dtype != proxy.fake.dtype):
            raise Break("Tensor.grad", "a gradient of another shape or dtype is set", "the error is raised natively")
        self.tensors.writer.node("call_function", set_gradient, (proxy, value), {}).meta["val"] = None
        self.of[proxy] = value
