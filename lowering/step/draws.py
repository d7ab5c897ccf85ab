"""Numbers that a step draws from Python's own generator, or numpy's, where the program draws them."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

of_the_module = random.random
below_of_the_module = random.randrange


def draw() -> float:
    """``random.random()``."""
    return of_the_module()


def draw_below(count: int) -> int:
    """``random.randrange(count)``."""
    return below_of_the_module(count)


def draw_numpy(name: str, *args: Any) -> Any:
    """``numpy.random.name(*args)``, one number."""
    return getattr(sys.modules["numpy.random"], name)(*args)


def draw_array(name: str, *args: Any) -> torch.Tensor:
    """``numpy.random.name(*args)``, an array, as the tensor over its memory. Tensors among the arguments are arrays."""
    given = [value.numpy() if isinstance(value, torch.Tensor) else value for value in args]
    return torch.from_numpy(draw_numpy(name, *given))
