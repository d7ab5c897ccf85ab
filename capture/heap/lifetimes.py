"""What may die while the captured function lives: a model, optimizer or tensor whose name is given to another one.

The global, closure cell or dict item that names it is walked at each call, as the way from an argument is, and what was
captured refers to the object weakly: when it dies, its captures go too. What hangs from a model goes with it, and is
watched where it is: a call costs no more for each module in the model.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ..guards.recorder import can_die
from ..values.values import ATOMS
from .identities import is_bare
from .records import Record, raw_dict
from .store import Store


class Lifetimes(Store):
    """Part of ``Objects``. hanging: ids of models and optimizers, and of what was reached from one of them.
    namespaces: ids of the dicts of globals."""

    def by_its_way(self, record: Record, value: Any) -> bool:
        """Whether an entry of a dict that is always the same one is walked to at each call."""
        if id(record.obj) in self.hanging:
            return False
        if issubclass(type(value), torch.Tensor):
            return id(record.obj) in self.namespaces
        return named(value)

    def hangs(self, parent: Any, child: Any) -> None:
        """``child`` was read in ``parent``."""
        if id(parent) in self.hanging and type(child) not in ATOMS:
            self.hanging.add(id(child))

    def lives_by_itself(self, value: Any) -> None:
        """A model or optimizer was met."""
        if can_die(value):
            self.hanging.add(id(value))
            if (namespace := raw_dict(value)) is not None:
                self.hanging.add(id(namespace))


def named(value: Any) -> bool:
    """Whether it is a model or optimizer: not a criterion, which each call may make anew, nor a class or function."""
    return not issubclass(type(value), type | types.FunctionType) and can_die(value) and not is_bare(value)
