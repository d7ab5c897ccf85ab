"""Generators, coroutines and asynchronous iteration."""
from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from ..errors import UNROUTED
from ..shells import Wrapped, make_shell
from ..tables.texts import AWAIT_A_COROUTINE, AWAIT_NOT_AN_ITERATOR, NOT_AWAITABLE
from .core import MISSING, Core, is_a, lookup, special, type_name, wrong_type

CO_ITERABLE_COROUTINE = 0x100
CO_COROUTINE = 0x80


class Generators(Core):
    """What yield, yield from, await, async for and async with do."""

    def make_generator(self, frame: Any) -> Any:
        """A real generator, coroutine or async generator whose body is the frame."""
        return make_shell(self.machine, frame)

    def get_yield_from_iter(self, frame: Any, value: Any) -> Any:
        tp = type(value)
        if tp is GeneratorType:
            return value
        if tp is CoroutineType:
            if not frame.code.co_flags & (CO_COROUTINE | CO_ITERABLE_COROUTINE):
                raise TypeError("cannot 'yield from' a coroutine object in a non-coroutine generator")
            return value
        return self.get_iter(value)

    def send(self, receiver: Any, value: Any) -> tuple[bool, Any]:
        """(True, what was yielded) or (False, what was returned)."""
        tp = type(receiver)
        try:
            if tp is GeneratorType or tp is CoroutineType:
                return True, self.native(receiver.send, value)
            if value is None:
                raw = special(tp, "__next__")
                return True, self.native(next, receiver) if raw is None else self.call_special(raw, receiver, [])
            return True, self.call(self.get_attr(receiver, "send"), [value], {})
        except StopIteration as error:
            self.machine.swallow(error)
            self.machine.propagating = self.machine.clean = None  # the GeneratorExit that aclose() made is over
            result = error.value
        return False, result

    def stopiteration_error(self, frame: Any, exc: BaseException) -> BaseException:
        """PEP 479, as 3.12's bytecode asks for it: what leaves the generator instead of `exc`."""
        kind = None
        flags = frame.code.co_flags
        what = "async generator" if flags & 0x200 else "coroutine" if flags & 0x80 else "generator"
        if is_a(exc, StopIteration):
            kind = "StopIteration"
        elif flags & 0x200 and is_a(exc, StopAsyncIteration):
            kind = "StopAsyncIteration"
        if kind is None:
            return exc
        error = RuntimeError(f"{what} raised {kind}")
        error.__cause__ = exc
        error.__context__ = exc
        return error

    def get_awaitable(self, value: Any, where: int) -> Any:
        """The iterator that `await value` drives; `where` is 1 under `async with`'s enter, 2 under its exit."""
        tp = type(value)
        if tp is CoroutineType:
            if self.machine.awaited_by(value) is not None:
                raise RuntimeError("coroutine is being awaited already")
            return value
        if tp is GeneratorType and value.gi_code.co_flags & CO_ITERABLE_COROUTINE:
            return value
        raw = lookup(tp, "__await__")
        if raw is MISSING or raw is None:
            if where:
                name = "__aenter__" if where == 1 else "__aexit__"
                raise TypeError(
                    f"'async with' received an object from {name} that does not implement __await__: {type_name(tp)}"
                )
            raise wrong_type(NOT_AWAITABLE, value)
        iterator = self.call(self.bind_descriptor(raw, value, tp), [], {})
        kind = type(iterator)
        if kind is CoroutineType or (kind is GeneratorType and iterator.gi_code.co_flags & CO_ITERABLE_COROUTINE):
            raise wrong_type(AWAIT_A_COROUTINE, iterator, value)
        if lookup(kind, "__next__") is MISSING:
            raise wrong_type(AWAIT_NOT_AN_ITERATOR, iterator, value)
        return iterator

    def get_aiter(self, value: Any) -> Any:
        tp = type(value)
        raw = lookup(tp, "__aiter__")
        if raw is MISSING or raw is None:
            raise TypeError(f"'async for' requires an object with __aiter__ method, got {type_name(tp)}")
        iterator = self.call(self.bind_descriptor(raw, value, tp), [], {})
        kind = type(iterator)
        if lookup(kind, "__anext__") is MISSING:
            raise TypeError(
                "'async for' received an object from __aiter__ that does not implement __anext__: " + type_name(kind)
            )
        return iterator

    def get_anext(self, iterator: Any) -> Any:
        tp = type(iterator)
        if tp is AsyncGeneratorType:
            return self.native(AsyncGeneratorType.__anext__, iterator)
        raw = lookup(tp, "__anext__")
        if raw is MISSING or raw is None:
            raise TypeError(f"'async for' requires an iterator with __anext__ method, got {type_name(tp)}")
        awaitable = self.call(self.bind_descriptor(raw, iterator, tp), [], {})
        try:
            return self.get_awaitable(awaitable, 0)
        except Exception as error:  # of any kind: CPython's _PyErr_FormatFromCause
            if is_a(error, UNROUTED):
                raise
            reason = self.machine.swallow(error)
        message = f"'async for' received an invalid object from __anext__: {type_name(type(awaitable))}"
        wrong = TypeError(message)
        wrong.__cause__ = wrong.__context__ = reason
        raise wrong

    def before_async_with(self, manager: Any) -> tuple[Any, Any]:
        """(bound __aexit__, what __aenter__ returned, not awaited yet)."""
        return self.enter(manager, "__aenter__", "__aexit__", "asynchronous context manager")

    def async_gen_wrap(self, value: Any) -> Any:
        """Marks what an async generator yields to its consumer, apart from what its awaits yield to the loop."""
        return Wrapped(value)
