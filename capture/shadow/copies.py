"""A call's world a second time: its function and arguments with everything that they reach, as copies."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..heap.records import contents_of
from ..hook import ABSENT
from ..python.reach import code_names
from ..torch_facts import torch_private

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "moebius", "transformers", "numpy", "triton"))
SHARED = (types.ModuleType, type, types.BuiltinFunctionType, types.CodeType)


@dataclass
class Copies:
    """The copies of one call. ``pairs``: (name, original, copy) of each root, to be compared after both have run."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    pairs: list[tuple[str, Any, Any]] = field(default_factory=list)


def copy_call(function: types.FunctionType, args: tuple, kwargs: dict[str, Any]) -> Copies:
    """Copies of the function (its cells, and the globals that it names) and of its arguments, aliases kept.

    Classes and library modules are shared with the original. Raises what ``copy.deepcopy`` raises.
    """
    memo: dict[int, Any] = {}
    for value in torch_private.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and not value.is_leaf:  # deepcopy refuses these
            memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    maker = FunctionCopies(memo)
    twin = maker.copy(function)
    new_args, new_kwargs = copy.deepcopy((args, kwargs), memo)
    pairs = [("args", args, new_args), ("kwargs", kwargs, new_kwargs), *maker.pairs]
    for original in list(memo.get(id(memo), ())):
        if isinstance(original, torch.Tensor) and original.is_leaf and original.grad is not None:
            memo[id(original)].grad = copy.deepcopy(original.grad, memo)  # a Parameter's copy has none
        elif isinstance(original, torch.optim.Optimizer):
            copy_hooks(original, memo[id(original)], memo)
    return Copies(twin, new_args, new_kwargs, pairs)


def copy_hooks(original: torch.optim.Optimizer, twin: torch.optim.Optimizer, memo: dict[int, Any]) -> None:
    """An optimizer's copy has its state and groups alone. (Its ``step``, which a scheduler has wrapped around the
    original, is rightly gone.)"""
    for name, value in vars(original).items():
        if name.endswith("_hooks"):
            setattr(twin, name, copy.deepcopy(value, memo))


class FunctionCopies:
    """Functions of the user's over copied cells and globals; deepcopy itself takes a function for constant."""

    def __init__(self, memo: dict[int, Any]):
        self.memo, self.pairs = memo, []  # type: ignore[var-annotated]
        self.namespaces: dict[int, dict[str, Any]] = {}

    def copy(self, function: types.FunctionType) -> types.FunctionType:
        if id(function) in self.memo:
            return self.memo[id(function)]
        globals_ = function.__globals__
        namespace = self.namespaces.setdefault(id(globals_), dict(globals_))
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        twin = types.FunctionType(
            function.__code__, namespace, function.__name__, function.__defaults__, cells if cells else None
        )
        twin.__kwdefaults__, twin.__qualname__ = function.__kwdefaults__, function.__qualname__
        twin.__module__ = function.__module__
        twin.__dict__.update(function.__dict__)
        self.memo[id(function)] = twin
        self.memo.setdefault(id(self.memo), []).append(function)
        for name in code_names(function.__code__):
            if name in globals_:
                namespace[name] = self.value(f"global {name}", globals_[name])
        for free, old, new in zip(function.__code__.co_freevars, function.__closure__ or (), cells, strict=True):
            if id(old) in self.memo:  # a cell that two functions share: by contents only, each has its own
                new.cell_contents = self.memo[id(old)]
            elif (contents := contents_of(old)) is not ABSENT:
                new.cell_contents = self.memo[id(old)] = self.value(f"closure {free}", contents)
        if function.__defaults__:
            twin.__defaults__ = self.value("defaults", function.__defaults__)
        if function.__kwdefaults__:
            twin.__kwdefaults__ = self.value("keyword defaults", function.__kwdefaults__)
        return twin

    def value(self, name: str, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return value if library(value) else self.copy(value)
        if isinstance(value, SHARED) or value is None or isinstance(value, int | float | str | bytes):
            return value
        twin = copy.deepcopy(value, self.memo)
        if twin is not value:
            self.pairs.append((name, value, twin))
        return twin


def library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] in LIBRARIES


class RandomState:
    """Python's and torch's random state, of all devices, to be put back."""

    def __init__(self) -> None:
        self.python, self.cpu = random.getstate(), torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)

    def differs(self, other: RandomState) -> bool:
        """Whether more or fewer random numbers were drawn (on the CPU)."""
        return self.python != other.python or not torch.equal(self.cpu, other.cpu)
