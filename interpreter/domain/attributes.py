"""Attribute access: object.__getattribute__ and its kin, emulated where a step of it would run Python code."""
from __future__ import annotations

import sys
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

from ..sentinels import NULL
from .core import MISSING, PLAIN, Core, is_class, is_heap, lookup, mro_of, reads_plainly, special

GENERIC_GET = object.__getattribute__
DICT_OF = type.__dict__["__dict__"].__get__  # asks no metaclass
ATTRIBUTES_ARE_C = PLAIN | {list, tuple, dict, set, frozenset, bytearray, range, slice}
# Attributes that would show the machine's doings, name -> the types that have it: the machine reads them.
GENERATOR_TYPES = {"gi": GeneratorType, "cr": CoroutineType, "ag": AsyncGeneratorType}
SHOWN_PARTS: dict[str, tuple[type, ...]] = {
    f"{prefix}_{part}": (tp,)
    for prefix, tp in GENERATOR_TYPES.items()
    for part in ("code", "frame", "yieldfrom", "await")
}
SHOWN_PARTS |= dict.fromkeys(("f_back", "f_code", "f_locals", "f_lineno", "f_lasti"), (FrameType,))
SHOWN_PARTS["__callback__"] = (ref,)
SHOWN_PARTS["cr_origin"] = (CoroutineType,)
# Descriptors whose __get__ runs no Python code when read through an instance.
SIMPLE_KINDS = frozenset({FunctionType, BuiltinFunctionType, staticmethod})


class Attributes(Core):
    """Reading, writing and deleting attributes; methods; super()."""

    def get_attr(self, obj: Any, name: str) -> Any:
        tp = type(obj)
        if not is_heap(tp):
            if tp is type:
                try:
                    return self.get_class_attr(obj, name)
                except AttributeError as error:
                    name_missing(error, obj, name)
                    raise
            if tp is super:
                return self.get_super_attr(obj, name)
            if tp is ModuleType:
                return self.get_module_attr(obj, name)
            if name in SHOWN_PARTS and tp in SHOWN_PARTS[name]:
                return self.machine.shown_part(obj, name)
            return getattr(obj, name) if tp in ATTRIBUTES_ARE_C else self.native(getattr, obj, name)
        try:
            return self.get_attr_interpreted(obj, name, tp)
        except AttributeError as error:
            name_missing(error, obj, name)
            raise

    def get_attr_or(self, obj: Any, name: str, default: Any) -> Any:
        try:
            return self.get_attr(obj, name)
        except AttributeError as error:
            self.machine.swallow(error)
        return default

    def get_attr_interpreted(self, obj: Any, name: str, tp: type) -> Any:
        if lookup(tp, "__getattribute__") is GENERIC_GET:
            raw = lookup(tp, name)
            if raw is MISSING or type(raw) in SIMPLE_KINDS:
                if raw is not MISSING or lookup(tp, "__getattr__") is MISSING:
                    return getattr(obj, name)
        elif is_class(obj) and special(tp, "__getattribute__") is None and special(tp, "__getattr__") is None:
            return self.get_class_attr(obj, name)
        return self.get_attr_by_protocol(obj, name, tp)

    def get_attr_by_protocol(self, obj: Any, name: str, tp: type) -> Any:
        """slot_tp_getattr_hook: __getattribute__, then __getattr__ where that raised AttributeError."""
        raw = special(tp, "__getattribute__")
        hook = special(tp, "__getattr__")
        if hook is None:
            if raw is not None:
                return self.call_special(raw, obj, [name])
            return self.get_attr_plainly(obj, name)
        try:
            if raw is not None:
                return self.call_special(raw, obj, [name])
            return self.get_attr_plainly(obj, name)
        except AttributeError as error:
            self.machine.swallow(error)
        return self.call_special(hook, obj, [name])

    def get_attr_plainly(self, obj: Any, name: str) -> Any:
        """What the type's own C __getattribute__ does, with Python descriptors interpreted."""
        if is_class(obj):
            return self.get_class_attr(obj, name)
        native = lookup(type(obj), "__getattribute__")
        return self.get_attr_generic(obj, name) if native is GENERIC_GET else self.native(native, obj, name)

    def get_attr_generic(self, obj: Any, name: str) -> Any:
        """object.__getattribute__ itself, whatever the type's own __getattribute__ is."""
        tp = type(obj)
        raw = lookup(tp, name)
        kind = type(raw)
        if raw is not MISSING and (kind is property or special(kind, "__get__") is not None):
            if not is_data_descriptor(kind):
                found = self.instance_value(obj, name)
                if found is not MISSING:
                    return found
            return self.bind_descriptor(raw, obj, tp)
        return self.native(GENERIC_GET, obj, name)

    def instance_value(self, obj: Any, name: str) -> Any:
        """What the instance's own __dict__ holds for `name`, or MISSING."""
        try:
            namespace = GENERIC_GET(obj, "__dict__")
        except AttributeError:
            return MISSING
        return self.native(dict.get, namespace, name, MISSING)

    def get_class_attr(self, cls: type, name: str) -> Any:
        """type.__getattribute__: the metaclass's data descriptors, the class's own MRO, the metaclass's others."""
        meta = type(cls)
        meta_raw = lookup(meta, name) if meta is not type else MISSING
        if meta_raw is not MISSING:
            kind = type(meta_raw)
            if kind is property or (special(kind, "__get__") is not None and is_data_descriptor(kind)):
                return self.bind_descriptor(meta_raw, cls, meta)
        raw = lookup(cls, name)
        if raw is not MISSING:
            kind = type(raw)
            if is_heap(kind):
                getter = special(kind, "__get__")
                if getter is not None:
                    return self.call_special(getter, raw, [None, cls])
            elif kind is classmethod:
                return self.bind_classmethod(raw, cls)
        elif meta_raw is not MISSING and special(type(meta_raw), "__get__") is not None:
            return self.bind_descriptor(meta_raw, cls, meta)
        return self.native(type.__getattribute__, cls, name)

    def bind_classmethod(self, raw: Any, cls: type) -> Any:
        """classmethod.__get__; up to 3.12 a wrapped descriptor is bound in turn."""
        wrapped = raw.__func__
        if sys.version_info < (3, 13) and type(wrapped) is property and wrapped.fget is not None:
            return self.call(wrapped.fget, [cls], {})
        return self.native(raw.__get__, None, cls)

    def get_module_attr(self, module: ModuleType, name: str) -> Any:
        """PEP 562: a module's __getattr__ is interpreted too."""
        hook = module.__dict__.get("__getattr__")
        if hook is None or name in module.__dict__ or lookup(ModuleType, name) is not MISSING:
            return getattr(module, name)
        return self.call(hook, [name], {})

    def get_super_attr(self, bound: Any, name: str) -> Any:
        """super.__getattribute__ with Python descriptors interpreted."""
        start, obj, obj_type = bound.__thisclass__, bound.__self__, bound.__self_class__
        if name != "__class__" and obj_type is not None:
            mro = mro_of(obj_type)
            position = next((place for place, cls in enumerate(mro, 1) if cls is start), len(mro))
            for cls in mro[position:]:
                raw = DICT_OF(cls).get(name, MISSING)
                if raw is not MISSING:
                    kind = type(raw)
                    if kind is property or special(kind, "__get__") is not None:
                        return self.bind_descriptor(raw, None if obj is obj_type else obj, obj_type)
                    break
        return self.native(getattr, bound, name)

    def load_method(self, obj: Any, name: str) -> tuple[Any, Any]:
        """(callable, self) where the callable takes self first, or (callable, NULL)."""
        method = self.get_attr(obj, name)
        if type(method) is MethodType:
            return method.__func__, method.__self__
        return (lookup(type(obj), name), obj) if self.is_inherited(method, obj, name) else (method, NULL)

    def is_inherited(self, method: Any, obj: Any, name: str) -> bool:
        """Whether CPython calls what a base class in C holds (_PyObject_GetMethod): an error names that class."""
        if type(method) is not BuiltinFunctionType or not reads_plainly(type(obj)):
            return False
        raw = lookup(type(obj), name)
        inherited = type(raw) is MethodDescriptorType and raw.__objclass__ is not type(obj)
        return inherited and self.instance_value(obj, name) is MISSING

    def load_super_attr(self, frame: Any, callee: Any, cls: Any, obj: Any, name: str, two_arguments: bool) -> Any:
        """`super().name` and `super(cls, obj).name`; `callee` is what the name super stands for."""
        if callee is super and is_class(cls):
            bound = self.native(super, cls, obj)
        else:
            bound = self.call(callee, [cls, obj] if two_arguments else [], {})
        return self.get_attr(bound, name)

    def set_attr(self, obj: Any, name: str, value: Any) -> None:
        tp = type(obj)
        if is_heap(tp):
            raw = special(tp, "__setattr__")
            if raw is not None:
                self.call_special(raw, obj, [name, value])
                return
            if not is_class(obj) or tp is not type:
                self.set_attr_plainly(obj, name, value)
                return
        self.native(setattr, obj, name, value)

    def set_attr_plainly(self, obj: Any, name: str, value: Any) -> None:
        """object.__setattr__ with Python descriptors interpreted."""
        self.change_plainly(SET, obj, name, value)

    def del_attr(self, obj: Any, name: str) -> None:
        tp = type(obj)
        raw = special(tp, "__delattr__")
        if raw is not None:
            self.call_special(raw, obj, [name])
        elif is_heap(tp):
            self.del_attr_plainly(obj, name)
        else:
            self.native(delattr, obj, name)

    def del_attr_plainly(self, obj: Any, name: str) -> None:
        """object.__delattr__ with Python descriptors interpreted."""
        self.change_plainly(DELETE, obj, name)

    def change_plainly(self, how: tuple[str, str, str], obj: Any, name: str, *value: Any) -> None:
        of_property, of_descriptor, of_object = how
        tp = type(obj)
        raw = lookup(tp, name)
        if raw is not MISSING:
            if type(raw) is property and (function := getattr(raw, of_property)) is not None:
                self.call(function, [obj, *value], {})
                return
            method = special(type(raw), of_descriptor)
            if method is not None:
                self.call_special(method, raw, [obj, *value])
                return
        native = lookup(tp, of_object)
        if type(native) is FunctionType:
            native = getattr(object, of_object)
        self.native(native, obj, name, *value)


# What changes an attribute: in a property, of a descriptor, of any object.
SET, DELETE = ("fset", "__set__", "__setattr__"), ("fdel", "__delete__", "__delattr__")


def name_missing(error: AttributeError, obj: Any, name: str) -> None:
    """Objects/object.c set_attribute_error_context: an error that says neither what nor of whom is told both."""
    if error.name is None and error.obj is None:
        error.name, error.obj = name, obj


def is_data_descriptor(kind: type) -> bool:
    return lookup(kind, "__set__") is not MISSING or lookup(kind, "__delete__") is not MISSING
