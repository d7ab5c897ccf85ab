"""Callables in C: which object a method belongs to, and what made it.

In a builtin function's ``__self__`` CPython keeps what its maker gave: the object or class of a method; the module of
a function, or nothing; or an object of the binding's own (pybind11's function record, a capsule). A method is what an
entry of its owner's class makes for that owner.
"""

from __future__ import annotations

import types
from typing import Any

KINDS = (types.BuiltinMethodType, types.MethodWrapperType)  # (a builtin method that knows its class is of a subtype)
OF_OBJECTS = (types.MethodDescriptorType, types.WrapperDescriptorType)
OF_CLASSES = (types.ClassMethodDescriptorType, types.BuiltinMethodType)  # (the latter is ``__new__``)


def is_c_callable(value: Any) -> bool:
    """Whether the value is a function of C's, or a bound method of C's."""
    return issubclass(type(value), KINDS)


def bound(maker: Any, owner: Any) -> Any:
    """The method that an entry of a class makes for an object, or for a class."""
    if type(maker) in OF_CLASSES:
        return maker.__get__(None, owner) if type(maker) is OF_CLASSES[0] else maker
    return maker.__get__(owner, type(owner))  # (without the type CPython 3.11 to 3.13 crash: re.Pattern.match)


def entries(owner: Any, name: str) -> list[tuple[Any, bool]]:
    """What the classes of an object have by this name, in order, and whether they are its own as a class."""
    places = [(place, True) for place in owner.__mro__] if issubclass(type(owner), type) else []
    places += [(place, False) for place in type(owner).__mro__]
    return [(place.__dict__[name], own) for place, own in places if name in place.__dict__]


def maker_of(method: Any) -> Any:
    """The entry of its owner's class that a method in C was made from. None for a function, whatever its ``__self__``
    is."""
    if not is_c_callable(method):
        return None
    for entry, own in entries(method.__self__, method.__name__):
        if type(entry) in (OF_CLASSES if own else OF_OBJECTS) and bound(entry, method.__self__) == method:
            return entry
    return None


def owner_of(method: Any) -> Any:
    """The object or class that a method in C belongs to, None for a function."""
    wrapper = issubclass(type(method), types.MethodWrapperType)  # made for an object, always
    return method.__self__ if wrapper or maker_of(method) is not None else None


def hidden_maker(method: Any) -> Any:
    """``maker_of``, where its owner's attribute of that name is another (``super()`` makes such), or asking for it runs
    the user's code."""
    if (maker := maker_of(method)) is None:
        return None
    classes = type(method.__self__).__mro__
    asks = next(base.__dict__["__getattribute__"] for base in classes if "__getattribute__" in base.__dict__)
    plain = entries(method.__self__, method.__name__)[0][0] is maker and type(asks) is types.WrapperDescriptorType
    return None if plain else maker


def definition_of(method: Any) -> Any:
    """What all bound forms of a method share: its function in Python, or its maker in C."""
    return method.__func__ if type(method) is types.MethodType else maker_of(method)
