"""A node that holds a branch of the user's to the way that the graph was captured for."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moebius.lowering.errors import LoweringError


class BranchError(LoweringError):
    """A branch on data went the other way than when the step was captured.

    place: the branch's name. live: the values that Python needs to go on from the branch.
    """

    def __init__(self, place: str, taken: bool, live: tuple[Any, ...]):
        super().__init__(
            f"the branch at {place} is {taken} for this data, and the step was captured with {not taken}: "
            "run it as captured by moebius, which goes on from there as Python"
        )
        self.place, self.taken, self.live = place, taken, live


def require_branch(value: Any, expected: bool, place: str, *live: Any) -> None:
    """What comes after in the graph holds for ``bool(value) is expected`` alone.

    value: a tensor with one element, or a number. live: what Python needs to go on from here; it is kept until then.
    Raises BranchError, which capture answers.
    """
    if bool(value) is not expected:
        raise BranchError(place, not expected, live)


fx.wrap("require_branch")


@dataclass(frozen=True)
class Failed:
    """In the place of a number that could not be computed, for a side of a branch that may not be taken."""

    error: Exception


def chosen(condition: Any, one: Any, other: Any) -> Any:
    """``one if condition else other``, two numbers."""
    held = one if condition else other
    if type(held) is Failed:
        raise held.error
    return held


fx.wrap("chosen")


@functools.cache
def attempted(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of numbers that gives a Failed where it, or what gave an operand, raises."""

    def of_numbers(*operands: Any, **named: Any) -> Any:
        for operand in operands if function is not chosen else operands[:1]:
            if type(operand) is Failed:
                return operand
        try:
            return function(*operands, **named)
        except Exception as error:
            return Failed(error)

    if isinstance(function, types.BuiltinFunctionType):
        of_numbers.__name__ = of_numbers.__qualname__ = function.__name__
    return of_numbers


def either(condition: Any, one: Any, other: Any) -> Any:
    """The same of a number and a tensor, or two tensors: what later writes into the tensor do is not seen."""
    held = one if condition else other
    return held.clone() if isinstance(held, torch.Tensor) else held


fx.wrap("either")
