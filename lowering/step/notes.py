"""Where a step notes which sides of its branches it has come to: what is written there waits for the graph's end."""

from __future__ import annotations

from typing import Any


def new_notes() -> dict[int, tuple[Any, ...]]:
    return {}


def note_side(notes: dict[int, tuple[Any, ...]], number: int, *values: Any) -> None:
    """The side of this number was come to. values: of its graph, for what is written there."""
    notes[number] = values
