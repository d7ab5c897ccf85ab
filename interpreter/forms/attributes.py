"""getattr() and its kin, isinstance(), object's own attribute methods."""
from __future__ import annotations

from typing import Any

from ..domain.core import is_a, is_class
from ..private_builtins import ORIGINAL as builtins
from .registry import form, method_form


@form(builtins.getattr)
def getattr_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 2 <= len(args) <= 3 or not is_a(args[1], str):
        return domain.native(builtins.getattr, *args, **kwargs)
    try:
        return domain.get_attr(args[0], args[1])
    except AttributeError as error:
        if len(args) == 2:
            raise
        domain.machine.swallow(error)
    return args[2]


@form(builtins.hasattr)
def hasattr_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not is_a(args[1], str):
        return domain.native(builtins.hasattr, *args, **kwargs)
    try:
        domain.get_attr(args[0], args[1])
        return True
    except AttributeError as error:
        domain.machine.swallow(error)
    return False


@form(builtins.setattr)
def setattr_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or not is_a(args[1], str):
        return domain.native(builtins.setattr, *args, **kwargs)
    return domain.set_attr(*args)


@form(builtins.delattr)
def delattr_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not is_a(args[1], str):
        return domain.native(builtins.delattr, *args, **kwargs)
    return domain.del_attr(*args)


@form(builtins.isinstance)
def isinstance_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return domain.native(builtins.isinstance, *args, **kwargs)
    return domain.is_instance(*args)


@form(builtins.issubclass)
def issubclass_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return domain.native(builtins.issubclass, *args, **kwargs)
    return domain.is_subclass(*args)


@method_form(object, "__getattribute__")
def object_getattribute(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not is_a(args[1], str) or is_class(args[0]):
        return domain.native(object.__getattribute__, *args, **kwargs)
    return domain.get_attr_generic(args[0], args[1])


@method_form(object, "__setattr__")
def object_setattr(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or not is_a(args[1], str) or is_class(args[0]):
        return domain.native(object.__setattr__, *args, **kwargs)
    return domain.set_attr_plainly(*args)


@method_form(object, "__delattr__")
def object_delattr(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or not is_a(args[1], str) or is_class(args[0]):
        return domain.native(object.__delattr__, *args, **kwargs)
    return domain.del_attr_plainly(*args)


@method_form(type, "__call__")
def type_call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not args or not is_class(args[0]) or args[0] is type:
        return domain.native(type.__call__, *args, **kwargs)
    return domain.construct(args[0], args[1:], kwargs)


