"""Attributes that a program gives to tensors: ``y.l_aux = loss`` (Tutel), ``p.main_grad = …`` (Megatron).

They are a matter of the Python object alone: no operator sees or hands on one. The residual code sets them once the
graph has run.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.program import look_up
from ..guards.sources import part
from ..hook import ABSENT
from ..python.specials import is_generic
from ..tensors import tensor_class
from ..tensors.tensor_class import KNOWN, rely_on
from ..values.residual_program import Call, Literal, Residual
from ..values.values import Break, TensorProxy
from .interfaces import ClassLookups
from .objects import Objects
from .records import Record, raw_dict

SET = object.__setattr__
SWITCHED = ("requires_grad", "is_leaf")  # what a step may change of a tensor without an operator that writes to it


def namespace(objects: Objects, proxy: TensorProxy, wanted: bool = False) -> Record | None:
    """What is known of the ``__dict__`` of a tensor that existed before. wanted: also where nobody has met it yet."""
    if not is_kind(proxy.real, torch.Tensor) or proxy.source is None or proxy.cls not in KNOWN:
        return None
    held = raw_dict(proxy.real)
    record = objects.records.get(id(held))
    place = getattr(record.source, "parent", None) if record is not None else None
    if held is not None and (wanted or record is not None) and place is not proxy.source:
        return objects.found(held, part(proxy.source, "instance_dict"))
    return record


def read(attributes: ClassLookups, proxy: TensorProxy, name: str) -> Any:
    """``proxy.name``."""
    heap, objects = attributes.heap, attributes.objects
    record = namespace(objects, proxy, wanted=name == "__dict__")
    if record is not None and name == "__dict__":
        heap.read("tensor", proxy, name, record.obj)
        return record.obj
    try:
        if record is not None and look_up(proxy.cls, name) is ABSENT:
            rely_on(objects.guards, proxy.cls, name)
            found = objects.dict_get(record, name)
            if found is ABSENT:
                raise AttributeError(f"'{proxy.cls.__name__}' object has no attribute '{name}'")
        else:
            found = tensor_class.read(attributes, proxy, name)
    except AttributeError:
        heap.read("tensor", proxy, name, ABSENT)
        raise
    if name in proxy.attributes or name in getattr(proxy.real, "__dict__", ()):
        heap.read("tensor", proxy, name, found)
    elif name in SWITCHED:
        heap.read("meta", proxy, name, found)
    return found


def given(attributes: ClassLookups, proxy: TensorProxy, name: str) -> Any:
    """``getattr(proxy, name, ABSENT)``."""
    try:
        return read(attributes, proxy, name)
    except AttributeError:
        return ABSENT


def attribute_now(objects: Objects, proxy: TensorProxy, name: str, then: Any) -> Any:
    """What the program's attribute of a tensor that was read is by now."""
    record = namespace(objects, proxy)
    if name == "__dict__":
        return then
    return proxy.attributes.get(name, then) if record is None else objects.entry_now(record, name)


def switched_now(proxy: TensorProxy, name: str, then: Any) -> Any:
    return getattr(proxy.fake, name)


def assign(attributes: ClassLookups, proxy: TensorProxy, name: str, value: Any) -> None:
    """``proxy.name = value`` of a name that torch's tensors have not."""
    objects, cls = attributes.objects, proxy.cls
    generic = cls in KNOWN and is_generic(attributes.on_type(cls, "__setattr__"), "__setattr__")
    if not generic or look_up(cls, name) is not ABSENT or not name.isidentifier():
        raise Break("attribute of a tensor is set", f"{proxy.describe()}.{name} = …", "set it outside of the step")
    objects.guards.class_entry(cls, name, ABSENT)
    objects.touch(proxy, name)
    record = namespace(objects, proxy, wanted=True)
    if record is not None:
        objects.dict_set(record, name, value)
    elif not proxy.attributes:
        objects.after_effects.append(functools.partial(replay, proxy))
    proxy.attributes[name] = value


def replay(proxy: TensorProxy, emitter: Residual) -> None:
    """Set them on the tensor that the graph has computed, or that came in."""
    tensor = emitter.value(proxy)
    for name, value in proxy.attributes.items():
        emitter.lines.append(Call(emitter.constant(SET), (tensor, Literal(name), emitter.value(value))))
