"""A number that a step draws from Python's own generator, where the program draws it."""

from __future__ import annotations

import random

of_the_module = random.random


def draw() -> float:
    """``random.random()``."""
    return of_the_module()
