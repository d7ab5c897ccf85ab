"""Where the generator's decisions come from: hypothesis (which shrinks), or a seed (which is fast and steady)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Choices(Protocol):
    """Decides: `below(n)` is an integer from 0 to n - 1. Shrinking goes to 0, so options start with the simplest."""

    def below(self, n: int) -> int: ...


class SeededChoices:
    """The same decisions for the same seed, on every Python and hypothesis version."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def below(self, n: int) -> int:
        return int(self.random.random() * n)


class DrawnChoices:
    """Decisions that hypothesis draws."""

    def __init__(self, draw: Callable[[Any], Any], integers: Callable[[int, int], Any]) -> None:
        self.draw, self.integers = draw, integers
        self.ranges: dict[int, Any] = {}

    def below(self, n: int) -> int:
        if n <= 1:
            return 0
        strategy = self.ranges.get(n)
        if strategy is None:
            strategy = self.ranges[n] = self.integers(0, n - 1)
        return int(self.draw(strategy))


def pick(choices: Choices, options: Sequence[T]) -> T:
    return options[choices.below(len(options))]
