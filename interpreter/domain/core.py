"""What every part of the domain leans on: the machine, looking dunders up on types, calling what was found."""
from __future__ import annotations

import operator
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

from ..frame import Frame
from ..natives import reentry
from ..protocols import Machine

# Values of these types never lead from an operator back into Python code.
PLAIN = frozenset({int, float, str, bytes, bool, complex, type(None)})
MISSING = object()
# Found on a type, these run C code.
NATIVE_KINDS = frozenset({
    WrapperDescriptorType, MethodDescriptorType, ClassMethodDescriptorType, BuiltinFunctionType, GetSetDescriptorType,
    MemberDescriptorType, type(None),
})  # fmt: skip


reentry.set_lookup(MISSING, NATIVE_KINDS)
# lookup(tp, name): the raw attribute `name` along the MRO of `tp`, or MISSING. Neither runs a metaclass's Python code.
lookup: Callable[[type, str], Any] = reentry.lookup
# special(tp, name): that attribute where `tp` is a heap type and calling it would run Python code, else None.
special: Callable[[type, str], Any] = reentry.special
# What a type's own fields say; reading `tp.__flags__` would ask the metaclass's __getattribute__.
flags_of: Callable[[type], int] = reentry.flags_of
mro_of: Callable[[type], tuple[type, ...]] = reentry.mro_of
reads_plainly: Callable[[type], bool] = reentry.reads_plainly
type_name: Callable[[type], str] = reentry.type_name  # as C code's messages have it: with the module of a static type
full_name: Callable[[type], str] = reentry.full_name  # as newer messages have it: with the module of any type
is_heap: Callable[[type], bool] = reentry.is_heap  # only such a type can hold Python code
is_a = reentry.is_a  # isinstance() by real types
is_subtype: Callable[[type, type], bool] = reentry.is_subtype
is_mapping: Callable[[Any], bool] = reentry.is_mapping
is_class: Callable[[Any], bool] = reentry.is_class  # isinstance() would ask the object for its __class__


def wrong_type(
    text: str, got: Any, owner: Any = None, function: Callable[[], str] | None = None, kind: type | None = None
) -> TypeError:
    """The error of a text in tables/texts.py: what `owner`'s method gave, or `function` gets, is of the wrong type.
    kind: the class of `got` as the program sees it."""
    tp = kind or type(got)
    shown = function() if function is not None and "{function}" in text else ""  # that may run code
    names = {"owner": full_name(type(owner)), "owner_type": type_name(type(owner)), "got": full_name(tp)}
    return TypeError(text.format(**names, type=type_name(tp), function=shown))


class Core:
    """The base of the domain's parts; the parts' common needs are declared here."""

    observes = False  # True: the machine calls `observe(frame)` before each instruction
    keeps_frames = False  # True: what ran may be run again natively; variables stay, a dying generator is not run on
    interprets_callbacks = True  # False: Python functions that C code calls back run natively
    machine: Machine
    native: Any = operator.call  # native(callable, *args, **kwargs): C code; the machine puts one that takes callbacks
    # what other parts define
    call: Callable[[Any, list[Any], dict[str, Any]], Any]
    call_function: Callable[[FunctionType, list[Any], dict[str, Any]], Any]
    get_attr: Callable[[Any, str], Any]
    get_attr_or: Callable[[Any, str, Any], Any]
    get_iter: Callable[[Any], Any]
    next_item: Callable[[Any], Any]
    truth: Callable[[Any], bool]
    length: Callable[[Any], int]
    drain: Callable[..., list[Any]]
    function_text: Callable[[Any], str]
    dict_merge: Callable[[dict[Any, Any], Any, Any], None]
    make_cell_unset: Callable[[], Any]
    get_item: Callable[[Any, Any], Any]
    set_item: Callable[[Any, Any, Any], None]
    del_item: Callable[[Any, Any], None]
    enter: Callable[[Any, str, str, str], tuple[Any, Any]]
    is_instance: Callable[[Any, Any], bool]
    look_up: Callable[[Any, str], Any]

    def observe(self, frame: Frame) -> None:
        """Called before each instruction where `observes` is True; may raise, and may change frame.pc and the stack."""

    def meets_handler(self, exc: BaseException) -> None:
        """Called where `observes` is True before a try- or with-block of the frame's gets an exception; may raise a
        Signal instead."""

    def is_users(self, name: str) -> bool:
        """Whether locals() shows a variable of this name."""
        return True

    def class_of(self, value: Any) -> type:
        """The value's class as the program sees it: a domain may have stand-ins for values."""
        return type(value)

    def call_special(self, raw: Any, obj: Any, args: list[Any]) -> Any:
        """Call a dunder found by `special` on the type of `obj`."""
        if type(raw) is FunctionType:
            return self.call_function(raw, [obj, *args], {})
        return self.call(self.bind_descriptor(raw, obj, type(obj)), args, {})

    def bind_descriptor(self, raw: Any, obj: Any, owner: type) -> Any:
        """`raw.__get__(obj, owner)` where raw's type has a __get__, else raw."""
        kind = type(raw)
        get = special(kind, "__get__")
        if get is not None:
            return self.call_special(get, raw, [obj, owner])
        if kind is property and obj is not None:
            if raw.fget is None:
                return raw.__get__(obj, owner)  # raises
            return self.call(raw.fget, [obj], {})
        native = lookup(kind, "__get__")
        if native is MISSING:
            return raw
        return self.native(native, raw, obj, owner)
