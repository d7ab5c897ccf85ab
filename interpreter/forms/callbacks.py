"""C callables that take a function and call it. Where it may be called later, they get a native one that interprets."""
from __future__ import annotations

import _thread
import functools
import weakref
from typing import Any

from ..private_builtins import ORIGINAL as builtins
from .iteration import walked
from .registry import form, method_form


@form(builtins.sorted)
def sorted_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args:
        args = [walked(domain, args[0], measured=True), *args[1:]]
    return domain.native(sorted, *args, **with_key(domain, kwargs))


def with_key(domain: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("key") is not None:
        return {**kwargs, "key": domain.machine.called_back(kwargs["key"])}
    return kwargs


@method_form(list, "sort")
def list_sort(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return domain.native(list.sort, *args, **with_key(domain, kwargs))


def extreme_form(native: Any) -> None:
    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1:
            args = [walked(domain, args[0])]
        return domain.native(native, *args, **with_key(domain, kwargs))


extreme_form(min)
extreme_form(max)


def mapping_form(native: Any) -> None:
    """map() and filter(): a function, then iterables."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) >= 2:
            function = args[0] if args[0] is None else domain.machine.called_back(args[0])
            args = [function, *(walked(domain, arg) for arg in args[1:])]
        return domain.native(native, *args, **kwargs)


mapping_form(map)
mapping_form(filter)


def weak_form(native: Any, position: int) -> None:
    """Weak references: their callback runs wherever the object dies."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) > position and args[position] is not None:
            args = [*args[:position], domain.machine.callback(args[position]), *args[position + 1 :]]
        return domain.native(native, *args, **kwargs)


weak_form(weakref.ref, 1)
weak_form(weakref.proxy, 1)
weak_form(weakref.ref.__new__, 2)
weak_form(weakref.ref.__init__, 2)


def thread_form(name: str) -> None:
    """A new thread has a machine of its own."""
    native = getattr(_thread, name, None)
    if native is None:
        return

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if args and callable(args[0]):
            args = [domain.machine.callback(args[0]), *args[1:]]
        return domain.native(native, *args, **kwargs)


for thread_starter in ("start_new_thread", "start_new", "start_joinable_thread"):
    thread_form(thread_starter)


@form(functools.reduce)
def reduce(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) >= 2:
        args = [domain.machine.called_back(args[0]), walked(domain, args[1]), *args[2:]]
    return domain.native(functools.reduce, *args, **kwargs)
