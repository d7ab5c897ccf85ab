"""What a training script of the gallery is: a step as people write it, its batches, and what it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 50
BATCH, SHORT = 8, 3  # rows; the last batch has fewer


@dataclass
class Script:
    """step: called with each batch's items. batches: one tuple a step, the last one short. trained: modules (tensors,
    optimizers) that are compared after training. experts: loops over experts in a step."""

    step: Callable[..., Any]
    batches: list[tuple]
    trained: list[Any]
    experts: int = 0

    def state(self) -> list[torch.Tensor]:
        """Copies of all that the script trains."""
        return [t.detach().clone() for one in self.trained for t in tensors_of(one)]


def tensors_of(trained: Any) -> list[torch.Tensor]:
    """Of a module, a tensor, or an optimizer: what it trains with."""
    if isinstance(trained, torch.optim.Optimizer):
        kept = [value for entry in trained.state_dict()["state"].values() for value in entry.values()]
        return [value for value in kept if isinstance(value, torch.Tensor)]
    return [trained] if isinstance(trained, torch.Tensor) else [*trained.parameters(), *trained.buffers()]


SCRIPTS: dict[str, tuple[str, Callable[[], Script]]] = {}  # name -> family, builder


def script(family: str) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Adds a builder to the gallery."""

    def add(build: Callable[[], Script]) -> Callable[[], Script]:
        SCRIPTS[build.__name__] = family, build
        return build

    return add


def rows(number: int, steps: int = STEPS) -> int:
    """How many rows batch ``number`` has."""
    return SHORT if number == steps - 1 else BATCH


def vectors(*widths: int, steps: int = STEPS) -> list[tuple]:
    """Batches of real numbers, (rows, width) each."""
    return [tuple(torch.randn(rows(i, steps), w) for w in widths) for i in range(steps)]


def labelled(width: int, classes: int, steps: int = STEPS) -> list[tuple]:
    """Batches of vectors with a class each."""
    return [(torch.randn(rows(i, steps), width), torch.randint(classes, (rows(i, steps),))) for i in range(steps)]


def texts(length: int = 12, words: int = 40, steps: int = STEPS) -> list[tuple]:
    """Batches of tokens and the tokens that come next."""
    found = []
    for i in range(steps):
        tokens = torch.randint(words, (rows(i, steps), length + 1))
        found.append((tokens[:, :-1], tokens[:, 1:]))
    return found


def images(channels: int = 1, size: int = 8, classes: int = 10, steps: int = STEPS) -> list[tuple]:
    """Batches of images with a class each."""
    shapes = [(rows(i, steps), channels, size, size) for i in range(steps)]
    return [(torch.randn(s), torch.randint(classes, s[:1])) for s in shapes]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
