"""What an exported step knew of the world that it was captured in, sorted: arguments of the call, state, and the rest.

A place is an entry of a dictionary or the contents of a cell, named by its owner and key. Objects whose identity was
guarded (the model, the optimizer) do not exist where the file is loaded: what the step reads of them is either frozen
into the graph, or a tensor, or a place in the state.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ExportError
from ..guards.program import CompiledGuards
from .values import encode

Place = tuple[int, Any]  # id of the owner, key
FILLED = ("dict_item", "list_item", "tuple_item", "cell", "attr")


@dataclass(frozen=True)
class Open:
    """A part of an argument that the loaded step takes: its number, and the way from it."""

    argument: int
    path: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Frozen:
    """An object of the capture's world. places: the places on the way to it, the last one its own."""

    obj: Any = field(repr=False)
    places: tuple[Place, ...] = ()


def part_of(owner: Any, operation: str, key: Any) -> Any:
    """That part of an object. Raises LookupError or AttributeError where it has none."""
    match operation:
        case "dict_item":
            return dict.__getitem__(owner, key)
        case "list_item":
            return list.__getitem__(owner, key)
        case "tuple_item":
            return tuple.__getitem__(owner, key)
        case "instance_dict":
            return object.__getattribute__(owner, "__dict__")
        case "attr":
            return getattr(owner, key)
        case "cell":
            return owner.cell_contents
        case "type":
            return type(owner)
    raise LookupError(operation)


def part(whole: Open | Frozen, operation: str, key: Any = None) -> Open | Frozen:
    """A part of an argument or of a frozen object."""
    if isinstance(whole, Open):
        return Open(whole.argument, (*whole.path, (operation, key)))
    place = (id(whole.obj), "cell_contents" if operation == "cell" else key)
    places = (*whole.places, place) if operation in FILLED else whole.places
    return Frozen(part_of(whole.obj, operation, key), places)


class World:
    """guards: the segment's. names: those of its arguments, in order."""

    def __init__(self, guards: CompiledGuards, names: tuple[str, ...]):
        self.guards, self.names, self.facts = guards, names, guards.facts
        self.bound = dict(self.bound_arguments())
        self.resolved: dict[int, Open | Frozen | None] = {}
        self.container_names = {id(d): record.source for d, record in self.watched()}
        self.keep: list[Any] = []  # owners of places: their ids stand for them

    def hold(self, owner: Any) -> None:
        self.keep.append(owner)

    def held(self, number: int) -> Any:
        """The owner with this id, None if nobody has held it."""
        return next((owner for owner in self.keep if id(owner) == number), None)

    def name_of(self, owner: Any) -> str:
        return self.container_names.get(id(owner)) or f"a {type(owner).__name__}"

    def bound_arguments(self) -> Iterator[tuple[int, Any]]:
        """Arguments that are the same object at each call: the loaded step does not take them."""
        for fact in self.facts:
            kind, *rest = fact.check
            if kind in ("is", "is_weak") and self.guards.slots[rest[0]][0] == "arg":
                obj = rest[1]() if kind == "is_weak" else rest[1]
                if obj is None and kind == "is_weak":
                    raise ExportError(f"{fact.record.source} is gone; export a step while its model is alive")
                if not isinstance(obj, torch.Tensor):
                    yield self.guards.slots[rest[0]][1], obj

    def watched(self) -> Iterator[tuple[dict, Any]]:
        for fact in self.facts:
            if fact.check[0] == "dict":
                yield fact.check[1], fact.record

    @property
    def open(self) -> list[int]:
        """The arguments that the loaded step takes."""
        return [i for i in range(len(self.names)) if i not in self.bound]

    def argument(self, index: int) -> Open | Frozen:
        return Frozen(self.bound[index]) if index in self.bound else Open(index)

    def slot(self, index: int) -> Open | Frozen | None:
        """What a slot of the guard program leads to; None for what cannot be said."""
        if index not in self.resolved:
            operation, *operands = self.guards.slots[index]
            found: Open | Frozen | None
            if operation == "const":
                found = Frozen(operands[0])
            elif operation == "weak":
                found = Frozen(operands[0]() if callable(operands[0]) else operands[0])
            elif operation == "arg":
                found = self.argument(operands[0])
            else:
                owner = self.slot(operands[0])
                try:
                    found = None if owner is None else part(owner, operation, *operands[1:])
                except (LookupError, AttributeError, ValueError, TypeError):
                    found = None
            self.resolved[index] = found
        return self.resolved[index]


class State:
    """The tensors and the places that make up a step's state, under names that people know them by."""

    def __init__(self, world: World):
        self.world = world
        self.given: dict[int, str] = {}  # id of a tensor -> how people call it
        self.tensors: dict[str, torch.Tensor] = {}
        self.tensor_names: dict[int, str] = {}
        self.fixed: dict[str, None] = {}  # tensors that are the same at each call, in order
        self.cells: dict[Place, str] = {}
        self.values: dict[str, Any] = {}
        self.gradients: dict[str, None] = {}
        self.taken: set[str] = set()
        for index, obj in world.bound.items():
            self.look_through(world.names[index], obj)

    def has_gradient(self, name: str) -> None:
        self.gradients.setdefault(name)

    def look_through(self, name: str, obj: Any) -> None:
        """Names for the tensors of models and optimizers. Models first: optimizers hold their parameters."""
        if isinstance(obj, torch.nn.Module):
            for part_name, tensor in (*obj.named_parameters(), *obj.named_buffers()):
                self.given.setdefault(id(tensor), f"{name}.{part_name}")
        for value in vars(obj).values() if hasattr(obj, "__dict__") else ():
            if isinstance(value, torch.nn.Module | torch.optim.Optimizer) and not isinstance(obj, torch.nn.Module):
                self.look_through(name, value)
        if isinstance(obj, torch.optim.Optimizer):
            for parameter, entries in obj.state.items():
                owner = self.given.get(id(parameter), "parameter")
                for key, tensor in entries.items() if isinstance(entries, dict) else ():
                    if isinstance(tensor, torch.Tensor):
                        self.given.setdefault(id(tensor), f"{name}.state.{owner}.{key}")

    def unique(self, name: str) -> str:
        found = name if name not in self.taken else next(
            f"{name}#{i}" for i in range(2, len(self.taken) + 3) if f"{name}#{i}" not in self.taken
        )  # fmt: skip
        self.taken.add(found)
        return found

    def tensor(self, tensor: torch.Tensor, hint: str) -> str:
        """The name under which the file holds a tensor."""
        name = self.tensor_names.get(id(tensor))
        if name is None:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise ExportError(f"{hint} is a {type(tensor).__name__}; a file holds plain tensors and parameters")
            if not tensor.is_leaf:
                raise ExportError(f"{hint} is the result of a computation that autograd still knows; detach it")
            name = self.tensor_names[id(tensor)] = self.unique(self.given.get(id(tensor), hint))
            self.tensors[name] = tensor
        return name

    def fix(self, tensor: torch.Tensor, hint: str) -> str:
        """The same for a tensor that is the same object at each call."""
        name = self.tensor(tensor, hint)
        self.fixed.setdefault(name)
        return name

    def cell(self, place: Place, owner: Any, value: Any, hint: str | None = None) -> str:
        """The name of a place in the state. Its value is what is there now."""
        name = self.cells.get(place)
        if name is None:
            container = self.world.container_names.get(place[0]) or self.name_of_owner(owner)
            key = place[1]
            if hint is not None or isinstance(owner, types.CellType):
                shown = hint or container
            elif container.endswith(".__dict__"):
                shown = f"{container.removesuffix('.__dict__')}.{key}"
            else:
                shown = f"{container}[{key!r}]"
            shown = re.sub(r"^L\['(\w+)'\]", r"\1", shown if isinstance(key, str | int) else container)
            name = self.cells[place] = self.unique(shown)
            self.world.hold(owner)
            if isinstance(value, torch.Tensor):
                self.values[name] = {"tensor": self.tensor(value, f"{name} (tensor)")}
            else:
                try:
                    self.values[name] = {"value": encode(value)}
                except ExportError:
                    raise ExportError(
                        f"the step reads or sets {name}, a {type(value).__name__}: a file's state is tensors, numbers, "
                        "strings and lists of them; keep such objects out of the step"
                    ) from None
        return name

    def name_of_owner(self, owner: Any) -> str:
        for index, obj in self.world.bound.items():
            if getattr(obj, "__dict__", None) is owner:
                return f"{self.world.names[index]}.__dict__"
        return f"a {type(owner).__name__}"
