"""``torch.func``: ``vmap``, ``grad``, ``jacrev`` and the like. The function is a graph of its own, the call one node.

What torch's transform hands to the function is seen by letting it call a probe on fakes; the function is interpreted on
new fakes of that kind; then the transform runs on fakes once more, over the finished graph, which shows that it can and
what comes out. Any transform that takes the function first is known so, nested ones too.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.graph import code_of
from moebius.lowering.step.function_transforms import found as transform_named
from moebius.lowering.step.function_transforms import function_transform, leaves_of, transformed

from ..guards.sources import Static
from ..tensors.fakes import fake_of
from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private
from ..values.values import ATOMS, SYMBOLIC, Break, TensorProxy, mapped
from .selective import draws
from .subgraphs import SubgraphTracer, operators_written_down

HINT = "it runs natively; torch.autograd.grad, of sums where there is a batch, stays in the graph"


def asked_in_function(what: str) -> Break:
    return Break("function transform", f"its function asks for {what}", HINT)


class Seen(BaseException):
    """The transform calls its function. args, options: with what; grad: under which grad mode."""

    def __init__(self, args: tuple, options: dict[str, Any]):
        self.given, self.grad = (args, options), torch.is_grad_enabled()


def probe(*args: Any, **options: Any) -> Any:
    raise Seen(args, options)


def made_later(name: str, function: Any, args: tuple, options: dict[str, Any]) -> Any:
    """What ``jacrev(function)`` gives, interpreted: the call is a node, not the making."""

    def wrapper(*given: Any, **named: Any) -> Any:
        return run_later(name, function, args, options, given, named)

    return functools.wraps(function)(wrapper) if type(function) is types.FunctionType else wrapper


def run_later(name: str, function: Any, *args: Any) -> Any:
    """The call of what ``made_later`` gives. While the step is traced, it is ``FunctionTransforms.run_later``."""
    return transform_named(f"{name}()")(function, *args)


class FunctionTransforms(SubgraphTracer):
    """Calls of transforms in one trace."""

    what = "function transform"
    where = "its function"
    hint = "it runs natively; change Python objects outside of the function"
    lenient = True  # (``functional_call`` sets a module's parameters, and puts them back)
    open = 0  # how many are interpreted

    @property
    def functions(self) -> dict[Any, Callable[..., Any]]:
        return {run_later: self.run_later}

    @property
    def answers(self) -> dict[Any, Callable[..., Any]]:
        return {reader: functools.partial(self.asked, reader) for reader in torch_private.TRANSFORM_READERS}

    def known(self, function: Any) -> Any:
        return self.objects.enter(function, Static(function.__name__, function))

    def asked(self, reader: Callable[..., Any], *args: Any) -> Any:
        """Which transforms run: while the step is traced, none."""
        if self.open:
            raise asked_in_function(f"torch's {reader.__name__}")
        return reader(*args)

    def call_of(self, transform: types.FunctionType, *args: Any, **options: Any) -> Any:
        """A call of a function of the modules that make transforms: one, if it takes a function first."""
        name = f"{transform.__module__}.{transform.__qualname__}"
        if inspect.unwrap(transform).__code__.co_varnames[:1] != ("func",) or not args or "<locals>" in name:
            self.refuse(name, "it belongs to a transform that runs natively")
        return self.run(name, args[0], args[1:], options)

    def run_later(self, name: str, function: Any, *args: Any) -> Any:
        return self.run(f"{name}()", function, args, {})

    def run(self, name: str, function: Any, args: tuple, options: dict[str, Any]) -> Any:
        """``transform(function, *args, **options)``, by the transform's name."""
        if not self.tensors.whole_step or self.writer.in_loop or self.writer.recomputed:
            self.refuse(name, "in a loop, a checkpointed call, or for a backend that takes a graph of operators alone")
        args, options = self.domain.plain_contents(args), self.domain.plain_contents(options)
        self.refuse_leaves(name, (args, options), objects=True)
        if (seen := self.seen(name, args, options)) is None:
            return self.call(self.known(made_later), [name, function, args, options], {})
        shape, scope, body = self.traced(name, function, seen)
        captures = tuple(scope.lifted)
        if any(node.meta.get("val") is None for node in captures):
            self.refuse(name, "its function uses a number that only the running step knows")
        found = self.on_fakes(
            name, transformed, (name, code_of(body), shape, [n.meta["val"] for n in captures], args, options)
        )
        if not all(is_kind(leaf, torch.Tensor) for leaf in torch_private.tree_leaves(found)):
            self.refuse(name, "it gives something that is no tensor")
        graph, nodes = self.body("transformed", body), tuple(self.writer.own(n) for n in captures)
        # (the function's graph needs the objects no more)
        given = mapped((args, options), lambda one: one if is_kind(one, TensorProxy) or type(one) in ATOMS else None)
        node = self.writer.node("call_function", function_transform, (name, graph, shape, nodes, *given), {})
        return self.nest(found, iter(self.tensors.wrap(tuple(leaves_of(found)), node)))

    def traced(self, name: str, function: Any, seen: Seen) -> tuple[Any, GraphScope, fx.GraphModule]:
        """The function's graph: the shape of what it gives, and its scope."""
        before = self.writes()
        unasked, self.writer.unasked = self.writer.unasked, asked_in_function
        self.open += 1
        try:
            with self.scope(in_backward=False, recording=seen.grad) as scope, operators_written_down(self.tensors):
                mark = self.heap.mark()
                args, options = self.given(seen.given)
                leaves: list[Any] = []
                shape = self.shape_of(name, self.call(function, list(args), dict(options)), leaves)
                if not self.heap.puts_back(mark):
                    detail = "what existed before is changed in its function"
                    raise Break("function transform changes Python state", detail, self.hint)
                if torch.is_grad_enabled() is not seen.grad:
                    self.refuse(name, "its function changes grad mode and does not change it back")
                inputs = [n.meta["val"] for n in scope.graph.nodes if n.op == "placeholder"]
                if any(self.world.writes_into(f) != before.get(id(f), 0) for f in inputs if is_kind(f, torch.Tensor)):
                    self.refuse(name, "its function writes into a tensor that it did not make")
                scope.graph.output([self.writer.argument(leaf) for leaf in leaves])
                for node in scope.graph.nodes:
                    self.refuse_node(name, node)
                return shape, scope, self.writer.module()
        finally:
            self.writer.unasked = unasked
            self.open -= 1

    def writes(self) -> dict[int, float]:
        """By id of each fake: how often it has been written into."""
        known = self.tensors.of_fake
        return {id(p.fake): self.world.writes_into(p.fake) for p in known.values()}

    def refuse_node(self, name: str, node: fx.Node) -> None:
        """In a graph that a transform may run over other tensors than it was traced with, or twice."""
        if any(draws(*operator[:3]) for operator in node.meta.pop("operators", ())):
            self.refuse(name, "its function draws random numbers")
        module = getattr(node.target, "__module__", None) or ""
        known = module.partition(".")[0] in ("torch", "_operator", "math")
        if node.op == "call_function" and not known and node.target not in (getattr, function_transform):
            self.refuse(name, "its function does more than compute")

    def seen(self, name: str, args: tuple, options: dict[str, Any]) -> Seen | None:
        """How it calls its function; None if it gives a function that will."""
        try:
            made = self.on_fakes(name, transform_named(name), (probe, *args), options)
        except Seen as seen:
            return seen
        if type(made) is not types.FunctionType:
            self.refuse(name, "it does not call its function")
        return None

    def on_fakes(self, name: str, function: Any, args: tuple, options: dict[str, Any] | None = None) -> Any:
        try:
            return self.world.call(function, fake_of(args), fake_of(options or {}))
        except Exception as error:  # natively, where it is raised as torch's own
            self.refuse(name, (str(error).splitlines() or [type(error).__name__])[0][:160])

    def given(self, value: Any) -> Any:
        """What the function sees for what the transform hands to it: tensors that look so, in the open graph."""
        known = self.tensors.of_fake
        like = [self.like(leaf) for leaf in leaves_of(value)]
        # (one that no level wraps is itself)
        return self.nest(value, iter([known.get(id(o), n) for o, n in zip(leaves_of(value), like, strict=True)]))

    def like(self, leaf: torch.Tensor) -> TensorProxy:
        node = self.writer.placeholder("given")
        node.meta.update(where=self.writer.where()[-1], stack=self.writer.where())
        with self.tensors.mode:
            made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return self.tensors.wrap(made, node)

    def nest(self, value: Any, leaves: Iterator[Any]) -> Any:
        """A new nest of tuples, lists and dicts like this one, with these in the place of its tensors."""
        return mapped(value, lambda one: next(leaves) if is_kind(one, torch.Tensor) else one, self.objects.made)

    def shape_of(self, name: str, value: Any, leaves: list[Any]) -> Any:
        """Numbers in the place of leaves, which are added to those."""
        value = self.domain.plain_contents(value)
        if type(value) in (tuple, list):
            return type(value)([self.shape_of(name, item, leaves) for item in value])
        if type(value) is dict:
            return {key: self.shape_of(name, item, leaves) for key, item in value.items()}
        self.refuse_leaves(name, value)
        leaves.append(value)
        return len(leaves) - 1

    def refuse_leaves(self, name: str, value: Any, objects: bool = False) -> None:
        """What a transform finds in plain containers: tensors, plain values, and objects where it hands them on."""
        kind = type(value)
        if kind in (tuple, list, dict):
            for item in value.values() if kind is dict else value:
                self.refuse_leaves(name, item, objects)
        elif not (is_kind(value, TensorProxy) or (kind in ATOMS and kind not in SYMBOLIC)):
            if not objects or not is_kind(value, torch.nn.Module | types.FunctionType):
                self.refuse(name, f"it is given, or gives, a {kind.__name__}")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise Break("function transform", f"torch.func's {name.rpartition('.')[2]}: {why}", HINT)
