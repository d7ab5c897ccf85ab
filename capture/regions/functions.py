"""``torch.autograd.Function``: forward and backward are interpreted, each into a graph of its own.

Both see a context of ours, an ordinary object in the trace. Neither may change what existed before it: forward would do
so once more when it is traced, and backward at another time than its node says. The function's own node runs the two
graphs in a real autograd Function, so that autograd saves what the user's backward reads and nothing else.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step import (
    ASKED,
    autocast_now,
    autograd_function,
    backward_place,
    by_autocast,
    put_back_mode,
    set_backward,
)

from ..guards.sources import Static
from ..heap.heap import ANYTHING
from ..python import natives
from ..tensors.applied import Applied
from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private
from ..values.values import ATOMS, SYMBOLIC, Break, RuntimeNumber, TensorProxy
from .autograd_joins import refuse_doubt
from .later_reads import LaterReads
from .recompute import Read
from .subgraphs import SubgraphTracer

HINT = "it runs natively; nothing to do"
NAMED = (type(None), bool, int, float, complex, str)
PLAIN = (*NAMED, *SYMBOLIC)
ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__  # of what it makes of any backward


def asked_in_backward(what: str) -> Break:
    detail = f"its backward asks for {what}, which create_graph=True of a caller answers otherwise"
    return Break("autograd.Function", detail, HINT)


@dataclass(frozen=True, eq=False)
class Made:
    """Backward's graph for one state of autocast."""

    state: Any
    scope: GraphScope
    module: fx.GraphModule

    def text(self) -> str:
        return str(self.module.graph)


@dataclass(eq=False)
class Call:
    """A call of a function in the graph. kept: of forward, what backward gets; nodes of the step stand for themselves.
    saved: those of them, and others, that ``save_for_backward`` got. made, values: backward as the graph runs it from
    here on, and what it takes. again: interprets backward for some states of autocast. place: the node of where another
    backward is put."""

    node: fx.Node
    forward: GraphScope
    kept: list[fx.Node]
    saved: set[fx.Node]
    made: Made
    values: list[fx.Node]
    again: Callable[[list[Any]], list[Made]]
    place: fx.Node | None = None


def values_of(scope: GraphScope, forward: GraphScope) -> list[fx.Node]:
    """What a graph within forward's takes: a node of forward's, or the step's that forward takes itself."""
    outside = {inner: node for node, inner in forward.lifted.items()}
    return [outside.get(node, node) for node in scope.lifted]


class Context:
    """The ``ctx`` of a function whose calls are graphs."""

    __module__ = torch.autograd.function.FunctionCtx.__module__  # an attribute that it lacks is the user's error

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self.constant: tuple = ()
        self.materialized = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialized = bool(value)

    def mark_dirty(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...


@natives.replaced(Context.mark_dirty, Context.save_for_forward)
def refuse_context(*_: Any) -> None:
    """What a graph has no way to say of its outputs."""
    hint = "it runs natively; a forward that gives a new tensor, and changes no argument, stays in the graph"
    raise Break("autograd.Function", "forward calls mark_dirty or save_for_forward", hint)


class FunctionHistory(torch.autograd.Function):
    """The fake of a function's output, with the history that torch gives it.

    An output that is an argument, or a view, stays one: torch makes a view of an argument that comes back, and refuses
    what is then written into it; a view requires gradients without being recorded, too (torch/csrc/autograd/
    custom_function.cpp, ``_process_backward_mode_ad``).
    """

    @staticmethod
    def forward(ctx: Any, templates: list[torch.Tensor], constant: bool, *inputs: torch.Tensor) -> torch.Tensor:
        (found,) = templates
        if not any(found is i for i in inputs):
            found = found.clone() if not torch_private.is_view(found) else found.view_as(found)
        if constant:
            ctx.mark_non_differentiable(found)
        return found


class AutogradFunctions(SubgraphTracer):
    """Calls of ``Function.apply`` in one trace."""

    what = "autograd.Function"
    where = "its forward or its backward"
    hint = "it runs natively; change Python objects outside of forward and backward"

    def apply(self, cls: type, *args: Any) -> Any:
        """``cls.apply(*args)``."""
        within = self.writer.in_forward and self.tensors.whole_step and not torch.is_grad_enabled()
        if not within:
            self.refuse(cls)
        inputs = [a for a in args if is_kind(a, TensorProxy)]
        for each in inputs:
            refuse_doubt(each.fake, "requires_grad", self.writer.scope)
        needs = tuple(is_kind(a, TensorProxy) and bool(a.fake.requires_grad) for a in args)
        if within:
            return self.without_backward(cls, needs, args)
        recorded = torch.is_grad_enabled() and any(needs)
        with self.scope(in_backward=False) as forward:
            ctx = self.context(needs)
            forward.is_forward = True
            results = self.forward(cls, ctx, args)
            given = list(results) if is_kind(results, tuple) else [results]
            outputs = self.tensors_in(given)
            fixed = self.attributes.get(ctx, "constant")
            constant = tuple(i for i, o in enumerate(outputs) if any(o is c for c in fixed))
            passed = self.differentiable(ctx, given, [outputs[i] for i in constant])
            read = Read(self.heap, self.writer.count, ())
            try:
                made = self.backward_graphs(cls, ctx, given, passed, args) if recorded else []
            finally:
                read.finish()
            backward, backward_module = self.chosen(made, given)
            kept = list(backward.lifted)
            by_torch = {t.node for t in self.attributes.get(ctx, "saved_tensors") if is_kind(t, TensorProxy)}
            saved = tuple(i for i, n in enumerate(kept) if n in by_torch)
            forward.graph.output((*(self.writer.argument(o) for o in outputs), *(forward.own(n) for n in kept)))
            forward_module = self.writer.module()
        bodies = [self.body("function_forward", forward_module), self.body("function_backward", backward_module)]
        node = self.writer.node("call_function", autograd_function, (), {})
        captures = tuple(self.writer.own(n) for n in forward.lifted)
        tensors = self.writer.argument(tuple(inputs))
        once = getattr(self.attributes.get(cls, "backward"), "__code__", None) is ONCE
        node.args = (*bodies, len(outputs), constant, saved, captures, tensors, cls.__name__, once)
        fakes = tuple(
            self.fake(o.fake, i in constant, recorded, [p.fake for p in inputs]) for i, o in enumerate(outputs)
        )
        if made:
            again = functools.partial(self.backward_graphs, cls, ctx, given, passed, args)
            outside = {inner: outer for outer, inner in forward.lifted.items()}
            taken, got = [outside.get(n, n) for n in kept], {outside.get(n, n) for n in by_torch}
            call = Call(node, forward, taken, got, made[0], values_of(made[0].scope, forward), again)
            histories, casts = frozenset(f.grad_fn for f in fakes if f.grad_fn is not None), [m.state for m in made]
            unchanged, renew = functools.partial(self.is_unchanged, call), functools.partial(self.renew, call)
            applied = Applied(name_of(cls), histories, casts, unchanged, read=read, node=node, renew=renew)
            applied.reads_state, applied.ask_later = self.reads_state(read), self.ask_later
            self.gradients.applied(applied)
        wrapped = dict(zip(outputs, self.tensors.wrap(fakes, node), strict=True))
        found = tuple(wrapped[o] if is_kind(o, TensorProxy) else o for o in given)
        return self.objects.made(found) if is_kind(results, tuple) else found[0]

    def without_backward(self, cls: type, needs: tuple[bool, ...], args: tuple) -> Any:
        """Of one in another's forward, which records nothing: its own forward is all. (Not in a backward, which may be
        gone back through. torch makes a view of an argument that comes back.)"""
        results = self.forward(cls, self.context(needs), args)
        outputs = self.tensors_in(list(results) if is_kind(results, tuple) else [results])
        if any(o.fake.requires_grad or any(o is a for a in args) for o in outputs):
            raise Break("autograd.Function", f"{cls.__name__} in another function gives what it was given", HINT)
        return results

    def reads_state(self, read: Read) -> bool:
        """Whether backward may well find another value at one of its reads when it runs later: a number, a text or a
        tensor that existed before. Not at a global name of a number or text, which mostly stays: all such reads are
        asked again when it runs."""
        for kind, owner, _, value in self.heap.reads(read.begin, read.end):
            if kind == "defaults" or owner is ANYTHING or self.heap.age(owner) >= 0:
                continue
            if not any(map(is_plain, flat(value))):
                continue
            if not (type(owner) is dict and "__spec__" in owner and type(value) in NAMED):
                return True
        return False

    def ask_later(self, applied: Applied) -> None:
        """The caller runs backward, which then asks once more for what it was interpreted with."""
        node, read = applied.node, applied.read
        if node is None or read is None:
            return
        place = cast(fx.Node, node.args[1])
        body = self.writer.submodules[str(place.target)]
        if ASKED in body.meta:  # it is that of a like call, too
            body = torch_private.uncompiled(body, copy.deepcopy(body.graph))
            node.args = (node.args[0], self.body("function_backward", body, of=node), *node.args[2:])
        what = f"backward of {applied.name.rpartition('.')[2]}"
        body.meta[ASKED] = LaterReads(self.objects).ask(what, applied.name, read.reads)

    def refuse(self, cls: type) -> None:
        name = cls.__name__
        if not self.tensors.whole_step:
            raise Break("autograd.Function", f"{name}: this backend takes a graph of operators alone", HINT)
        if self.writer.is_inner:
            raise Break("autograd.Function", f"{name}, in an expert loop or in another function", HINT)
        if name_of(cls) in self.gradients.natively:
            detail = f"{name}: its backward reads what may be changed before it runs"
            raise Break("autograd.Function", detail, "give it as an argument, or capture backward as well")
        for method in ("vjp", "jvp"):  # (vmap is for a transform, where everything runs natively)
            if self.has_own(cls, method):
                raise Break("autograd.Function", f"{name} has its own {method}", HINT)
        # the class whose apply calls backward; torch's metaclass makes one for each function
        self.attributes.on_type(cls, "_backward_cls")
        if getattr(getattr(cls, "_backward_cls", None), "_forward_cls", None) is not cls:
            raise Break("autograd.Function", f"{name} has another function's _backward_cls", HINT)

    def has_own(self, cls: type, method: str) -> bool:
        self.attributes.on_type(cls, method)
        return getattr(cls, method) is not getattr(torch.autograd.Function, method)

    def context(self, needs: tuple[bool, ...]) -> Any:
        known = self.objects.enter(Context, Static("Context", Context))
        return self.call(known, [needs], {})

    def forward(self, cls: type, ctx: Any, args: tuple) -> Any:
        """What the user's forward gives. One that has a ``setup_context`` sees no context itself."""
        if not self.has_own(cls, "setup_context"):
            return self.call(self.attributes.get(cls, "forward"), [ctx, *args], {})
        results = self.call(self.attributes.get(cls, "forward"), list(args), {})
        self.call(self.attributes.get(cls, "setup_context"), [ctx, args, results], {})
        return results

    def differentiable(self, ctx: Any, outputs: list[Any], constant: list[Any]) -> list[Any]:
        """The outputs whose gradients backward is called with: of all tensors, or without ``set_materialize_grads`` of
        the only one that can have any. Which of several would be None, is known when backward runs."""
        tensors = [o for o in outputs if is_kind(o, TensorProxy)]
        if self.attributes.get(ctx, "materialized"):
            return tensors
        found = [o for o in tensors if not any(o is c for c in constant)]
        if len(found) > 1:
            hint = "it runs natively; without that call, and with zeros for what is missing, it stays in the graph"
            raise Break("autograd.Function", "set_materialize_grads(False), and it gives several results", hint)
        return found

    def backward_graphs(
        self, cls: type, ctx: Any, outputs: list[Any], passed: list[Any], args: tuple, states: Sequence[Any] = ()
    ) -> list[Made]:
        """Backward's graphs. Autocast casts where backward runs, which is not where the function is called: backward is
        interpreted under the one here, under the one that the step began with, and under none."""
        counter, made = self.domain.counter, list[Made]()
        for state in states or dict.fromkeys((autocast_now(), *self.gradients.casts)):
            counted = counter.counted_before() if made or states else nullcontext()
            with counted, self.scope() as scope, torch_private.autocast_as(state):
                gradients = self.backward(cls, ctx, outputs, passed, args)
                scope.graph.output(tuple(self.writer.argument(g) for g in gradients))
                put_back_mode(scope.graph)
                made.append(Made(state, scope, self.writer.module()))
        return made

    def chosen(self, made: list[Made], outputs: list[Any]) -> tuple[GraphScope, fx.GraphModule]:
        """One graph for all of them. outputs: what forward gave."""
        if len({m.text() for m in made}) == 1:
            return made[0].scope, made[0].module
        with self.scope() as scope:
            known = [self.gradient(f"gradient_{i}", o.fake).node for i, o in enumerate(outputs) if is_tensor(o)]
            if not made:
                scope.graph.output(())
                return scope, self.writer.module()
            bodies = tuple(self.body("function_backward", m.module) for m in made)
            captures = tuple((*known, *(scope.own(n) for n in m.scope.lifted)) for m in made)
            states = tuple(m.state for m in made)
            chosen = self.writer.call(by_autocast, states, bodies, captures)
            scope.graph.output(chosen)
            return scope, self.writer.module()

    def is_unchanged(self, call: Call) -> bool:
        """Whether backward is interpreted as the same graph over the same values once more, as one runs it now."""
        found = self.made_again(call, call.made.state)
        return found is not None and found[1] == call.values and found[0].text() == call.made.text()

    def made_again(self, call: Call, state: Any) -> tuple[Made, list[fx.Node]] | None:
        """Backward as it is interpreted now, with the values that it takes; None where that is not to be had. The
        call's forward is written, and stays as it is."""
        forward, outer = call.forward, self.writer.scope
        captured, anchor = list(forward.lifted), forward.anchor
        self.writer.scope = forward
        try:
            (made,) = call.again([state])
            values = values_of(made.scope, forward)
        except Exception:
            return None
        finally:
            self.writer.scope, forward.anchor = outer, anchor
            added = [forward.lifted.pop(node) for node in list(forward.lifted)[len(captured) :]]
        if any(node.users for node in added):
            return None
        for node in added:
            forward.graph.erase_node(node)
        return made, values

    def renew(self, call: Call) -> Callable[[], None] | None:
        """Before a backward: writes, when it is called, that the user's backward is run as it is interpreted now. None
        where that cannot be said: it takes what forward has kept, and beside that values of the step that forward did
        not save."""
        node, graph = call.node, self.writer.graph
        if self.writer.is_inner or node.graph is not graph:
            return None
        if (found := self.made_again(call, autocast_now())) is None:
            return None
        made, values = found
        more = [value for value in values if value not in call.kept]
        if any(value.graph is not graph or value in call.saved for value in more):
            return None
        return functools.partial(self.put_backward, call, made, values, more)

    def put_backward(self, call: Call, made: Made, values: list[fx.Node], more: list[fx.Node]) -> None:
        node, graph, places = call.node, self.writer.graph, [*call.kept, *more]
        picks = tuple(places.index(value) for value in values)
        if call.place is None:
            with graph.inserting_before(node):
                call.place = graph.call_function(backward_place)
            call.place.meta.update({key: node.meta[key] for key in ("where", "stack", "number")}, val=None)
            node.args = (*node.args, call.place)
        body = self.body("function_backward", made.module)
        self.writer.call(set_backward, call.place, body, picks, tuple(more))
        call.made, call.values = made, values

    def backward(self, cls: type, ctx: Any, outputs: list[Any], passed: list[Any], args: tuple) -> list[Any]:
        """One gradient or None for each tensor among the arguments. outputs: what forward gave; passed: those of them
        whose gradients backward sees."""
        given = [self.gradient(f"gradient_{i}", o.fake) if is_tensor(o) else None for i, o in enumerate(outputs)]
        given = [g if any(o is p for p in passed) else None for o, g in zip(outputs, given, strict=True)]
        self.writer.unasked, switches = asked_in_backward, torch_private.switches()
        try:
            result = self.call(self.attributes.get(cls, "backward"), [ctx, *given], {})
        except Exception as error:  # the program meets it elsewhere: where it calls backward
            self.domain.meets_handler(error)
            raise Break("autograd.Function", f"its backward raises {type(error).__name__}", HINT) from None
        finally:
            self.writer.unasked = None
        if torch_private.switches() != switches:
            raise Break("autograd.Function", "its backward throws a switch of torch's", HINT)
        gradients = list(result) if is_kind(result, tuple) else [result]
        if len(gradients) < len(args) or any(g is not None for g in gradients[len(args) :]):
            raise Break(
                "autograd.Function", f"backward gives {len(gradients)} gradients for {len(args)} arguments", HINT
            )
        found = []
        for arg, gradient in zip(args, gradients, strict=False):
            if gradient is not None and not is_kind(gradient, TensorProxy):
                raise Break("autograd.Function", "backward gives something that is no tensor", HINT)
            if is_kind(arg, TensorProxy):
                found.append(gradient)
        return found

    def tensors_in(self, outputs: list[Any]) -> list[TensorProxy]:
        """The tensors that forward gives; beside them there may be plain values."""
        tensors = [o for o in outputs if is_kind(o, TensorProxy)]
        if not all(is_kind(o, TensorProxy) or (type(o) in ATOMS and type(o) not in SYMBOLIC) for o in outputs):
            raise Break("autograd.Function", "forward gives something that is no tensor", HINT)
        if not tensors or len(set(tensors)) < len(tensors):
            raise Break("autograd.Function", "forward gives one tensor twice, or none", "return a clone as the second")
        return tensors

    def fake(self, template: torch.Tensor, constant: bool, recorded: bool, inputs: list[torch.Tensor]) -> torch.Tensor:
        with self.tensors.mode, torch.set_grad_enabled(recorded):
            return cast(torch.Tensor, FunctionHistory.apply([template], constant, *inputs))


def flat(value: Any) -> Iterator[Any]:
    """A value, or what a tuple holds."""
    if not issubclass(type(value), tuple):
        yield value
        return
    for item in value:
        yield from flat(item)


def is_plain(value: Any) -> bool:
    return is_kind(value, TensorProxy | RuntimeNumber) or type(value) in PLAIN


def is_tensor(value: Any) -> bool:
    return is_kind(value, TensorProxy)


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
