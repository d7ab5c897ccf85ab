"""Nodes for lists that hold an item on a condition only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def how_many(asked: Sequence[tuple[Any, bool]]) -> int:
    """How many items are there: those of which the condition (a number or a tensor of one element) has this truth."""
    return sum(bool(condition) is taken_if for condition, taken_if in asked)


def cat_present(items: Sequence[torch.Tensor], asked: Sequence[tuple[Any, bool]]) -> torch.Tensor:
    """``torch.cat`` of the items that are there. Raises torch's error where none is."""
    return torch.cat(present(items, asked))


def present(items: Sequence[Any], asked: Sequence[tuple[Any, bool]]) -> list:
    """The items that are there."""
    pairs = zip(items, asked, strict=True)
    return [item for item, (condition, taken_if) in pairs if bool(condition) is taken_if]


def no_rows(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[0, *sizes]: stands for an item that is not there."""
    return torch.empty((0, *sizes), dtype=dtype, device=device)


fx.wrap("how_many")
fx.wrap("cat_present")
fx.wrap("no_rows")


def end_of(items: Any, size: int, *added: Any) -> list[Any]:
    """The last items of a list or deque that a step adds to, and what it has added."""
    held = items[-size:] if isinstance(items, list) else items
    return [*held, *added][-size:]
