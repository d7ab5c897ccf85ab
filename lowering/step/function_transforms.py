"""A transform of ``torch.func`` as a node: torch's own transform runs over a graph in the user's function's place."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moebius.lowering.graph import code_of


@functools.cache
def found(name: str) -> Callable[..., Any]:
    """The transform of this name. With () behind it: one that gives a function, with the call of that."""
    transform: Callable[..., Any] = pkgutil.resolve_name(name.removesuffix("()"))

    def and_call(function: Any, args: Any, options: Any, given: Any, named: Any) -> Any:
        return transform(function, *args, **options)(*given, **named)

    return and_call if name.endswith("()") else transform


def filled(shape: Any, leaves: Sequence[Any]) -> Any:
    """The nest of tuples, lists and dicts with each leaf where its number stands."""
    if isinstance(shape, int):
        return leaves[shape]
    if isinstance(shape, dict):
        return {key: filled(value, leaves) for key, value in shape.items()}
    return type(shape)(filled(value, leaves) for value in shape)


def leaves_of(value: Any) -> list[Any]:
    """Its tensors, in the order in which a nest of tuples, lists and dicts holds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [leaf for item in items for leaf in leaves_of(item)]


def transformed(
    transform: str, body: Callable[..., Any], shape: Any, captures: Sequence[Any], args: Sequence[Any], options: dict
) -> Any:
    """What ``transform(function, *args, **options)`` gives. body: takes the function's tensors, then ``captures``."""

    def function(*given: Any, **named: Any) -> Any:
        return filled(shape, body(*leaves_of((given, named)), *captures))

    return found(transform)(function, *args, **options)


def function_transform(
    transform: str, body: fx.GraphModule, shape: Any, captures: Sequence[Any], args: Sequence[Any], options: dict
) -> tuple[torch.Tensor, ...]:
    """A call of one of ``torch.func``'s transforms: the tensors of its result.

    transform: its full name (``torch._functorch.vmap.vmap_impl``), see ``found``. body: the function as a graph, of its
    own tensors and ``captures``; gives a list of leaves. shape: the nest of tuples, lists and dicts that the function
    gives, with the number of a leaf for each. args, options: the transform's, after the function. Raises what torch
    does.
    """
    return tuple(leaves_of(transformed(transform, code_of(body), shape, captures, args, options)))


fx.wrap("function_transform")
