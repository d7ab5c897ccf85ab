"""What ``max`` and ``min`` give of integers that tensors hold, and ints: one of them, as the data say.

``F.one_hot(place, max(place.max() + 1, capacity))[..., :capacity]`` asks only for the number, and the number is one of
the graph whichever of them it is. A ``Bound`` stands for it. What a program does with it otherwise (its type, a method)
needs to know which it is: the call is then traced again, and the comparison is a branch on data as any other.

Which calls these are is learnt from a trace that such a use stopped: by the instruction that calls.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_fakes, torch_private
from ..values.numbers import Number, number_kind
from ..values.values import Break, TensorProxy
from .counts import INTEGERS
from .eithers import Chosen, Either, Site, of_extreme
from .interfaces import Domain

LARGEST = 1 << 53  # beyond it a float is another number
ONE_HOT = torch.nn.functional.one_hot
CHOICES: dict[Callable[..., Any], Callable[..., Any]] = {max: torch.sym_max, min: torch.sym_min}


class Bound(Chosen):
    """The result of ``function(*values)``. number: it, as an int of the graph."""

    def __init__(self, bounds: Bounds, site: Site, function: Callable[..., Any], values: Sequence[Any]):
        super().__init__(bounds.domain, bounds.refused, site, values)
        self.function, self.made_by = function, (function, *values)
        self.held = functools.reduce(CHOICES[function], map(bounds.tensors.bound, values))

    @property
    def number(self) -> Any:
        self.refuse_written()
        return self.held

    def refuse(self, what: str) -> NoReturn:
        self.refused.add(self.site)
        raise Break(
            "data-dependent branch",
            f"{what} of what {self.function.__name__}() gives: which of its arguments depends on values",
            "use torch.maximum/minimum for tensors, or int() of the tensor",
        )

    def truth(self) -> bool:
        return self.domain.truth(self.number)

    def binary(self, op: str, left: Any, right: Any) -> Any:
        left, right = self.beside(left, right, f"{op}")
        return self.domain.binary(op, left, right)

    def compare(self, op: str, left: Any, right: Any) -> Any:
        left, right = self.beside(left, right, f"{op}")
        return self.domain.compare(op, left, right)

    def beside(self, left: Any, right: Any, what: str) -> tuple[Any, Any]:
        """The operands, with the number for it: beside a tensor of a wide dtype the result is the same for an int."""
        other = right if left is self else left
        wide = type(other) is TensorProxy and (other.fake.dtype.is_floating_point or other.fake.dtype is torch.int64)
        if not wide or what.endswith("="):
            self.refuse(what)
        return (self.number, right) if left is self else (left, self.number)


class Bounds:
    """Those of one trace. elsewhere: calls whose result is used otherwise; refused: such as this trace found."""

    def __init__(self, domain: Domain):
        self.domain, self.tensors = domain, domain.tensors
        self.elsewhere: set[Site] = set()
        self.refused: set[Site] = set()

    def of_types(self, function: Callable[..., Any], values: Sequence[Any]) -> Either | None:
        """What stands for ``min(1, step / 10)``: an int in some calls, a float in others; None where it is one type."""
        frame, numbers = self.domain.frame, self.domain.numbers
        if frame is None or len(values) != 2 or (site := (frame.code, frame.pc)) in self.elsewhere:
            return None
        opened = [numbers.of_size(v) if type(v) in (torch.SymInt, torch.SymFloat) else v for v in values]
        first, second = opened
        kinds = {number_kind(value) for value in opened}
        if kinds != {int, float} or not all(numbers.decides(v) for v in opened if type(v) is Number):
            return None
        condition = numbers.apply(operator.gt if function is max else operator.lt, second, first)
        return Either(self.domain, self.refused, site, numbers.both_ways(condition), second, first)

    def of(self, function: Callable[..., Any], values: Sequence[Any]) -> Bound | Either | None:
        """What stands for ``function(*values)``; None where it is to be a branch."""
        frame, tensors = self.domain.frame, self.tensors
        if frame is None or self.domain.open_loops or not tensors.branches or tensors.writer.in_loop:
            return None
        site = (frame.code, frame.pc)
        if site in self.elsewhere:
            return None
        if all(map(is_whole, values)):
            return Bound(self, site, function, values)
        return of_extreme(self.domain, self.refused, site, function, values)


def is_whole(value: Any) -> bool:
    """Whether it is an int, or a tensor of one, that is the same beside a float."""
    if type(value) is TensorProxy:
        return value.fake.dim() == 0 and value.fake.dtype in INTEGERS
    return type(value) is torch.SymInt or (type(value) is int and abs(value) < LARGEST)


def like_one_hot(tensor: torch.Tensor, classes: Any) -> torch.Tensor:
    """``one_hot`` of a fake, where the running step knows how many classes there are."""
    return tensor.new_zeros((*tensor.shape, classes), dtype=torch.int64)


def open_classes(world: torch_fakes.FakeWorld, tensor: Any = None, num_classes: Any = -1, **_: Any) -> Any:
    """How many classes ``one_hot`` is of, where values or sizes say it; None where it is a number that is known. (C
    takes no size that varies here.)"""
    fits = is_kind(tensor, TensorProxy) and tensor.fake.dtype is torch.int64 and type(num_classes) is torch.SymInt
    if not fits:
        return None
    if not torch_private.depends_on_values(num_classes):
        return num_classes if num_classes >= 1 else None
    # (-1 asks for as many as are met)
    return num_classes if torch_private.is_certain(num_classes >= 1) else world.unknown_count()


def sizes_of_new(args: tuple) -> tuple | None:
    """Of ``tensor.new(2, 3)``; None where it is given values. (A graph has a Size as a tuple, which new takes for
    these.)"""
    if len(args) == 1 and is_kind(args[0], torch.Size):
        return tuple(args[0])
    return (args or (0,)) if all(type(arg) in (int, torch.SymInt) for arg in args) else None
