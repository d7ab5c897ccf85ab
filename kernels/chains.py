"""Operators element by element, run in C on blocks of elements: each tensor is read and written once, however many
operators there are, and nothing is allocated.

The result has the bits of torch's operators, one after the other. Whether a processor's vectors round a product before
it is added is torch's compiler's choice: for each operator it is found out once, on numbers of all sizes, in which of
the two ways torch does it; one that C does in neither way is torch's.
"""
from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebius.kernels.native import panel_work

# In the order of chain.c's Operator: what torch computes, of tensors a, b, c and a number s.
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b, c, s: torch.add(a, b, alpha=s),
    "add_number": lambda a, b, c, s: torch.add(a, s),
    "mul": lambda a, b, c, s: torch.mul(a, b),
    "mul_number": lambda a, b, c, s: torch.mul(a, s),
    "div": lambda a, b, c, s: torch.div(a, b),
    "div_number": lambda a, b, c, s: torch.div(a, s),
    "sqrt": lambda a, b, c, s: torch.sqrt(a),
    "lerp": lambda a, b, c, s: torch.lerp(a, b, s),
    "addcmul": lambda a, b, c, s: torch.addcmul(a, b, c, value=s),
    "addcdiv": lambda a, b, c, s: torch.addcdiv(a, b, c, value=s),
}
NUMBERS = {name: place for place, name in enumerate(OPERATORS)}
TENSORS, TEMPORARIES, MOST_NUMBERS = 12, 4, 256  # the most that chain.c has room for
KINDS = (Tensor, torch.nn.Parameter, torch.float32, torch.strided, np.float64)  # chain.c's, of what it reads
STEP = struct.Struct("7i")  # chain.c's Step


@dataclass(frozen=True)
class Step:
    """``out = operator(*operands, number)``. out, operands: registers; those of the tensors come first. number: its
    place among the chain's numbers, -1 for none."""

    operator: str
    out: int
    operands: tuple[int, ...]
    number: int = -1


@dataclass(frozen=True)
class Chain:
    """Steps on so many tensors of one size, with so many numbers. Registers from ``tensors`` on are temporaries."""

    steps: tuple[Step, ...]
    tensors: int
    numbers: int

    def run(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> bool:
        """Do all steps, in place; or nothing, and return False, where C does not do them or it would show.

        inputs: the tensors, of one shape, then a number for each None among ``numbers``. C takes contiguous float32
        tensors on a CPU that are the same memory or share none, outside of autograd. Their versions count each write,
        as torch's operators do.
        """
        steps = self.encoded
        if steps is None or torch.is_grad_enabled():
            return False
        assert panel_work.rows is not None
        threads = torch.get_num_threads()
        if not panel_work.rows.chain(steps, self.tensors, tuple(inputs), tuple(numbers), KINDS, threads):
            return False
        torch.autograd.graph.increment_version([inputs[out] for out in self.written])
        return True

    @functools.cached_property
    def encoded(self) -> bytes | None:
        """The steps as C has them; None where it cannot do one of them."""
        return encoded(self)

    @functools.cached_property
    def written(self) -> list[int]:
        """The tensor of each write."""
        return [step.out for step in self.steps if step.out < self.tensors]


@functools.cache
def encoded(chain: Chain) -> bytes | None:
    if panel_work.rows is None or not 0 < chain.tensors <= TENSORS or chain.numbers > MOST_NUMBERS:
        return None
    found = b""
    for step in chain.steps:
        way = way_of(step.operator)
        if way is None:
            return None
        operands = (*step.operands, 0, 0)[:3]
        found += STEP.pack(NUMBERS[step.operator], step.out, *operands, step.number % (chain.numbers + 1), way)
    return found


@functools.cache
def way_of(operator: str) -> int | None:
    """0 where torch rounds a product before it adds it, 1 where it does not, None where C has neither. Of a root: 1
    where it is MKL's."""
    a, b, c = trial_numbers()
    assert panel_work.rows is not None
    for way in (0, 1) if operator != "sqrt" or panel_work.rows.ROOTS else (0,):
        if all(agrees(operator, way, s, a, b, c) for s in (0.1, 0.9, -3e-4, 1.0)):
            return way
    return None


def agrees(operator: str, way: int, s: float, a: Tensor, b: Tensor, c: Tensor) -> bool:
    """Whether C's bits are torch's. A NaN is a NaN."""
    found, expected = a.clone(), OPERATORS[operator](a, b, c, s)
    assert panel_work.rows is not None
    step = STEP.pack(NUMBERS[operator], 0, 1, 2, 3, 0, way)
    if not panel_work.rows.chain(step, 4, (found, a, b, c), (s,), KINDS, torch.get_num_threads()):
        return False
    same = found.view(torch.int32) == expected.view(torch.int32)
    return bool((same | (found.isnan() & expected.isnan())).all())


def trial_numbers() -> list[Tensor]:
    """Three vectors of numbers of all sizes, signed zeros, infinities and NaN among them. 31 ordinary numbers are left
    behind the last whole vector of whatever width, where torch may have other code."""
    generator = torch.Generator("cpu").manual_seed(0)
    near, far = (torch.randn(3, size, generator=generator, dtype=torch.float32, device="cpu") for size in (2054, 2048))
    far *= 2.0 ** torch.randint(-140, 120, (3, 2048), generator=generator, dtype=torch.float32, device="cpu")
    corners = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3e38]
    every = [torch.tensor(corners, dtype=torch.float32, device="cpu")] * 3
    return list(torch.cat([far, torch.cartesian_prod(*every).T, near], 1).contiguous())
