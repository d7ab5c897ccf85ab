"""Class statements, isinstance and issubclass, annotations, type parameters."""
from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from ..natives import watch_finalizer
from ..sentinels import UNSET
from ..type_parameters import run_intrinsic
from .core import Core, is_a, is_class, is_mapping, is_subtype, special, type_name

C_LIMIT_APART = sys.version_info >= (3, 12)  # the nesting of C code has a limit of its own


class Classes(Core):
    """What a class statement does."""

    def load_build_class(self, frame: Any) -> Any:
        found = self.look_up(frame.builtins, "__build_class__")
        if found is UNSET:
            raise NameError("__build_class__ not found")
        return found

    def build_class(self, body: Any, name: str, bases: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """builtins.__build_class__ (Python/bltinmodule.c)."""
        resolved = self.resolve_bases(bases)
        kwargs = dict(kwargs)
        meta = kwargs.pop("metaclass", UNSET)
        of_class = True
        if meta is UNSET:
            meta = type(resolved[0]) if resolved else type
        else:
            of_class = is_class(meta)
        if of_class:
            meta = calculate_metaclass(meta, resolved)
        namespace: Any = {}
        prepare = UNSET
        try:
            prepare = self.get_attr(meta, "__prepare__")
        except AttributeError as error:
            self.machine.swallow(error)
        if prepare is not UNSET:
            namespace = self.call(prepare, [name, resolved], dict(kwargs))
        if not is_mapping(namespace):
            shown = type_name(meta) if of_class else "<metaclass>"
            raise TypeError(f"{shown}.__prepare__() must return a mapping, not {type_name(type(namespace))}")
        cell = self.machine.run_class_body(body, namespace)
        if resolved is not bases:
            self.set_item(namespace, "__orig_bases__", bases)
        cls = self.call(meta, [name, resolved, namespace], kwargs)
        if is_class(cls):
            watch_finalizer(cls)
        if is_class(cls) and is_a(cell, types.CellType):
            try:
                held = cell.cell_contents
            except ValueError:
                held = UNSET
            if held is UNSET:  # raised here, it has no context
                raise RuntimeError(
                    f"__class__ not set defining {name!r} as {cls!r}. Was __classcell__ propagated to type.__new__?"
                )
            if held is not cls:
                raise TypeError(f"__class__ set to {held!r} defining {name!r} as {cls!r}")
        return cls

    def resolve_bases(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        """PEP 560: __mro_entries__ of the bases that are not classes."""
        resolved: list[Any] = []
        changed = False
        for base in bases:
            entries = UNSET
            if not is_class(base):
                try:
                    entries = self.get_attr(base, "__mro_entries__")
                except AttributeError as error:
                    self.machine.swallow(error)
            if entries is UNSET:
                resolved.append(base)
                continue
            new = self.call(entries, [bases], {})
            if not is_a(new, tuple):
                raise TypeError("__mro_entries__ must return a tuple")
            resolved.extend(new)
            changed = True
        return tuple(resolved) if changed else bases

    def setup_annotations(self, frame: Any) -> None:
        if self.look_up(frame.names, "__annotations__") is UNSET:
            self.set_item(frame.names, "__annotations__", {})

    def is_instance(self, value: Any, cls: Any) -> bool:
        """isinstance() with a Python __instancecheck__ interpreted."""
        if type(cls) is tuple:
            return self.any_of(isinstance, self.is_instance, value, cls)
        if type(value) is cls:
            return True
        if type(cls) is not type:
            raw = special(type(cls), "__instancecheck__")
            if raw is not None:
                return self.truth(self.call_special(raw, cls, [value]))
        return self.native(isinstance, value, cls)

    def is_subclass(self, value: Any, cls: Any) -> bool:
        if type(cls) is tuple:
            return self.any_of(issubclass, self.is_subclass, value, cls)
        raw = special(type(cls), "__subclasscheck__")
        if raw is not None:
            return self.truth(self.call_special(raw, cls, [value]))
        return self.native(issubclass, value, cls)

    def any_of(
        self, builtin: Callable[..., bool], test: Callable[[Any, Any], bool], value: Any, classes: tuple[Any, ...]
    ) -> bool:
        """A tuple of classes takes a level of recursion, as in Objects/abstract.c object_recursive_isinstance."""
        if C_LIMIT_APART and self.interprets_callbacks:
            return self.native(builtin, value, classes)
        machine, levels = self.machine, 1
        while len(classes) == 1 and type(classes[0]) is tuple:  # one in the other, as deep as anybody likes
            classes, levels = classes[0], levels + 1
        machine.depth += levels
        try:
            if machine.depth > machine.depth_limit:
                raise RecursionError("maximum recursion depth exceeded in __instancecheck__")
            for item in classes:
                if test(value, item):
                    return True
            return False
        finally:
            machine.depth -= levels

    def print_expression(self, value: Any) -> None:
        """The interactive prompt's sys.displayhook."""
        hook = getattr(sys, "displayhook", None)
        if hook is None:
            raise RuntimeError("lost sys.displayhook")
        self.call(hook, [value], {})

    def type_parameter(self, frame: Any, name: str, first: Any, second: Any) -> Any:
        """PEP 695 and 696 intrinsics; `name` as in tables/v312.py."""
        return run_intrinsic(self, frame, name, first, second)


def calculate_metaclass(meta: type, bases: tuple[Any, ...]) -> type:
    """Objects/typeobject.c _PyType_CalculateMetaclass."""
    winner = meta
    for base in bases:
        kind = type(base)
        if is_subtype(winner, kind):
            continue
        if is_subtype(kind, winner):
            winner = kind
            continue
        raise TypeError(
            "metaclass conflict: the metaclass of a derived class must be a (non-strict) subclass of the metaclasses "
            "of all its bases"
        )
    return winner
