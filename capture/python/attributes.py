"""Attribute access while tracing: Python's own protocol, under guards.

The order of ``object.__getattribute__`` (CPython, Objects/object.c, ``_PyObject_GenericGetAttrWithDict``) is followed
step by step: data descriptors of the type, the instance dict, other class attributes, ``__getattr__``. Python code that
runs on the way (properties, ``__getattr__``, descriptors) is interpreted like any other call.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import Signal, is_kind
from moebius.interpreter.domain.core import type_name

from ..guards.program import look_up
from ..guards.sources import Part, Static
from ..heap import tensor_attributes
from ..heap.class_attributes import ClassAttributes
from ..heap.data import assign_data
from ..heap.heap import OWN, WHOLE
from ..heap.objects import Objects
from ..heap.records import HEAP_TYPE, UNREAD, Record, may_be_asked_for, raw_dict
from ..heap.slots import Slots
from ..hook import ABSENT, Entry, own_attributes
from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_private
from ..values.number_methods import attribute_of
from ..values.numbers import Number
from ..values.numpy_numbers import NUMPY_NUMBERS
from ..values.opaque_tensor import Varying
from ..values.values import ATOMS, IDENTITIES, SYMBOLIC, Break, SymbolicObject, TensorMethod, TensorProxy, type_of
from ..values.values import UndefinedAfterLoop as Undefined
from .questions import QUESTIONS
from .reach import LOADERS, may_look_at
from .specials import is_generic
from .texts import Text

IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: nobody can change these, they need no guard
C_PARTS = (types.MemberDescriptorType, types.GetSetDescriptorType)  # what C code keeps for an object, by name
KNOWN_LOOK_UPS = (types.GenericAlias, types.UnionType)  # in C, and ends where ``object``'s does, for what they have

Call = Callable[[Any, list, dict], Any]


class Attributes(Slots):
    """Attribute reads, writes and deletions of one trace. ``call`` runs a Python-level callable in the trace."""

    def __init__(self, objects: Objects, tensors: TensorOperations, call: Call):
        self.objects, self.tensors, self.call = objects, tensors, call
        self.ask: Callable[..., Any] = lambda getter, *args: call(getter, list(args), {})  # (a getter of the user's)
        self.guards, self.gradients = objects.guards, tensors.gradients
        self.looked_up: dict[int, tuple[type, dict[str, Any]]] = {}  # by a class's id: its metaclass may hash
        self.of_classes, self.heap = ClassAttributes(objects), objects.heap
        tensor, meta = functools.partial(tensor_attributes.attribute_now, objects), tensor_attributes.switched_now
        self.heap.now |= {"class": self.class_now, "value": self.value_now, "tensor": tensor, "meta": meta}

    # ------------------------------------------------------------------------------------------------------------------
    # Look-up on types
    # ------------------------------------------------------------------------------------------------------------------

    def on_type(self, cls: type, name: str) -> Any:
        """What ``name`` is along the MRO of ``cls``, not bound; ABSENT if nowhere. Guarded."""
        known = self.looked_up.setdefault(id(cls), (cls, {}))[1]
        if name not in known:
            if issubclass(cls, SymbolicObject):
                cls.refuse_as(name, cls.__name__)
            if (moving := self.of_classes.find(cls, name)) is not UNREAD:
                self.heard(name, moving, cls)
                return moving
            found = look_up(cls, name)
            if not cls.__flags__ & IMMUTABLE_TYPE:
                self.guards.class_entry(cls, name, found)
            known[name] = self.enter_class_value(cls, name, found)
        self.heard(name, known[name], cls)
        return known[name]

    def rely_on(self, cls: type, *names: str) -> None:
        """What C code, or the interpreter, asks a class for: guarded."""
        if cls.__flags__ & HEAP_TYPE and not issubclass(cls, SymbolicObject):
            for name in names:
                self.on_type(cls, name)

    def heard(self, name: str, value: Any, cls: type) -> None:
        if self.heap.listening or may_be_asked_for(value):
            self.heap.read("class", self.of_classes, (cls, name), value)

    def class_now(self, _: Any, key: tuple[type, str], then: Any) -> Any:
        """What a look-up on a class gives by now."""
        return self.on_type(*key)

    def enter_class_value(self, cls: type, name: str, value: Any) -> Any:
        if value is ABSENT:
            return ABSENT
        return self.objects.enter(value, Static(f"{cls.__qualname__}.{name}", value))

    # ------------------------------------------------------------------------------------------------------------------
    # Reading
    # ------------------------------------------------------------------------------------------------------------------

    def get(self, obj: Any, name: str) -> Any:
        """``obj.name``; AttributeError as Python would raise it: one that the user's code raises is told the name too
        (Objects/object.c set_attribute_error_context)."""
        if name == "__context__":
            self.objects.asked_context = True
        try:
            return self.find(obj, name)
        except AttributeError as error:
            if error.name is None and error.obj is None:
                error.name = name
                if not type(obj).__module__.startswith("moebius."):
                    error.obj = obj
            raise

    def find(self, obj: Any, name: str) -> Any:
        kind = type(obj)
        if kind is TensorProxy:
            return tensor_attributes.read(self, obj, name)
        if issubclass(kind, Text) and obj.known:
            return getattr(obj.numbers.constant(obj), name)
        if issubclass(kind, SymbolicObject):
            return obj.attribute(name)
        if kind is torch.SymInt and name in ("real", "numerator"):
            return obj
        if kind is torch.SymBool:
            return getattr(self.tensors.symbolic_truth(obj), name)
        if kind in SYMBOLIC or kind is Number or kind in NUMPY_NUMBERS:
            return attribute_of(self.tensors.numbers, obj, name)
        if issubclass(kind, Number):
            raise Break("attribute of a number", f"{name} of a text that the graph makes", "use arithmetic only")
        if kind is TensorMethod:
            return self.of_tensor_method(obj, name)
        if kind is Undefined:
            detail = f"{obj.name} is read after the loop"
            raise Break("value of an expert loop's last iteration", detail, "do not use the loop's variables after it")
        if kind in ATOMS or (kind is slice and name in ("start", "stop", "step")):
            return getattr(obj, name)
        if issubclass(kind, torch_private.OPERATOR_LIBRARIES):
            getattr(obj, name, None)  # from now on it is there
        if issubclass(kind, types.ModuleType):
            return self.of_module(obj, name)
        if issubclass(kind, type):
            return self.of_class(obj, name)
        if kind is super:
            return self.of_super(obj, name)
        if kind is types.FunctionType:
            return self.of_function(obj, name)
        if kind is types.MethodType:
            return self.of_method(obj, name)
        if name in ("state", "__dict__") and issubclass(kind, torch.optim.Optimizer):
            self.gradients.others_ask()
        return self.of_instance(obj, name)

    def of_instance(self, obj: Any, name: str) -> Any:
        kind = type(obj)
        getter = self.on_type(kind, "__getattribute__")
        try:
            if is_kind(getter, types.FunctionType):
                return self.ask(getter, obj, name)
            if kind is threading.local and (record := self.objects.record_of(obj)) is not None:
                return self.of_thread(record, name)
            if looks_up_in_c(getter) and not issubclass(kind, KNOWN_LOOK_UPS):
                hint = "read it outside of the step, or keep it in an ordinary object"
                raise Break("attributes kept in C", f"{kind.__module__}.{kind.__qualname__}.{name} is read", hint)
            return self.generic(obj, name)
        except AttributeError as error:
            fallback = self.on_type(kind, "__getattr__")
            if fallback is ABSENT:
                raise
            if fallback is MODULE_GETATTR:
                return self.module_registry(obj, name, error)
            return self.call(self.bind(fallback, obj, kind), [name], {})

    def of_thread(self, record: Record, name: str) -> Any:
        """What the thread of the call has under the name: an entry of the dict that ``vars()`` gives there."""
        namespace = self.dict_of_thread(record)
        found = namespace.obj if name == "__dict__" else self.objects.dict_get(namespace, name)
        if found is ABSENT:
            if self.on_type(threading.local, name) is not ABSENT:
                raise Break("attributes kept in C", f"threading.local().{name} is read", "read it outside of the step")
            raise AttributeError(f"'_thread._local' object has no attribute {name!r}", name=name, obj=record.obj)
        return found

    def dict_of_thread(self, record: Record) -> Record:
        place = Part(f"{record.source.name}.__dict__", record.source, "python", vars)
        return self.objects.need(self.objects.enter(vars(record.obj), place))

    def generic(self, obj: Any, name: str) -> Any:
        """``object.__getattribute__(obj, name)``."""
        kind = type(obj)
        on_type = self.on_type(kind, name)
        if on_type is not ABSENT and is_data_descriptor(on_type):
            return self.from_descriptor(on_type, obj, kind, name)
        found = self.from_instance(obj, name)
        if found is not ABSENT:
            return found
        if on_type is ABSENT:
            raise AttributeError(f"{type_name(kind)!r} object has no attribute {name!r}", name=name, obj=obj)
        return self.bind(on_type, obj, kind)

    def from_instance(self, obj: Any, name: str) -> Any:
        """The entry of the instance dict, ABSENT if none."""
        if self.objects.is_new(obj):
            namespace = raw_dict(obj)
            found = ABSENT if namespace is None else namespace.get(name, ABSENT)
            self.heap.read(OWN, obj, name, None)
            return self.objects.made(found) if name == "__notes__" else found  # a list that add_note made
        record = self.objects.record_of(obj)
        if record is None:
            if raw_dict(obj) is None:
                return ABSENT
            record = self.objects.need(obj)
        inner = self.objects.instance_dict(record)
        return ABSENT if inner is None else self.objects.dict_get(inner, name)

    def from_descriptor(self, descriptor: Any, obj: Any, kind: type, name: str) -> Any:
        """A data descriptor's value: properties are interpreted, slots and C attributes read under guards."""
        if is_kind(descriptor, property):
            if descriptor.fget is None:
                return getattr(obj, name)
            getter = self.objects.enter(descriptor.fget, Static(f"{kind.__qualname__}.{name}.fget", descriptor.fget))
            return self.ask(getter, obj)
        if type(descriptor) in C_PARTS:
            return self.c_attribute(descriptor, obj, kind, name)
        return self.bind(descriptor, obj, kind)

    def type_guard(self, obj: Any) -> None:
        record = self.objects.record_of(obj)
        if record is not None and record.source.static:
            self.objects.instance_dict(record)

    def bind(self, found: Any, obj: Any, kind: type) -> Any:
        """``found.__get__(obj, kind)`` for a class attribute."""
        descriptor = type(found)
        if descriptor is types.FunctionType:
            return self.objects.made(types.MethodType(found, obj))
        if descriptor is staticmethod:
            return self.inside(found, found.__func__)
        if descriptor is classmethod:
            return self.of_class_method(found, kind)
        if descriptor in (functools._lru_cache_wrapper, Entry):
            return self.objects.made(types.MethodType(found, obj))
        if descriptor in (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType):
            return self.objects.made(found.__get__(obj, kind))
        if is_kind(found, property):
            return self.from_descriptor(found, obj, kind, "")
        if descriptor in ATOMS or is_kind(found, NEVER_BOUND):
            return found
        if descriptor is TUPLE_FIELD and is_kind(obj, tuple):
            return tuple.__getitem__(obj, found.__reduce__()[1][0])
        getter = self.on_type(descriptor, "__get__")
        if getter is ABSENT:
            return found
        if is_kind(getter, types.FunctionType):
            return self.call(getter, [found, obj, kind], {})
        if is_kind(found, functools.partial | types.MethodType):
            is_bound = is_kind(found, functools.partial) and "__get__" in vars(functools.partial)  # from 3.14 on
            return self.objects.made(types.MethodType(found, obj)) if is_bound else found
        if descriptor.__name__ == "instancemethod":  # how pybind11 makes methods
            if found.__func__ in QUESTIONS:
                return self.objects.made(types.MethodType(found.__func__, obj))
            name = f"{kind.__module__}.{kind.__qualname__}.{getattr(found, '__name__', 'method')}"
            raise Break(
                "method in C",
                f"{name} is C++ code that may do anything",
                "it runs natively; call it outside of the step, unless a library does (as in DistributedDataParallel)",
            )
        raise Break("descriptor", f"a {descriptor.__name__} is bound in C", "read the attribute outside of the step")

    def of_class_method(self, method: classmethod, cls: type) -> Any:
        """``method.__get__(None, cls)``. Until 3.12, what it wraps is bound by its own type, if that binds."""
        inner = self.inside(method, method.__func__)
        by_itself = sys.version_info >= (3, 13) or is_kind(inner, types.FunctionType)
        if by_itself or self.on_type(type(inner), "__get__") is ABSENT:
            # CPython makes a method of what cannot be called, too.
            made = types.MethodType(inner, cls) if callable(inner) else classmethod.__get__(method, None, cls)
            return self.objects.made(made)
        return self.bind(inner, cls, cls)

    def inside(self, wrapper: Any, inner: Any) -> Any:
        """What a static- or classmethod object wraps; fixed for the life of the wrapper."""
        return self.objects.enter(inner, Static(getattr(inner, "__qualname__", "function"), inner))

    def module_registry(self, module: Any, name: str, error: AttributeError) -> Any:
        """``nn.Module.__getattr__`` (torch/nn/modules/module.py): the three registries, in its order."""
        for registry in ("_parameters", "_buffers", "_modules"):
            entries = self.from_instance(module, registry)
            if entries is not ABSENT:
                found = self.entry(entries, name)
                if found is not ABSENT:
                    return found
        raise AttributeError(
            f"'{type(module).__name__}' object has no attribute '{name}'", name=name, obj=module
        ) from None

    def entry(self, entries: Any, key: Any) -> Any:
        record = self.objects.record_of(entries)
        return entries.get(key, ABSENT) if record is None else self.objects.dict_get(record, key)

    def of_module(self, module: types.ModuleType, name: str) -> Any:
        kind = type(module)
        if kind is not types.ModuleType and is_kind(self.on_type(kind, "__getattribute__"), types.FunctionType):
            raise Break(
                "module with its own __getattribute__", module.__name__, "import the name once, outside of the step"
            )
        self.objects.found(module, module.__name__)
        found = self.from_instance(module, name)
        if found is not ABSENT:
            return found
        on_type = self.on_type(kind, name)
        if on_type is not ABSENT:
            take = functools.partial(self.from_descriptor, name=name) if is_data_descriptor(on_type) else self.bind
            return take(on_type, module, kind)
        own = self.from_instance(module, "__getattr__")
        fallback = own if own is not ABSENT else self.on_type(kind, "__getattr__")
        if fallback is ABSENT:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)
        before = vars(module)
        is_asked = name not in before and before.get("__getattr__", ABSENT) is own  # (else the step has written there)
        if is_asked and may_look_at((fallback, kind), LOADERS):  # what loads itself when used may do so now
            value = getattr(module, name)
            if name in before or is_kind(value, IDENTITIES):
                return self.objects.enter(value, Static(f"{module.__name__}.{name}", value))
        if is_kind(fallback, types.FunctionType):  # (a module of settings answers from what it keeps)
            return self.call(fallback, [name] if own is not ABSENT else [module, name], {})
        where = f"{module.__name__}.__getattr__ gives {name!r}"
        raise Break("module with __getattr__", where, "read it before the step, or put it in the module itself")

    def of_class(self, cls: type, name: str) -> Any:
        """``type.__getattribute__`` (Objects/typeobject.c)."""
        meta = type(cls)
        on_meta = self.on_type(meta, name)
        if is_kind(self.on_type(meta, "__getattribute__"), types.FunctionType):
            raise Break(
                "metaclass with its own __getattribute__",
                cls.__qualname__,
                "read the class attribute outside of the step",
            )
        if on_meta is not ABSENT and is_data_descriptor(on_meta):
            if name == "__dict__":
                self.of_classes.show(cls)
                return getattr(cls, name)
            if cls.__flags__ & IMMUTABLE_TYPE and type(on_meta) in C_PARTS:
                return getattr(cls, name)
            if not self.objects.is_known(cls):
                self.objects.found(cls, type_name(cls))
            return self.from_descriptor(on_meta, cls, meta, name)
        found = self.on_type(cls, name)
        if found is not ABSENT:
            return self.bind_to_class(found, cls)
        if on_meta is not ABSENT:
            return self.bind(on_meta, cls, meta)
        fallback = self.on_type(meta, "__getattr__")
        if fallback is not ABSENT:
            return self.call(self.bind(fallback, cls, meta), [name], {})
        raise AttributeError(f"type object {type_name(cls)!r} has no attribute {name!r}", name=name, obj=cls)

    def bind_to_class(self, found: Any, cls: type) -> Any:
        """``found.__get__(None, cls)``."""
        if is_kind(found, staticmethod):
            return self.inside(found, found.__func__)
        if is_kind(found, classmethod):
            return self.of_class_method(found, cls)
        if is_kind(found, types.ClassMethodDescriptorType):
            return self.objects.made(found.__get__(None, cls))
        if type(found) in ATOMS or is_kind(found, (*NEVER_BOUND, *BOUND_TO_OBJECTS)):
            return found
        getter = self.on_type(type(found), "__get__")
        return self.call(getter, [found, None, cls], {}) if is_kind(getter, types.FunctionType) else found

    def of_super(self, proxy: Any, name: str) -> Any:
        """``super(...).name``: the MRO after the class that ``super`` was made in."""
        owner, obj, kind = proxy.__self_class__, proxy.__self__, proxy.__self_class__
        if owner is None:  # unbound: its own attributes alone
            return getattr(proxy, name)
        mro = owner.__mro__
        for base in mro[mro.index(proxy.__thisclass__) + 1 :]:
            if self.of_classes.has(base, name):
                if (moving := self.of_classes.find(base, name)) is not UNREAD:
                    return self.bind(moving, obj, kind)
                value = base.__dict__[name]
                if not base.__flags__ & IMMUTABLE_TYPE:
                    self.guards.class_entry(base, name, value)
                value = self.enter_class_value(base, name, value)
                if obj is owner and is_kind(obj, type):
                    if is_kind(value, types.FunctionType | staticmethod | classmethod):
                        return self.bind_to_class(value, owner)
                    if is_kind(value, types.WrapperDescriptorType) and issubclass(type(obj), base):
                        return self.bind(value, obj, type(obj))
                    return self.bind_to_class(value, owner)
                return self.bind(value, obj, kind)
        if name in ("__thisclass__", "__self__", "__self_class__"):
            return getattr(proxy, name)
        raise AttributeError(f"'super' object has no attribute {name!r}")

    def of_function(self, function: types.FunctionType, name: str) -> Any:
        if name in PARTS_OF_FUNCTIONS:
            if name == "__annotations__" and getattr(function, "__annotate__", None) is not None:
                hint = "ask outside of the step"
                raise Break("annotations that are made when asked for", function.__qualname__, hint)
            value = getattr(function, name)
            if self.objects.is_new(function):
                return value if name in ("__globals__", "__code__") else self.own_part(function, value)
            if name == "__globals__":
                return self.objects.enter(value, Static(f"globals of {function.__qualname__}", value))
            return self.c_value(function, value, name)
        return self.of_instance(function, name)

    def of_method(self, method: types.MethodType, name: str) -> Any:
        """What a bound method has itself, else what its function has (Objects/classobject.c method_getattro)."""
        if name in ("__func__", "__self__"):
            return getattr(method, name)
        if name != "__doc__" and self.on_type(types.MethodType, name) is not ABSENT:
            return self.generic(method, name)
        return self.get(method.__func__, name)

    def of_tensor_method(self, method: TensorMethod, name: str) -> Any:
        if name == "__self__":
            return method.proxy
        if name == "__name__":
            return method.name
        raise Break("attribute of a tensor's method", name, "call the method")

    # ------------------------------------------------------------------------------------------------------------------
    # Writing
    # ------------------------------------------------------------------------------------------------------------------

    def set(self, obj: Any, name: str, value: Any) -> None:
        """``obj.name = value``."""
        kind = type(obj)
        refuse_constant(obj, lambda plain: setattr(plain, name, None))
        if kind is TensorProxy and name == "grad":
            self.gradients.write(obj, value)
        elif kind is TensorProxy and name == "requires_grad" and type(value) in (bool, torch.SymBool):
            self.gradients.switch(obj, self.tensors.flag(value))
        elif kind is TensorProxy and name == "data" and issubclass(type(value), TensorProxy):
            assign_data(self.tensors, obj, value)
        elif kind is TensorProxy:
            tensor_attributes.assign(self, obj, name, value)
        elif issubclass(type(obj), type):
            self.set_on_class(obj, name, value)
        elif issubclass(type(obj), types.ModuleType):
            self.set_generic(obj, name, value)
        elif not is_generic(setter := self.on_type(kind, "__setattr__"), "__setattr__"):
            self.call(self.bind(setter, obj, kind), [name, value], {})
        elif kind is threading.local and not hasattr(kind, name) and self.objects.record_of(obj) is not None:
            self.objects.dict_set(self.dict_of_thread(self.objects.need(obj)), name, value)
        else:
            self.refuse_set_in_c(kind, setter, name)
            self.set_generic(obj, name, value)

    def set_on_class(self, cls: type, name: str, value: Any) -> None:
        """``cls.name = value`` (Objects/typeobject.c, type_setattro)."""
        meta = type(cls)
        on_meta, setter = self.on_type(meta, name), self.on_type(meta, "__setattr__")
        by_meta = setter is not SET_ON_CLASS or (on_meta is not ABSENT and takes_writes(on_meta))
        below = [known for kind, known in self.looked_up.values() if any(base is cls for base in kind.__mro__)]
        before = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)
        self.of_classes.refuse_set(cls, name, before, value, by_meta)
        self.of_classes.set(cls, name, value, any(name in known for known in below))
        for known in below:
            known.pop(name, None)

    def is_old_defaults(self, name: str, value: Any) -> bool:
        """Whether C code would read an older dict, past what the step has changed in it."""
        return name == "__kwdefaults__" and self.objects.record_of(value) is not None

    def refuse_set_in_c(self, kind: type, setter: Any, name: str) -> None:
        owner = getattr(setter, "__objclass__", None)
        if owner is not None and own_attributes(owner)[1]:
            hint = "set it outside of the step, or keep it in an ordinary object"
            raise Break("attributes kept in C", f"{kind.__module__}.{kind.__qualname__}.{name} is set", hint)

    def set_generic(self, obj: Any, name: str, value: Any) -> None:
        """``object.__setattr__(obj, name, value)``."""
        kind = type(obj)
        on_type = self.on_type(kind, name)
        if is_kind(on_type, property):
            if on_type.fset is None:
                raise AttributeError(f"property {name!r} of {kind.__qualname__!r} object has no setter")
            setter = self.objects.enter(on_type.fset, Static(f"{kind.__qualname__}.{name}.fset", on_type.fset))
            self.call(setter, [obj, value], {})
            return
        if on_type is not ABSENT and self.on_type(type(on_type), "__set__") is not ABSENT:
            setter = self.on_type(type(on_type), "__set__")
            if is_kind(setter, types.FunctionType):
                self.call(setter, [on_type, obj, value], {})
                return
            if self.objects.is_new(obj):
                shared = name == "__dict__" and value is not obj and not self.takes_as_own(obj, value)
                if type(on_type) is types.GetSetDescriptorType and (shared or self.is_old_defaults(name, value)):
                    where = f"the {name} of a {type_name(kind)} becomes a dict that others have, too"
                    raise Break("instance dict is shared", where, "update the one that is there")
                self.objects.touch(obj, WHOLE if name in ("__class__", "__dict__") else name)
                on_type.__set__(obj, value)
            else:
                self.set_slot(obj, name, on_type, value)
            return
        if self.objects.is_new(obj):
            self.objects.touch(obj, name)
            object.__setattr__(obj, name, value)
            return
        record = self.objects.instance_dict(self.objects.need(obj))
        if record is None:
            return object.__setattr__(obj, name, value)  # raises: there is no place for it
        if kind is types.ModuleType and obj.__name__.partition(".")[0] == "torch" and callable(vars(obj).get(name)):
            where = f"{obj.__name__}.{name} is set, and a graph finds torch's functions by their names"
            raise Break("function of torch is replaced", where, "replace it before the step")
        self.objects.dict_set(record, name, value)

    def delete(self, obj: Any, name: str) -> None:
        """``del obj.name``."""
        kind = type(obj)
        refuse_constant(obj, lambda plain: delattr(plain, name))
        if kind is TensorProxy or issubclass(type(obj), type):
            raise Break("attribute is deleted", f"del {kind.__name__}.{name}", "delete it outside of the step")
        deleter = self.on_type(kind, "__delattr__")
        if not is_generic(deleter, "__delattr__"):
            self.call(self.bind(deleter, obj, kind), [name], {})
        else:
            self.refuse_set_in_c(kind, deleter, name)
            self.delete_generic(obj, name)

    def delete_generic(self, obj: Any, name: str) -> None:
        """``object.__delattr__(obj, name)``."""
        on_type = self.on_type(type(obj), name)
        if on_type is not ABSENT and takes_writes(on_type):
            raise Break("descriptor is deleted", f"del {type(obj).__name__}.{name}", "delete it outside of the step")
        if self.objects.is_new(obj):
            self.objects.touch(obj, name)
            object.__delattr__(obj, name)
            return
        record = self.objects.instance_dict(self.objects.need(obj))
        if record is None:
            return object.__delattr__(obj, name)  # raises, too
        if not self.objects.dict_delete(record, name):
            raise AttributeError(f"{type_name(type(obj))!r} object has no attribute {name!r}")  # (without its name)

    def has(self, obj: Any, name: str) -> bool:
        """``hasattr(obj, name)``."""
        try:
            self.get(obj, name)
        except Signal:
            raise
        except AttributeError:
            return False
        return True


def refuse_constant(obj: Any, change: Callable[[Any], None]) -> None:
    """Raise what Python raises where an attribute of a number, a text or the like is set or deleted."""
    if type(obj) in ATOMS - set(SYMBOLIC):
        change(obj)
    elif is_kind(obj, (*SYMBOLIC, Number, Text, Varying)) and (kind := type_of(obj)) in ATOMS:
        change(kind())


SET_ON_CLASS = vars(type)["__setattr__"]
PARTS_OF_FUNCTIONS = frozenset(
    ("__code__", "__globals__", "__name__", "__qualname__", "__module__", "__defaults__", "__kwdefaults__",
     "__closure__", "__annotations__", "__doc__", "__dict__")
)  # fmt: skip
TUPLE_FIELD: Any = type(vars(collections.namedtuple("Single", "item"))["item"])  # it tells pickle its index
NEVER_BOUND = (type, types.BuiltinFunctionType, torch.Tensor, TensorProxy, tuple, Number, Text, Varying, *SYMBOLIC)
BOUND_TO_OBJECTS = (types.FunctionType, property, *C_PARTS, types.MethodDescriptorType, types.WrapperDescriptorType)
MODULE_GETATTR = torch.nn.Module.__getattr__


def looks_up_in_c(getter: Any) -> bool:
    """Whether a type's ``__getattribute__`` is C code that is not ``object``'s (``threading.local``, a weak proxy)."""
    owner = getattr(getter, "__objclass__", None)
    return owner is not None and own_attributes(owner)[0]


def is_data_descriptor(value: Any) -> bool:
    """Whether a class attribute goes before what the object itself has by that name."""
    return takes_writes(value) and hasattr(type(value), "__get__")


def takes_writes(value: Any) -> bool:
    """Whether the type of a class attribute defines ``__set__`` or ``__delete__``."""
    kind = type(value)
    return not issubclass(kind, TensorProxy) and (hasattr(kind, "__set__") or hasattr(kind, "__delete__"))
