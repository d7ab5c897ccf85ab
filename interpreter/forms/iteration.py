"""iter(), next(), len() and what walks an iterable whose methods are Python."""
from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from ..domain.containers import MEASURING, SAMPLES, by_items, for_c
from ..domain.core import special
from ..natives import IN_BETWEEN
from ..private_builtins import ORIGINAL as builtins
from ..sentinels import STOP
from .registry import form, method_form, operation


def is_native_iterable(domain: Any, value: Any) -> bool:
    """Whether C code can walk `value` without running Python methods natively (generators resume into the machine)."""
    tp = type(value)
    return special(tp, "__iter__") is None and special(tp, "__getitem__") is None and special(tp, "__next__") is None


@form(builtins.iter)
def iter_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 1 <= len(args) <= 2:
        return domain.native(builtins.iter, *args, **kwargs)
    if len(args) == 2 and callable(args[0]):
        return domain.native(builtins.iter, domain.machine.called_back(args[0]), args[1])
    return domain.get_iter(*args)


@form(builtins.next)
def next_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or not 1 <= len(args) <= 2:
        return domain.native(builtins.next, *args, **kwargs)
    raw = special(type(args[0]), "__next__")
    if raw is None:
        return domain.native(builtins.next, *args)
    if len(args) == 1:
        return domain.call_special(raw, args[0], [])
    value = domain.next_item(args[0])
    return args[1] if value is STOP else value


operation(builtins.len, "length", 1)


def walked(domain: Any, value: Any, measured: bool = False) -> Any:
    """An iterable for C code with the same items; Python iteration methods are interpreted as it is walked.

    `measured`: the C code asks for the length first (PyObject_LengthHint), once it has the iterator.
    """
    if is_native_iterable(domain, value) or (domain.interprets_callbacks and by_items(type(value))):
        return value
    iterator = domain.get_iter(value)
    if measured:
        domain.length_hint(value)
    return for_c(iterator) if special(type(iterator), "__next__") is None else walk(domain, iterator)


def walk(domain: Any, iterator: Any) -> Iterator[Any]:
    """A native iterator over an interpreted one."""
    while (value := domain.next_item(iterator)) is not STOP:
        yield value


def walking(native: Any) -> None:
    """A C callable whose first argument is an iterable that it walks."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if args:
            args = [walked(domain, args[0], native in MEASURING), *args[1:]]
        return domain.native(native, *args, **kwargs)


for native in (list, tuple, set, frozenset, enumerate, sum):
    walking(native)


def reduce_form(kind: Any) -> None:
    """An iterator's __reduce__ looks iter() or reversed() up in the builtins of the frame that calls it."""

    @method_form(kind, "__reduce__")
    def reduce(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        frame = domain.machine.frame
        if frame is None:
            return domain.native(kind.__reduce__, *args, **kwargs)
        caller = FunctionType(CALLER, {"__name__": IN_BETWEEN, "__builtins__": frame.builtins})
        return domain.native(caller, kind.__reduce__, args, kwargs)


CALLER = (lambda function, args, kwargs: function(*args, **kwargs)).__code__
REVERSIBLE: tuple[Any, ...] = ([], {}, {}.values(), {}.items())
BY_ITEMS: Any = type("", (), {"__getitem__": 0})
ITERATORS = (
    *map(iter, SAMPLES), *map(reversed, REVERSIBLE), iter(bytearray()), iter(array("b")), iter(OrderedDict()),
    iter(lambda: 0, 0), iter(BY_ITEMS()),
)  # fmt: skip
for native in {type(iterator) for iterator in ITERATORS}:
    reduce_form(native)


@form(zip)
def zip_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return domain.native(zip, *[walked(domain, arg) for arg in args], **kwargs)  # noqa: B905  (the caller says)


def quantifier(builtin: Any, decides: bool) -> None:
    """`any` and `all`: an item whose truth is `decides` ends them."""

    @form(builtin)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or len(args) != 1:
            return domain.native(builtin, *args, **kwargs)
        iterator = domain.get_iter(args[0])
        while (value := domain.next_item(iterator)) is not STOP:
            if domain.truth(value) is decides:
                return decides
        return not decides


quantifier(any, True)
quantifier(all, False)
