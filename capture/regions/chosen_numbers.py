"""Numbers between which a branch on values decides: ``best = loss if loss < best else best``.

Each side leaves a number that was there before the branch, or a constant, or one that is computed of these in front of
the branch (``GraphWriter.in_front``): which of the two it is then is one node behind the branch. What a side computes
otherwise belongs to its body, and stays there.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step import attempted, chosen

from ..python.parts import Parts
from ..tensors.arrays import ArrayNumber
from ..tensors.eithers import Either, conditions_of, leaves_of
from ..tensors.graphs import GraphScope
from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_private
from ..values.formulas import AtSource, Formula, in_order
from ..values.numbers import Number, number_kind
from ..values.numpy_numbers import NUMPY_FLOATS
from ..values.values import SYMBOLIC, TensorProxy
from .branches import Conditional
from .loop_regions import Joined, LoopRegion, Place

KINDS = NUMPY_FLOATS | {float, int, bool}
ASKED = "asked"  # in the place of what a branch gives out: a condition
LARGEST = 2**62  # of a constant: what is a size by now, torch takes for an int64


def kind_of(value: Any) -> type:
    """The type that it has when the step runs."""
    return int if type(value) is torch.SymInt else number_kind(value)


def is_left(loop: LoopRegion, place: Any, pair: tuple[Any, Any], tensors: TensorOperations) -> bool:
    """A branch is recorded. place: the position of a local, inverted of a value on the stack, with keys of containers
    behind it, or a place of the heap. pair: what this side leaves there, and what the other one did, or nobody. Notes
    the two, if they are numbers that stand in front of the branch."""
    condition, body = loop.begun_with[-1], tensors.writer.scope
    pair = (placed(pair[0], loop, tensors), placed(pair[1], loop, tensors))
    if loop.first is None and loop.skips:
        return False
    if not all(is_of(leaf, tensors) for value in pair for leaf in leaves_of(value)):
        return False
    inside = [c for c in conditions_of(pair[0]) if is_made_in(c, body)]
    if not all(type(c) is Number for c in inside) or any(is_made_in(c, body) for c in conditions_of(pair[1])):
        return False
    for asked in inside:
        hand_condition_out(loop, asked, tensors)
    if not loop.chosen:
        if is_kind(condition, TensorProxy):  # (the side may have written into it by now)
            with tensors.writer.in_front((condition.node,), lambda scope: scope is tensors.writer.scope):
                condition = tensors.numbers.of_item(condition)
        loop.asked = condition
    loop.chosen[place] = pair
    return True


def placed(value: Any, loop: LoopRegion, tensors: TensorOperations) -> Any:
    """A number of the call that a side computes, as one that is computed in front of the branch: whatever it raises is
    raised where it is chosen. Any other value as it is."""
    numbers, writer = tensors.numbers, tensors.writer
    value = numbers.of_size(value) if type(value) is torch.SymFloat else value
    if type(value) is not Number or not value.known or value.node is None or is_of(value, tensors):
        return value
    assert value.evaluate is not None
    inputs = {proxy.source: proxy.node for proxy in tensors.inputs if not is_kind(proxy.fake, torch.Tensor)}
    nodes: dict[Any, fx.Node] = {}
    order = in_order(value.evaluate)
    for one in order:
        if type(one) is AtSource and one.source in inputs:
            nodes[one] = inputs[one.source]
        elif type(one) is not Formula or one.named or not is_printed(one.function):
            return value
        elif not all(type(o) in (int, float, bool, AtSource, Formula) for o in one.operands):
            return value
    with writer.in_front((), lambda scope: scope is writer.scope):
        for one in order:
            if type(one) is Formula:
                operands = tuple(nodes[o] if type(o) in (AtSource, Formula) else o for o in one.operands)
                nodes[one] = writer.call(attempted(one.function), *operands)
    return Number(numbers, value.representative, nodes[value.evaluate], value.sources, value.evaluate)


def is_printed(function: Any) -> bool:
    """Whether code of a graph may call it: a function of numbers in C, or of sizes, or our choice between two."""
    return function is chosen or type(function) in (types.BuiltinFunctionType, type) or hasattr(function, "text")


def hand_condition_out(loop: LoopRegion, asked: Number, tensors: TensorOperations) -> None:
    """For an Either that the body makes of numbers in front of it: the branch gives what decides there as bool[]."""
    body, place = tensors.writer.scope, (ASKED, id(asked))

    def held(truth: Any) -> TensorProxy:
        given = {"dtype": torch.bool, "device": "cpu"}
        fake = tensors.world.call(torch.full, ((), False), given)
        return tensors.wrap(fake, tensors.writer.node("call_function", torch.full, ((), truth), given))

    if place not in [one.place for one in loop.joined]:
        with tensors.writer.in_front((), lambda scope: scope is body):
            before = held(False)
        loop.joined.append(Joined(place, held(asked), before, number=True))


def in_tensors(pair: tuple[Any, Any], tensors: TensorOperations) -> tuple[TensorProxy, TensorProxy] | None:
    """Floats that the two sides leave in one place, as float64[], which holds any of them: for one that this side's
    body computes. pair: this side's, and the other's, which has to stand in front of the branch; else None."""
    body, (mine, other) = tensors.writer.scope, pair
    if not all(type(v) is float or (type(v) is Number and v.kind is float and v.node is not None) for v in pair):
        return None
    nodes = [v.node for v in (other,) if type(v) is Number and v.node is not None]
    if not is_of(other, tensors):
        return None

    def held(number: Any) -> TensorProxy:
        found: TensorProxy = tensors.function(torch.full, ((), number), {"dtype": torch.float64, "device": "cpu"})
        return found

    with tensors.writer.in_front(nodes, lambda scope: scope is body):
        before = held(other)
    return held(mine), before


def with_conditions(value: Any, asked: dict[int, Number]) -> Any:
    """The value, decided by what ``asked`` has for its conditions."""
    if type(value) is not Either:
        return value
    sides = (with_conditions(side, asked) for side in value.sides)
    return Either(value.domain, value.refused, value.site, asked.get(id(value.condition), value.condition), *sides)


def is_of(value: Any, tensors: TensorOperations) -> bool:
    """Whether it is a number that the graph around the body has, or a constant."""
    body: GraphScope = tensors.writer.scope
    if is_made_in(value, body):
        return False
    if type(value) is Number:
        return value.kind in KINDS and value.node is not None and body.scope_of(value.node) is not None
    if type(value) is torch.SymInt:
        return all(map(tensors.writer.bound, symbols_of(value)))
    return type(value) in KINDS and (type(value) is not int or -LARGEST < value < LARGEST)


def is_made_in(value: Any, scope: GraphScope) -> bool:
    """Whether the scope's own graph makes it."""
    if is_kind(value, TensorProxy | Number):
        return value.node is not None and value.node.graph is scope.graph
    return type(value) in SYMBOLIC and not symbols_of(value).isdisjoint(scope.symbols)


def makes_none_of(values: tuple[Any, ...], scope: GraphScope) -> bool:
    return not any(is_made_in(value, scope) for value in values)


def symbols_of(number: Any) -> frozenset[Any]:
    return frozenset(torch_private.expression(number).free_symbols)


def others(loop: LoopRegion, changed: list[int], tensors: TensorOperations) -> list[int]:
    """The locals that the one side has changed, without such numbers."""
    locals_, before = loop.frame.locals, loop.before
    return [i for i in changed if not is_left(loop, i, (locals_[i], before[i]), tensors)]


def hand_out(
    loop: LoopRegion, domain: Parts, counts: set[tuple[Any, int]], asked: dict[int, Number]
) -> dict[Place, Any]:
    """A node for each number, behind the branch; its value goes where it belongs. counts: takes down the branches that
    decide between ints, or between yes and no. asked: by the id of a condition in the body, what it is behind the
    branch. Returns the values that belong into containers."""
    rows, frame, condition, tensors, nested = loop.rows, loop.frame, loop.asked, domain.tensors, {}
    condition = condition.value if type(condition) is ArrayNumber else condition
    for place, (mine, other) in loop.chosen.items():
        site, kinds = (frame.code, cast(Conditional, rows).here), {kind_of(mine), kind_of(other)}
        mine = with_conditions(mine, asked)
        used = (condition, other, mine) if cast(Conditional, rows).skip_if else (condition, mine, other)
        if len(kinds) == 1 and Either not in kinds:
            (kind,) = kinds
            of_call = type(condition) is Number and condition.known
            known = tensors.numbers.found_again(used) if of_call else None
            if kind in (int, bool) and known is None:
                counts.add(site)
            with tensors.writer.in_front((), partial(makes_none_of, used)):
                node = tensors.writer.node("call_function", chosen, used, {})
                number: Any = tensors.world.unknown_number() if kind is int and known is None else None
                tensors.writer.bind_symbols(number, node)
            node.meta["val"] = number
            if known is not None:
                today, sources, operands = known
                number = Number(tensors.numbers, chosen(*today), node, sources, Formula(chosen, operands))
            number = Number(tensors.numbers, kind(0.5), node) if number is None else number
        else:
            number = Either(domain, domain.bounds.refused, site, cast(Any, condition), *used[1:])
        if type(place) is tuple:
            nested[place] = number
        elif type(place) is not int:
            place.put(number)
        elif place >= 0:
            frame.locals[place] = number
        else:
            frame.stack[~place] = number
    return nested
