"""What a step does to a generator of random numbers: its seed and its state, where the program reads and sets them.

generator: a ``torch.Generator``; state: uint8, its whole state, as ``get_state()`` gives it.
"""

from __future__ import annotations

import torch


def make_generator(device: torch.device) -> torch.Generator:
    """``torch.Generator(device)``."""
    return torch.Generator(device)


def seed_generator(generator: torch.Generator, seed: int) -> None:
    """``generator.manual_seed(seed)``."""
    generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """``torch.manual_seed(seed)``: the generators of all devices."""
    torch.manual_seed(seed)


def state_of(generator: torch.Generator) -> torch.Tensor:
    """``generator.get_state()``: uint8, new memory."""
    return generator.get_state()


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """``generator.set_state(state)``."""
    generator.set_state(state)
