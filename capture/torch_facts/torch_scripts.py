"""Functions that ``torch.jit.script`` compiled: what this takes of torch's private names, in one place.

Such a function is one node of the graph, which calls it as the program does. On fakes the Python function runs that it
was compiled from. Checked on torch 2.13.0.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.jit import _state

COMPILED_FROM = "_torchdynamo_inline"
# Of what is left where nobody needs the results, all that may stand there.
CONTROL = frozenset(("prim::If", "prim::Loop", "prim::RaiseException"))


class Scripted:
    """Calls the compiled function. source: the Python function, which calls Python functions, too."""

    def __init__(self, function: Any, source: types.FunctionType):
        self.function, self.source = function, in_python(source)
        self.__name__, self.__module__ = source.__name__, source.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def scripted(function: Any) -> Scripted | None:
    """What stands for the function in a graph; None where it does more than to compute its result."""
    source = source_of(function)
    if source is None or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # (it casts by rules of its own)
        return None
    return Scripted(function, source)


KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def source_of(function: Any) -> Any:
    """The Python function, None where it has none or does more than to compute its result."""
    source: Any = getattr(function, COMPILED_FROM, None) if type(function) is torch.jit.ScriptFunction else None
    if type(source) is not types.FunctionType:
        return None
    if function not in KNOWN:
        of_source = _state._try_get_jit_cached_function(source)  # (none of a traced one, which has lost its branches)
        same = of_source is not None and of_source.qualified_name == function.qualified_name
        KNOWN[function] = same and not has_effects(function)
    return source if KNOWN[function] else None


def in_python(source: types.FunctionType) -> types.FunctionType:
    """The function with Python functions for the compiled ones that it names."""
    named = {name: source.__globals__[name] for name in source.__code__.co_names if name in source.__globals__}
    called = {name: in_python(inner) for name, value in named.items() if (inner := source_of(value)) is not None}
    if not called:
        return source
    names = {**source.__globals__, **called}
    made = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
    made.__kwdefaults__ = source.__kwdefaults__
    return made


def has_effects(function: Any) -> bool:
    """Whether torch keeps any of its operators where nobody needs the results: one that prints, or writes into what the
    function was given."""
    graph = function.inlined_graph.copy()
    torch._C._jit_pass_constant_propagation(graph)
    while [*graph.outputs()]:
        graph.eraseOutput(0)
    torch._C._jit_pass_dce(graph)
    return any(
        node.kind() not in CONTROL and not any(output.uses() for output in node.outputs()) for node in nodes_of(graph)
    )


def nodes_of(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)
