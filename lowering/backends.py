"""Who runs a lowered graph: the graph itself, a backend of torch.compile by name, or the user's own function.

A foreign backend gets the lowered graph. Where a refused expert loop is left in it, or an operator of ours looks at the
batch in backward, the graph is split around it: the parts go to the backend, and the loop runs as a loop (no backend
knows what to do with its body), the operator as Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moebius.lowering.errors import LoweringError, UnknownBackendError
from moebius.lowering.experts.layout import WithoutGrad
from moebius.lowering.experts.stacking import asks_which_ran
from moebius.lowering.graph import expert_loop
from moebius.lowering.torch_private import (
    backend_names,
    compiling_with,
    fake_mode_of,
    lookup_backend,
    made_code,
    split_module,
)
from moebius.lowering.values import apply, needs_gradient, value_of

OWN = ("moebius", "eager")  # backends that run the graph as it is: after lowering, and before it
# Those whose code takes numbers that a graph reads as float32: torch's, in all versions (a ``const float`` of its C++)
ROUNDING = frozenset({"inductor"})
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def check_backend(backend: Any) -> None:
    """Raise UnknownBackendError for what is no backend. Costs nothing for our own."""
    if backend not in OWN:
        find_compiler(backend)


def find_compiler(backend: Any) -> Compiler:
    """The function ``(gm, example_inputs) -> callable`` that a name stands for; a callable stands for itself."""
    if callable(backend):
        if not accepts_two(backend):
            raise UnknownBackendError(f"backend={name_of(backend)} cannot be called as (gm, example_inputs)")
        return backend
    names = backend_names()
    if not isinstance(backend, str) or backend not in names:
        choices = ", ".join([*OWN, *(name for name in names if name not in OWN)])
        raise UnknownBackendError(
            f"backend={backend!r} is not known; one of {choices}; or a callable (gm, example_inputs) -> callable"
        )
    return lookup_backend(backend)


def run_as_is(gm: fx.GraphModule) -> Callable[..., tuple]:
    """The graph itself as a function that returns a tuple."""
    return as_tuple(gm, made_code(gm).forward)


def as_tuple(gm: fx.GraphModule, forward: Callable[..., Any]) -> Callable[..., tuple]:
    """A graph's code as a function that returns a tuple."""
    if isinstance(gm.graph.output_node().args[0], tuple):
        return forward
    return lambda *inputs: tuple(forward(*inputs))


def compile_graph(gm: fx.GraphModule, backend: Any) -> Callable[..., tuple]:
    """The graph compiled by a foreign backend, as a function that returns a tuple."""
    compiler = find_compiler(backend)
    alone = [node for node in gm.graph.nodes if stands_alone(node)]
    if not alone:
        return compile_part(gm, compiler, backend)
    note_gradients(gm)
    parts = split_around(gm, alone)
    for name, part in list(parts.named_children()):
        if isinstance(part, fx.GraphModule) and not any(map(stands_alone, part.graph.nodes)):
            unwrap = not isinstance(part.graph.output_node().args[0], tuple | list)
            setattr(parts, name, Part(compile_part(return_tuple(part), compiler, backend), unwrap))
    parts.recompile()
    return run_as_is(parts)


def compile_whole(gm: fx.GraphModule, backend: Any) -> Callable[..., tuple]:
    """The step as one graph through the backend. Raises WholeStepRefusedError where it cannot be one."""
    from moebius.lowering.step.whole import whole_step

    compiler, rounds = find_compiler(backend), isinstance(backend, str) and backend in ROUNDING

    def compile_it(whole: fx.GraphModule, examples: list[Any]) -> Callable[..., tuple]:
        return compile_with(whole, examples, compiler, backend)

    return whole_step(gm, run_as_is(gm), compile_it, rounds)


def compile_part(gm: fx.GraphModule, compiler: Compiler, backend: Any) -> Callable[..., tuple]:
    """One graph without loops through the backend."""
    if not any(node.op not in ("placeholder", "output", "get_attr") for node in gm.graph.nodes):
        return run_as_is(gm)
    examples = [value_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
    return compile_with(gm, examples, compiler, backend)


def compile_with(
    gm: fx.GraphModule, examples: list[Any], compiler: Compiler, backend: Any
) -> Callable[..., tuple]:
    """A graph and its example inputs through the backend."""
    with compiling_with(examples):
        compiled = compiler(gm, examples)
    if not callable(compiled):
        raise LoweringError(
            f"the backend {name_of(backend)} returned a {type(compiled).__name__}; it is to return a callable"
        )
    return lambda *inputs: tuple(compiled(*inputs))


class Part(torch.nn.Module):
    """A compiled part of a split graph, in the place of its GraphModule."""

    def __init__(self, function: Callable[..., tuple], unwrap: bool):
        super().__init__()
        self.function, self.unwrap = function, unwrap

    def forward(self, *inputs: Any) -> Any:
        results = self.function(*inputs)
        return results[0] if self.unwrap else results


def return_tuple(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph that returns one value returns a tuple of it: what backends expect."""
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple | list):
        output.args = ((output.args[0],),)
        gm.recompile()
    return gm


def stands_alone(node: fx.Node) -> bool:
    """Whether no backend gets the node."""
    return node.target is expert_loop or asks_which_ran(node)


def note_gradients(gm: fx.GraphModule) -> None:
    """Values of nodes that lowering has made say whether they have a history: where one goes from a part of the graph
    to another, the backend is to compute its gradient. (What capture has recorded says so; see ``values.infer``.)"""
    quiet, made = WithoutGrad(gm.graph), dict[fx.Node, Any]()

    def value(node: fx.Node) -> Any:
        return made[node] if node in made else value_of(node)

    for node in gm.graph.nodes:
        if node in quiet or node.target is expert_loop or not node.op.startswith("call_"):
            continue
        if needs_gradient(value_of(node)) or not any(needs_gradient(value(n)) for n in node.all_input_nodes):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value)
        with fake_mode_of([value(n) for n in node.all_input_nodes]), torch.enable_grad():
            found = apply(node, args, kwargs)
        if needs_gradient(found):
            made[node] = node.meta["val"] = found


def split_around(gm: fx.GraphModule, alone: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph as a chain of submodules in which each of these stands alone."""
    part, place = 0, {}
    for node in gm.graph.nodes:
        if node in alone:
            place[node] = part + 1
            part += 2
        else:
            place[node] = part
    for loop in (node for node in alone if node.target is expert_loop):
        body = loop.args[0] if loop.args else loop.kwargs["body"]
        assert isinstance(body, fx.Node)
        place[body] = place[loop]
    return split_module(gm, gm, lambda node: place[node], keep_original_order=True, keep_original_node_name=True)


def name_of(backend: Any) -> str:
    """For messages and reports."""
    return backend if isinstance(backend, str) else getattr(backend, "__qualname__", type(backend).__name__)


def accepts_two(function: Callable[..., Any]) -> bool:
    """Whether a callable can be called as a backend is; True where its signature cannot be read."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
