"""Attributes that a program gives to tensors: ``y.l_aux = loss`` (Tutel), ``p.main_grad = …`` (Megatron).

They are a matter of the Python object alone: no operator sees or hands on one. The residual code sets them once the
graph has run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..hook import ABSENT
from .specials import is_generic
from .tensor_class import KNOWN, look_up
from .values import Break, TensorProxy

if TYPE_CHECKING:
    from ..residual import Emitter
    from .attributes import Attributes

SET = object.__setattr__


def assign(attributes: Attributes, proxy: TensorProxy, name: str, value: Any) -> None:
    """``proxy.name = value`` of a name that torch's tensors have not."""
    objects, cls = attributes.objects, proxy.cls
    generic = cls in KNOWN and is_generic(attributes.on_type(cls, "__setattr__"), "__setattr__")
    if not generic or look_up(cls, name) is not ABSENT or not name.isidentifier():
        raise Break("attribute of a tensor is set", f"{proxy.describe()}.{name} = …", "set it outside of the step")
    objects.guards.class_entry(cls, name, ABSENT)
    objects.touch(proxy)
    if not proxy.attributes:
        objects.at_the_end.append(functools.partial(replay, proxy))
    proxy.attributes[name] = value


def replay(proxy: TensorProxy, emitter: Emitter) -> None:
    """Set them on the tensor that the graph has computed, or that came in."""
    tensor = emitter.value(proxy)
    for name, value in proxy.attributes.items():
        emitter.lines.append(f"{emitter.constant(SET)}({tensor}, {name!r}, {emitter.value(value)})")
