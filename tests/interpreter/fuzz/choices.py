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
    """Decisions that hypothesis draws, a few out of each number: the draw is what costs."""

    ROOM = 1 << 24  # hypothesis draws evenly from a range up to this; from a wider one mostly small numbers

    def __init__(self, draw: Callable[[Any], Any], integers: Callable[[int, int], Any]) -> None:
        self.draw, self.numbers = draw, integers(0, self.ROOM - 1)
        self.value, self.room = 0, 1

    def below(self, n: int) -> int:
        if n > self.room:
            self.value, self.room = int(self.draw(self.numbers)), self.ROOM
        self.value, found = divmod(self.value, n)
        self.room //= n
        return found


def pick(choices: Choices, options: Sequence[T]) -> T:
    return options[choices.below(len(options))]
