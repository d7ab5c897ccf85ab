"""What is known by its parts, wherever it is found: tuples, slices, bound methods, inner functions made anew."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.recorder import describe
from ..guards.sources import Source, Static, part
from ..values.opaque_tensor import UnfollowedTensor
from ..values.values import ATOMS, RuntimeNumber
from .identities import HasItems, Identities, SameItems
from .records import MetTuple, Record, raw_items


class Compounds(Identities):
    """Part of ``Objects``. slices: by id of the slice that was found, what stands for it. tuples: by id of the tuple,
    and of what stands for it."""

    def enter_closure(self, function: types.FunctionType, source: Source) -> None:
        """An inner function, made anew by each call: the same code over other cells."""
        self.guards.check("type", source, types.FunctionType, text="is a function")  # before an attribute is asked for
        for name in ("__code__", "__globals__"):
            value = getattr(function, name)
            self.guards.check("is", part(source, "attr", name), value, text=f"is {describe(value)}")
        place, in_order = part(source, "attr", "__defaults__"), function.__defaults__
        if in_order is None:
            self.guards.check("equal", place, None, text="is None")
        else:
            self.guards.check("type", place, tuple, text="is a tuple")
            self.guards.check("length", place, len(in_order), text=f"has {len(in_order)} items")
            self.same_defaults((value, part(place, "tuple_item", i)) for i, value in enumerate(in_order))
        place, defaults = part(source, "attr", "__kwdefaults__"), function.__kwdefaults__
        if defaults is None:
            self.guards.check("equal", place, None, text="is None")
        else:  # a dict that anybody can change
            self.guards.check("keys", place, tuple(defaults), text=f"keys are {list(defaults)}"[:80])
            self.same_defaults((value, part(place, "dict_item", name)) for name, value in defaults.items())
        cells = part(source, "attr", "__closure__")
        for i, cell in enumerate(function.__closure__ or ()):
            place = part(cells, "tuple_item", i)
            self.found(cell, place)

    def same_defaults(self, defaults: Iterable[tuple[Any, Source]]) -> None:
        """Each is what it was. (Tensors and tuples are looked at where the function is called.)"""
        for value, place in defaults:
            if type(value) in ATOMS:
                self.guards.equals(place, value)
            elif type(value) is not tuple and not issubclass(type(value), torch.Tensor):
                self.guards.check("is", place, value, text=f"is {describe(value)}")

    def enter_method(self, method: types.MethodType, source: Source) -> None:
        """A bound method is its function and its object."""
        if not source.static:
            self.guards.check("type", source, types.MethodType, text="is a bound method")
        for name in ("__func__", "__self__"):
            inner = getattr(method, name)
            self.enter(inner, Static(f"{source.name}.{name}", inner) if source.static else part(source, "attr", name))

    def enter_builtin(self, method: Any, source: Source) -> Any:
        """``some_list.append``, half of a call that a graph break split: the name and the object. Gives the object."""
        self.guards.check("type", source, type(method), text=f"type is {type(method).__qualname__}")
        self.guards.equals(part(source, "attr", "__name__"), method.__name__)
        owner, place = method.__self__, part(source, "attr", "__self__")
        if type(owner) in ATOMS:  # what is called is its method, and not that of a number that changes
            self.guards.equals(place, owner)
            return owner
        return self.enter(owner, place)

    def enter_items(self, value: frozenset, source: Source) -> frozenset:
        """The objects in a frozenset: those that it has, not equal ones."""
        objects = [item for item in value if type(item) not in ATOMS and not issubclass(type(item), tuple | frozenset)]
        if objects and not source.static:
            self.guards.holds(source.name, "has these very objects", HasItems(tuple(objects)), source)
        for item in objects:
            self.enter(item, Static(f"an item of {source.name}", item))
        return value

    def enter_tuple(self, value: Any, source: Source) -> Any:
        items = raw_items(value)
        if type(value) is frozenset and any(is_kind(item, torch.Tensor) for item in value):
            hint = "keep them in a list or a dict"
            raise UnfollowedTensor("frozenset of tensors", f"{source.name} holds tensors, in no order of theirs", hint)
        if not source.static:
            self.guards.check("type", source, type(value), text=f"type is {type(value).__qualname__}")
            if type(value) is frozenset:
                self.guards.equals(source, value)
                if len(value) > 1:  # equal ones may have been made in another order, and give their items in another
                    self.guards.holds(source.name, "its items stand in this order", SameItems(tuple(value)), source)
                return self.enter_items(value, source)
            self.guards.check("length", source, len(items), text=f"has {len(items)} items")
        elif type(value) is frozenset:
            return self.enter_items(value, source)
        entered = [
            self.enter(x, Static(f"{source.name}[{i}]", x) if source.static else part(source, "tuple_item", i))
            for i, x in enumerate(items)
        ]
        met = self.tuples.get(id(value))
        if met is not None and all(a is b for a, b in zip(entered, raw_items(met.entered), strict=True)):
            met.places.append(source)
            return met.entered
        found: Any
        if all(a is b for a, b in zip(entered, items, strict=True)):
            found = value
            if type(value) is not tuple:
                self.records.setdefault(id(value), Record(value, source))
        elif type(value) is tuple:
            found = tuple(entered)
        elif type(value) is torch.Size:  # (it holds sizes of the graph, and no other numbers: 0 and 1 are such)
            found = torch.Size([x.numbers.constant(x) if is_kind(x, RuntimeNumber) else x for x in entered])  # type: ignore[attr-defined]
        elif hasattr(type(value), "n_sequence_fields"):  # C's named tuples have a constructor of their own
            found = type(value)(entered)
        else:
            found = tuple.__new__(type(value), entered)
        if found is not value:
            self.made(found)
        self.tuples[id(value)] = self.tuples[id(found)] = MetTuple(value, found, [source])
        return found

    def enter_slice(self, value: slice, source: Source) -> slice:
        """A slice is known by its parts. What is met again is the slice that stands for it."""
        if not source.static:
            self.guards.check("type", source, slice, text="is a slice")
        parts = [
            self.enter(x, Static(f"{source.name}.{name}", x) if source.static else part(source, "attr", name))
            for name, x in (("start", value.start), ("stop", value.stop), ("step", value.step))
        ]
        same = parts[0] is value.start and parts[1] is value.stop and parts[2] is value.step
        found = self.slices[id(value)] = value if same else slice(*parts)
        self.records[id(value)] = self.records[id(found)] = Record(value, source)
        return found
