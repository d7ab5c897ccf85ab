"""What a condition on data leaves that is of one type on one way and of another on the other: ``max(norm, 1.0)`` is the
tensor or the number, ``ratio = 1`` stays an int where an ``if`` did not make a float of it.

An ``Either`` has both, and the condition as a number of the graph. Arithmetic with plain numbers is done with both, as
each would be in Python; what an operator on tensors is given is the one that the running step has, to the last bit.
Where the program sees which of them it is (its type, a method, the truth), the call is traced again, and the condition
is a branch on data as any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.interpreter.domain.operators import OPERATIONS as OPERATORS
from moebius.lowering.step import chosen, either

from ..torch_facts import torch_private
from ..values.formulas import Formula
from ..values.numbers import OPERATIONS, PLAIN_NUMBERS, UNARY, Number, number_kind
from ..values.residual_program import Expression, Residual
from ..values.values import Break, CannotRebuild, SymbolicObject, TensorProxy, is_of_one_number, replaced
from .fakes import fake_of, leaves
from .interfaces import Domain
from .numbers import never_fails

Site = tuple[Any, int]  # code, and the index of the instruction that decides
SOME = 0.5  # number: what stands for either
MOST = 4  # ways that the Eithers in one operator's arguments may go together


class Chosen(SymbolicObject):
    """What data choose among numbers and tensors. refused: takes down the site where the program sees more than a
    number. made_by: the function that gives it, and its arguments. versions: of the tensors among ``sides``."""

    made_by: tuple[Any, ...]

    def __init__(self, domain: Domain, refused: set[Site], site: Site, sides: Sequence[Any]):
        self.domain, self.refused, self.site, self.sides = domain, refused, site, sides
        self.versions = self.versions_now()

    def versions_now(self) -> list[int]:
        return [torch_private.version_of(v.fake) for v in self.sides if type(v) is TensorProxy]

    @property
    def kind(self) -> type:
        self.refuse("the type")

    def refuse_written(self) -> None:
        """Python reads the tensor as it is by now, if that is what it is."""
        if self.versions_now() != self.versions:
            self.refuse("a use after a write")

    def expression(self, emitter: Residual) -> Expression:
        if self.versions_now() != self.versions:
            self.refused.add(self.site)
            raise CannotRebuild("what data have chosen is alive after a write into one of those")
        return emitter.call(*self.made_by)


class Either(Chosen):
    """``one if condition else other``. condition: a bool of the graph."""

    def __init__(
        self, domain: Domain, refused: set[Site], site: Site, condition: Number, one: Any, other: Any
    ) -> None:
        super().__init__(domain, refused, site, domain.numbers.open((one, other)))
        self.condition, self.made_by = condition, (chosen, condition, *self.sides)

    def refuse(self, what: str) -> NoReturn:
        self.refused.add(self.site)
        raise Break(
            "data-dependent branch",
            f"{what} of what is a {' or a '.join(map(described, self.sides))}, as the data say",
            "make it one type on both ways: torch.maximum/minimum for tensors, float() for numbers",
        )

    def with_both(self, what: str, function: Callable[..., Any], operation: Callable[..., Any], *operands: Any) -> Any:
        """An operation on numbers and tensors of one, of which this is one and all others are of either side. function:
        what it is in Python."""
        domain = self.domain
        operands = domain.numbers.open(operands)
        other = [o for o in operands if type(o) is Either and o is not self]
        if any(o.condition is not self.condition for o in other) or self.versions_now() != self.versions:
            self.refuse(what)
        ways = [[o.sides[i] if type(o) is Either else o for o in operands] for i in (0, 1)]
        if not all(cannot_fail(function, way) for way in ways):
            self.refuse(what)
        return join(domain, self.refused, self.site, self.condition, *(operation(*way) for way in ways))

    def binary(self, op: str, left: Any, right: Any) -> Any:
        domain, name, beside = self.domain, op.removesuffix("="), right if left is self else left
        if name not in OPERATIONS or (name != op and left is self and TensorProxy in map(type, leaves_of(self))):
            self.refuse(op)  # (a tensor is changed in place, and whoever else has it sees that)
        if type(beside) is TensorProxy:
            return domain.tensors.function(OPERATORS[op], (left, right), {})
        return self.with_both(name, OPERATIONS[name], lambda *operands: domain.binary(name, *operands), left, right)

    def unary(self, op: str) -> Any:
        return self.with_both(op, UNARY[op], lambda side: self.domain.unary(op, side), self)

    def number(self) -> Number:
        """The one that the running step has, for an operator on tensors."""
        self.refuse_written()
        return number_of(self.domain, self.condition, *self.sides)


def number_of(domain: Domain, condition: Number, one: Any, other: Any) -> Number:
    """A number of the graph that is the one or the other when the step runs."""
    tensors = domain.tensors
    sides = [side.number() if type(side) is Either else side for side in (one, other)]
    function = either if TensorProxy in map(type, sides) else chosen
    node = tensors.writer.call(function, condition, *sides)
    of_call = function is chosen and condition.known and len(set(map(number_kind, sides))) == 1
    known = domain.numbers.found_again((condition, *sides)) if of_call else None
    if known is not None:
        today, sources, operands = known
        return Number(domain.numbers, chosen(*today), node, sources, Formula(chosen, operands))
    return Number(domain.numbers, SOME, node)


def join(domain: Domain, refused: set[Site], site: Site, condition: Number, one: Any, other: Any) -> Any:
    """``one if condition else other``, as a value of the trace."""
    if is_plain(one) and is_plain(other) and number_kind(one) is number_kind(other) is float:
        return number_of(domain, condition, one, other)
    return Either(domain, refused, site, condition, one, other)


def leaves_of(value: Any) -> list[Any]:
    """What it may be; of an Either that may be another one, too."""
    return [leaf for side in value.sides for leaf in leaves_of(side)] if type(value) is Either else [value]


def conditions_of(value: Any) -> list[Any]:
    """What decides which."""
    return [value.condition, *(c for side in value.sides for c in conditions_of(side))] if type(value) is Either else []


def cannot_fail(function: Callable[..., Any], operands: list[Any]) -> bool:
    """Whether an operation on numbers, and tensors of one float, raises on no data."""
    if any(type(o) is Either for o in operands):
        return True  # it is asked for its own sides
    if any(type(o) is TensorProxy for o in operands):
        return all(is_plain(o) or is_part(o) for o in operands)
    if all(type(o) in PLAIN_NUMBERS for o in operands):
        try:
            return type(function(*operands)) in PLAIN_NUMBERS
        except Exception:  # whatever it is, Python raises it where it goes that way alone
            return False
    return all(map(is_plain, operands)) and never_fails(function, tuple(operands))


def is_plain(value: Any) -> bool:
    """Whether it is a number of Python's, or one of the graph."""
    is_open = type(value) is Number and value.node is not None
    return (value.kind if is_open else type(value)) in PLAIN_NUMBERS


def is_part(value: Any) -> bool:
    """Whether it is a tensor of one float of which autograd keeps nothing."""
    if type(value) is not TensorProxy or not is_of_one_number(value):
        return False
    return value.fake.dtype.is_floating_point and not value.fake.requires_grad


def described(side: Any) -> str:
    return side.describe() if type(side) is TensorProxy else number_kind(side).__name__


def of_extreme(domain: Any, refused: set[Site], site: Site, function: Any, values: Sequence[Any]) -> Either | None:
    """What stands for ``max()`` or ``min()`` of a tensor and a number; None where it is to be a branch."""
    first, second = values if len(values) == 2 else (None, None)
    if TensorProxy in (type(first), type(second)) and all(is_part(v) or is_plain(v) for v in (first, second)):
        if not (type(first) is type(second) is TensorProxy):
            condition = domain.numbers.item_of(domain.compare(">" if function is max else "<", second, first))
            return None if condition is None else Either(domain, refused, site, condition, second, first)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# As arguments
# ----------------------------------------------------------------------------------------------------------------------


def as_arguments(tensors: Any, function: Callable[..., Any], given: tuple) -> Any:
    """Arguments with a number of the graph in the place of each Either, where what the operator gives looks the same
    whichever side that is, and no gradient goes through it."""
    met = {id(one): one for one in leaves(given) if type(one) is Either}
    if not met:
        return given
    ways = [dict(zip(met, way, strict=True)) for way in itertools.product(*map(leaves_of, met.values()))]
    fakes = torch_private.tree_leaves(fake_of(replaced(given, ways[0])))
    ways.append(dict.fromkeys(met, SOME))
    grows = torch.is_grad_enabled() and any(is_kind(leaf, torch.Tensor) and leaf.requires_grad for leaf in fakes)
    few = not grows and len(ways) <= MOST + 1
    if not few or len({look(tensors.world, function, replaced(given, way)) for way in ways}) > 1:
        next(iter(met.values())).refuse("a use as an argument")
    return replaced(given, {place: one.number() for place, one in met.items()})


def look(world: Any, function: Callable[..., Any], given: tuple) -> Any:
    """What an operator's results look like; what it writes into are copies."""

    def copied(leaf: Any) -> Any:
        if not is_kind(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    with world.mode:
        args, kwargs = fx.node.map_aggregate(fake_of(given), copied)
    try:
        leaves = torch_private.tree_leaves(world.call(function, args, kwargs))
    except Exception as error:
        return type(error)
    return tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.layout) if is_kind(leaf, torch.Tensor) else leaf
        for leaf in leaves
    )
