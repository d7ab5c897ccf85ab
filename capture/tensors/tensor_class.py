"""What a program sets on ``torch.Tensor``: methods of its own, and others in the places of torch's.

Those of its own are interpreted. What stands in torch's place is a graph break where it is asked for: a node that calls
a method by its name would find it. Where it is an operator, or what capture itself asks a tensor for, nothing is
captured (``cache.environment_changes``): every graph relies on them.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.program import look_up
from ..guards.recorder import GuardRecorder
from ..heap.interfaces import ClassLookups
from ..hook import ABSENT
from ..python.originals import is_own
from ..values.values import Break, TensorProxy

HINT = "it runs natively; give the method another name, or replace it in your own modules"
CLASSES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
# What people and pickle ask tensors for: no graph relies on it, and libraries show tensors in their way.
SHOWN = frozenset(
    "__repr__ __str__ __format__ __dir__ __sizeof__ __reduce__ __reduce_ex__ __getstate__ __setstate__".split()
)
ASKED = frozenset(
    "shape size stride storage_offset dim ndim numel dtype device layout is_contiguous requires_grad grad grad_fn"
    " is_leaf data detach requires_grad_ backward register_hook retain_grad item tolist is_sparse is_nested"
    " untyped_storage is_floating_point is_complex is_inference element_size itemsize nbytes is_cuda is_meta names"
    " _version _base _is_view".split()
)


def is_torchs(found: Any) -> bool:
    """Whether what stands in a class of tensors was torch's from the beginning."""
    function = found.fget if is_kind(found, property) else getattr(found, "__func__", found)
    if callable(function):
        return is_own(function)
    return is_kind(function, types.GetSetDescriptorType) or not hasattr(type(function), "__get__")


def needed(cls: type) -> dict[str, Any]:
    names = (name for name in dir(cls) if name in ASKED or (name.startswith("__") and name not in SHOWN))
    found = {name: look_up(cls, name) for name in names}
    # Only what binds to a tensor: the metaclass has names, too, and copying and pickling keep lists in classes
    # (``__slotnames__``).
    return {name: value for name, value in found.items() if hasattr(type(value), "__get__")}


NEEDED = {cls: needed(cls) for cls in CLASSES}
TORCHS = frozenset(name for cls in CLASSES for name in dir(cls) if is_torchs(look_up(cls, name)))
KNOWN = {cls: {name: value for name, value in vars(cls).items() if is_torchs(value)} for cls in CLASSES}


def is_replaced(cls: type, name: str) -> bool:
    """Whether a program has put something in the place of what torch has there."""
    for base in cls.__mro__:
        if name in vars(base):
            return base in KNOWN and vars(base)[name] is not KNOWN[base].get(name, ABSENT) and name in TORCHS
    return name in TORCHS


def replaced() -> str | None:
    """The name of something that every graph relies on and that is not torch's."""
    for cls in CLASSES:
        now, known = vars(cls), KNOWN[cls]
        for name in NEEDED[cls]:
            if now.get(name) is not known.get(name):
                return f"torch.{cls.__name__}.{name}"
    return None


def guard(recorder: GuardRecorder) -> None:
    """The classes of tensors have what every graph relies on."""
    for cls in CLASSES:
        recorder.class_order(cls).entries |= NEEDED[cls]


def rely_on(recorder: GuardRecorder, cls: type, name: str) -> None:
    """The class has torch's attribute of this name: a node that calls it by its name finds what was traced."""
    if name not in recorder.class_order(cls).entries:
        recorder.class_entry(cls, name, look_up(cls, name))
    if is_replaced(cls, name):
        raise Break("replaced attribute of tensors", f"torch.Tensor.{name} is not torch's", HINT)


def read(attributes: ClassLookups, proxy: TensorProxy, name: str) -> Any:
    """``proxy.name``: what the program has added to the tensor's class, or what torch has."""
    rely_on(attributes.objects.guards, proxy.cls, name)
    base = next((base for base in proxy.cls.__mro__ if name in vars(base)), object)
    if base in KNOWN and name not in TORCHS:
        return attributes.bind(attributes.on_type(proxy.cls, name), proxy, proxy.cls)
    found = attributes.tensors.attribute(proxy, name, attributes.objects.enter)
    return found if issubclass(type(found), type) else attributes.objects.made(found)
