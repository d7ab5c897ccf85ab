"""The items of a set stand in the order that plain Python gives them, before and after a step that changes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_python import compare

OPERATIONS = (
    "add",
    "discard",
    "update",
    "update with a list",
    "|=",
    "-=",
    "&=",
    "clear",
    "pop",
    "remove",
    "two at once",
)


class Holder:
    pass


def program(seed: int) -> Callable[[], Any]:
    """A few operations on a set of small ints, many of which collide in its hash table."""
    rng = random.Random(seed)
    operations = [
        (rng.choice(OPERATIONS), [rng.randint(0, 40) for _ in range(rng.randint(1, 12))])
        for _ in range(rng.randint(1, 5))
    ]
    start = [rng.randint(0, 40) for _ in range(rng.randint(0, 9))]

    def recipe() -> Any:
        holder: Any = Holder()
        holder.items, holder.others = set(start), {1, 9, 17}

        def step(x: torch.Tensor) -> torch.Tensor:
            items = holder.items
            for name, values in operations:
                if name == "add":
                    items.add(values[0])
                elif name == "discard":
                    items.discard(values[0])
                elif name == "update":
                    items.update(set(values))
                elif name == "update with a list":
                    items.update(values)
                elif name == "|=":
                    items |= holder.others
                elif name == "-=":
                    items -= set(values)
                elif name == "&=":
                    items &= set(range(30))
                elif name == "clear" and len(values) < 3:
                    items.clear()
                elif name == "pop" and items:
                    holder.popped = items.pop()
                elif name == "remove" and values[0] in items:
                    items.remove(values[0])
                elif name == "two":
                    items.update(values, [x.shape[0]])
            holder.order = list(items)
            holder.made = {v for _, values in operations for v in values} | items
            return x * len(items)

        return step, [holder]

    return recipe


@pytest.mark.parametrize("seed", range(16))
def test_generated_changes(seed: int) -> None:
    compare(program(seed))


def test_pop_of_a_set_from_outside_is_native() -> None:
    """It takes the item where the last one left off, which nothing shows."""

    def recipe() -> Any:
        holder: Any = Holder()
        holder.items, holder.taken = {1, 2, 3}, []

        def step(x: torch.Tensor) -> torch.Tensor:
            holder.taken.append(holder.items.pop())
            holder.items.add(len(holder.taken) - 1)
            return x * holder.taken[-1]

        return step, [holder]

    assert compare(recipe).breaks
