"""0.0 that becomes -0.0 where a step reads it: ``==`` calls them equal, a program can tell them apart."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moebius import capture

MODEL = nn.Linear(1, 1)


def put_first(held: Any, zero: float) -> None:
    held[0] = zero


def first(held: Any) -> float:
    return next(iter(held))


PLACES: dict[str, tuple[Any, Callable[[Any, float], None], Callable[[Any], float]]] = {
    "under a module": ({}, lambda held, zero: held.update({MODEL: zero}), lambda held: held[MODEL]),
    "a complex one": ({}, lambda held, zero: held.update({MODEL: complex(1, zero)}), lambda held: held[MODEL].imag),
    "in a list": ([0.0], put_first, first),
    "in a deque": (collections.deque([0.0]), put_first, first),
}


@pytest.mark.parametrize("place", PLACES)
def test_another_sign_of_zero_is_met(place: str):
    held, put, read = PLACES[place]
    step = capture(lambda x: x + math.copysign(1.0, read(held)), backend="eager", fullgraph=True)
    for zero in (0.0, 0.0, -0.0, float("0.0"), float("-0.0")):
        put(held, zero)
        assert step(torch.ones(1)).item() == 1.0 + math.copysign(1.0, zero)
