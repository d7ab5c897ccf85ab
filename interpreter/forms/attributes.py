"""getattr() and its kin, isinstance(), object's own attribute methods."""
from __future__ import annotations

from typing import Any

from ..domain.core import is_a, is_class
from ..private_builtins import ORIGINAL as builtins
from .registry import form, method_form, operation


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


operation(builtins.setattr, "set_attr", 3, named=True)
operation(builtins.delattr, "del_attr", 2, named=True)
operation(builtins.isinstance, "is_instance", 2)
operation(builtins.issubclass, "is_subclass", 2)


def object_form(name: str, method: str, count: int) -> None:
    """One of object's own methods, of what is no class: an operation of the domain's."""
    native = vars(object)[name]

    @method_form(object, name)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != count or not is_a(args[1], str) or is_class(args[0]):
            return domain.native(native, *args, **kwargs)
        return getattr(domain, method)(*args)


object_form("__getattribute__", "get_attr_generic", 2)
object_form("__setattr__", "set_attr_plainly", 3)
object_form("__delattr__", "del_attr_plainly", 2)


@method_form(type, "__call__")
def type_call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not args or not is_class(args[0]) or args[0] is type:
        return domain.native(type.__call__, *args, **kwargs)
    return domain.construct(args[0], args[1:], kwargs)


