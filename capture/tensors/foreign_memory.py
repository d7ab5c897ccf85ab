"""Memory that is not an input's own: numpy's, or that of the ranks of a mesh. What the step writes there."""

from __future__ import annotations

from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.values import Break
from .fakes import fake_of


def owns_memory(tensor: torch.Tensor) -> bool:
    """A guard: no array of numpy's lies where the tensor does. (torch may resize what is its own.)"""
    return tensor.device.type != "cpu" or tensor.untyped_storage().resizable()


class ForeignMemory:
    """Inputs over memory that numpy may own, or that lies on the ranks. written: whether the step wrote into one.
    arrays: whether it has any. on_ranks: of those that a graph has a gathered copy of, or a part."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.on_ranks: set[int] = set()
        self.written = self.arrays = False

    def look(self, real: Any, fake: Any) -> None:
        """At a new input."""
        plain = is_kind(real, torch.Tensor) and is_kind(fake, torch.Tensor) and real.layout is torch.strided
        if plain and not owns_memory(real):
            self.storages.add(torch_private.storage_of(fake))

    def lies_on_ranks(self, fake: torch.Tensor) -> None:
        """At a new input that does."""
        self.storages.add(torch_private.storage_of(fake))
        self.on_ranks.add(torch_private.storage_of(fake))

    def versions(self, values: Any) -> list[tuple[torch.Tensor, int]]:
        """Of the operands that lie there, before an operator runs on their fakes."""
        if not self.storages:
            return []
        leaves = (leaf for leaf in torch_private.tree_leaves(fake_of(values)) if is_kind(leaf, torch.Tensor))
        lying = [leaf for leaf in leaves if torch_private.storage_of(leaf) in self.storages]
        return [(leaf, torch_private.version_of(leaf)) for leaf in lying if not leaf.is_inference()]

    def refuse_writes(self, before: list[tuple[torch.Tensor, int]]) -> None:
        """After it: a graph break where it wrote into an array's memory, or into what lies on the ranks."""
        written = [leaf for leaf, version in before if torch_private.version_of(leaf) != version]
        if any(torch_private.storage_of(leaf) in self.on_ranks for leaf in written):
            raise Break("write into experts on other ranks", "each rank writes into its own part", "it runs natively")
        if written:
            self.written = True
            if self.arrays:
                hint = "clone the tensor before it is written, or the array before the step"
                raise Break("write into a numpy array's memory", "which the graph has as an input", hint)
