"""What was assumed about symbolic sizes, as checks over the inputs that the sizes belong to."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_fakes, torch_private, torch_sizes
from ..values.values import TensorProxy
from .recorder import GuardRecorder
from .sources import Source, from_arguments, with_values


def guard_sizes(world: torch_fakes.FakeWorld, tensors: TensorOperations, guards: GuardRecorder) -> None:
    """One check over all inputs with symbolic sizes: every relation that tracing relied on, and each size's range."""
    places: dict[Any, str] = {}  # symbol -> the Python text that reads it of the checked inputs
    sources: list[Source] = []
    bounds: list[str] = []
    relations: list[str] = []
    strides: list[tuple[str, Any]] = []
    for proxy in tensors.inputs:
        fake, source = proxy.fake, proxy.source
        assert source is not None
        # as it came in: the step may have transposed it in place
        sizes = proxy.node.meta["sizes"] if is_kind(fake, torch.Tensor) else (fake,)
        if not any(map(torch_private.is_symbolic, sizes)):
            continue
        if source not in sources:
            sources.append(source)
        name = f"t{sources.index(source)}"
        for axis, size in enumerate(sizes):
            if not torch_private.is_symbolic(size):
                continue
            here = f"{name}.shape[{axis}]" if is_kind(fake, torch.Tensor) else name
            symbol = torch_private.raw_symbol(size)
            if symbol in places:
                relations.append(f"{here} == {places[symbol]}")
            elif symbol is not None:
                places[symbol] = here
        if is_kind(fake, torch.Tensor):
            strides += strides_of(name, proxy)
    for here, step in strides:
        if torch_private.is_symbolic(step) and (symbol := torch_private.raw_symbol(step)) is not None:
            places.setdefault(symbol, here)
    for here, step in strides:  # columns first, or rows that lie apart, are another graph: a step may ask for it
        if (text := number_text(step, places)) != here:
            relations.append(f"{here} == {text}")
    settled: set[str] = set()  # numbers that became constants
    asked: dict[str, Any] = {}  # the user's line that each relation comes from
    for symbol in places:
        low, high = world.bounds(symbol)
        if low is not None and low == high:
            settled.add(places[symbol])
        here = places[symbol]
        found = [f"{here} {op} {limit}" for op, limit in ((">=", low), ("<=", high)) if limit is not None]
        found = [f"{here} == {low}"] if here in settled else found
        bounds += found
        by = [place for expression, place in world.guards() if expression.free_symbols == {symbol}]
        asked |= dict.fromkeys(found, by[-1] if by else None)
    for expression, place in world.guards():
        if expression.free_symbols <= places.keys():
            relations.append(torch_sizes.expression_text(expression, places))
            asked.setdefault(relations[-1], place)
        else:
            tensors.numbers.hold_relation(expression)
    if not places:
        return
    parts = [*dict.fromkeys([*bounds, *relations])]
    text, names = " and ".join(f"({part})" for part in parts) or "True", [f"t{i}" for i in range(len(sources))]
    predicate: Any = torch_sizes.compiled(text, names)
    if any(torch_private.is_simulated(proxy.real) for proxy in tensors.inputs):
        predicate = torch_private.asked_of_one_rank(predicate)
    predicate.relation = text  # what an exported step writes down
    predicate.numbers = [(s, f"t{i}" in settled) for i, s in enumerate(sources) if f"t{i}" in places.values()]
    predicate.sources = tuple(map(from_arguments, sources))
    predicate.differs = functools.partial(first_broken, parts, asked, predicate.sources)
    shown = named(text, predicate.sources) if parts else "any number"
    guards.holds(", ".join(s.name for s in sources), shown, predicate, *sources)


def named(text: str, sources: Sequence[Source]) -> str:
    """A relation with the names of the inputs for t0, t1, …, and numbers as Python writes them."""
    text = re.sub(r"\b\d+\.\d{9,}", lambda found: repr(float(found[0])), text).replace("(-1)*", "-")
    return re.sub(r"\bt(\d+)\b", lambda found: sources[int(found[1])].name, text)


def first_broken(
    parts: list[str], asked: dict[str, Any], sources: tuple[Source, ...], values: tuple
) -> tuple[str, str, str, Any]:
    """Of the inputs' values for which not all parts hold: the first that does not, "True", what it is, and the user's
    line that asked for it."""
    names = [f"t{i}" for i in range(len(sources))]
    for part in parts:
        try:
            holds = torch_sizes.compiled(part, names)(*values)
        except Exception:  # (an input of another kind)
            holds = False
        if not holds:
            return named(part, sources), "True", f"False{with_values(sources, values)}", asked.get(part)
    return named(" and ".join(parts), sources), "True", "False", None


def strides_of(name: str, proxy: TensorProxy) -> list[tuple[str, Any]]:
    """The Python text that reads each stride of an input, and what it was taken to be."""
    return [(f"{name}.stride({axis})", step) for axis, step in enumerate(proxy.node.meta["strides"])]


def number_text(number: Any, places: dict[Any, str]) -> str:
    """A size or a stride, by the inputs that it is computed from."""
    if not torch_private.is_symbolic(number):
        return str(number)
    return torch_sizes.expression_text(torch_private.expression(number), places)
