"""Faults to plant in the machine, one at a time: what a fuzzer is worth is how many of them it finds.

A fault is (name, place, replacement). Opcode handlers are replaced where they are registered, methods of the domain and
of the machine on their classes. Programs are decoded anew under a fault.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator
from typing import Any

from .compare import compiled, difference, native_outcome, piece_code

Patch = Callable[[], "contextlib.AbstractContextManager[None]"]
FAULTS: dict[str, Patch] = {}


@contextlib.contextmanager
def handler_patched(names: tuple[str, ...], make: Callable[[Any], Any]) -> Iterator[None]:
    from moebius.interpreter.registry import HANDLERS

    before = {name: HANDLERS[name] for name in names if name in HANDLERS}
    assert before, f"none of {names} is an opcode handler"
    HANDLERS.update({name: make(handler) for name, handler in before.items()})
    piece_code.cache_clear()  # what is shared has been decoded with the right handlers
    try:
        yield
    finally:
        HANDLERS.update(before)
        piece_code.cache_clear()


@contextlib.contextmanager
def attribute_patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def opcode_fault(title: str, *names: str) -> Callable[[Callable[[Any], Any]], None]:
    """The function makes a faulty handler of the right one."""

    def register(make: Callable[[Any], Any]) -> None:
        FAULTS[title] = lambda: handler_patched(names, make)

    return register


def domain_fault(title: str, method: str) -> Callable[[Callable[[Any], Any]], None]:
    """The function makes a faulty method of the domain (given as the right one)."""

    def register(make: Callable[[Any], Any]) -> None:
        def patch() -> contextlib.AbstractContextManager[None]:
            from moebius.interpreter import Domain

            owner = next(cls for cls in Domain.__mro__ if method in cls.__dict__)
            return attribute_patched(owner, method, make)

        FAULTS[title] = patch

    return register


def machine_fault(title: str, method: str) -> Callable[[Callable[[Any], Any]], None]:
    def register(make: Callable[[Any], Any]) -> None:
        def patch() -> contextlib.AbstractContextManager[None]:
            from moebius.interpreter import Machine

            return attribute_patched(Machine, method, make)

        FAULTS[title] = patch

    return register


def module_fault(title: str, module: str, function: str) -> Callable[[Callable[[Any], Any]], None]:
    def register(make: Callable[[Any], Any]) -> None:
        def patch() -> contextlib.AbstractContextManager[None]:
            import importlib

            return attribute_patched(importlib.import_module(f"moebius.interpreter.{module}"), function, make)

        FAULTS[title] = patch

    return register


# --- operands and their order


@domain_fault("binary operands swapped", "binary")
def _(right: Any) -> Any:
    return lambda self, op, a, b: right(self, op, b, a)


@domain_fault("comparison operands swapped", "compare")
def _(right: Any) -> Any:
    return lambda self, op, a, b: right(self, op, b, a)


@domain_fault("<= taken for <", "compare")
def _(right: Any) -> Any:
    return lambda self, op, a, b: right(self, "<" if op == "<=" else op, a, b)


@opcode_fault("unpacked in the wrong order", "UNPACK_SEQUENCE")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], count: int) -> None:
        stack.extend(frame.domain.unpack(stack.pop(), count))

    return handler


@opcode_fault("the starred target gets one item too few", "UNPACK_EX")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], counts: tuple[int, int]) -> None:
        right(frame, stack, counts)
        if len(stack[-1 - counts[0]]) > 1:
            stack[-1 - counts[0]] = stack[-1 - counts[0]][:-1]

    return handler


@domain_fault("dict display: the first of equal keys wins", "map_add")
def _(right: Any) -> Any:
    return lambda self, target, key, value: target.setdefault(key, value)


@opcode_fault("an f-string's parts are reversed", "BUILD_STRING")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], count: int) -> None:
        stack[-count:] = stack[-count:][::-1]
        right(frame, stack, count)

    return handler


@opcode_fault("SWAP does nothing", "SWAP")
def _(right: Any) -> Any:
    return lambda frame, stack, depth: None


# --- control flow


@opcode_fault("a jump is taken when it should not be", "POP_JUMP_IF_NONE")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], target: int) -> int | None:
        return None if stack.pop() is None else target

    return handler


@domain_fault("an object with __bool__ is always true", "truth")
def _(right: Any) -> Any:
    return lambda self, value: bool(value) if type(value).__module__ == "builtins" else True


@opcode_fault("a for loop drops its first item", "GET_ITER")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], operand: Any) -> None:
        right(frame, stack, operand)
        frame.domain.next_item(stack[-1])

    return handler


@opcode_fault("a comprehension loses its zeros", "LIST_APPEND")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], depth: int) -> None:
        if type(stack[-1]) is int and stack[-1] == 0:
            stack.pop()
        else:
            right(frame, stack, depth)

    return handler


# --- effects


@domain_fault("an in-place operator makes a new object", "binary")
def _(right: Any) -> Any:
    return lambda self, op, a, b: right(self, op.rstrip("="), a, b)


@domain_fault("an attribute is not deleted", "del_attr")
def _(right: Any) -> Any:
    return lambda self, obj, name: None


@domain_fault("an item is stored twice", "set_item")
def _(right: Any) -> Any:
    def method(self: Any, obj: Any, key: Any, value: Any) -> None:
        right(self, obj, key, value)
        right(self, obj, key, value)

    return method


@opcode_fault("del of a local does nothing", "DELETE_FAST")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], index: int) -> None:
        right.__globals__["load_fast"](frame, stack, index)
        stack.pop()

    return handler


@opcode_fault("a store into a cell makes a new cell", "STORE_DEREF")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], index: int) -> None:
        frame.locals[index] = frame.domain.make_cell(stack.pop())

    return handler


@opcode_fault("a closure gets a copy of the cell", "COPY_FREE_VARS")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], count: int) -> None:
        right(frame, stack, count)
        from types import CellType

        for index in range(len(frame.locals) - count, len(frame.locals)):
            try:
                frame.locals[index] = CellType(frame.locals[index].cell_contents)
            except ValueError:
                pass

    return handler


@domain_fault("a global store goes to the builtins' names", "store_global")
def _(right: Any) -> Any:
    return lambda self, frame, name, value: None


@domain_fault("keyword defaults are lost", "make_function")
def _(right: Any) -> Any:
    def method(self: Any, frame: Any, code: Any, defaults: Any, kwdefaults: Any, annotations: Any, closure: Any) -> Any:
        return right(self, frame, code, defaults, None, annotations, closure)

    return method


@domain_fault("an item is read by its absolute index", "get_item")
def _(right: Any) -> Any:
    return lambda self, obj, key: right(self, obj, abs(key) if type(key) is int else key)


@domain_fault("a data descriptor's __set__ is not called", "set_attr")
def _(right: Any) -> Any:
    def method(self: Any, obj: Any, name: str, value: Any) -> None:
        if hasattr(obj, "__dict__") and not isinstance(obj, type):
            obj.__dict__[name] = value
        else:
            right(self, obj, name, value)

    return method


# --- exceptions


@machine_fault("the context of an exception is lost", "handled")
def _(right: Any) -> Any:
    return lambda self: None


@opcode_fault("the handled exception is not restored", "POP_EXCEPT")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], operand: Any) -> None:
        stack.pop()

    return handler


@domain_fault("except matches subclasses only by identity", "exc_match")
def _(right: Any) -> Any:
    def method(self: Any, exc: Any, kind: Any) -> bool:
        return right(self, exc, kind) and (type(exc) in kind if isinstance(kind, tuple) else type(exc) is kind)

    return method


@domain_fault("the cause of an exception is lost", "raise_")
def _(right: Any) -> Any:
    return lambda self, frame, exc, cause: right(self, frame, exc, self.no_cause)


@opcode_fault("an exception is swallowed where a finally block ends", "RERAISE")
def _(right: Any) -> Any:
    def handler(frame: Any, stack: list[Any], depth: int) -> int:
        from moebius.interpreter.sentinels import LEAVE

        frame.value = stack.pop()
        return LEAVE

    return handler


@domain_fault("with: an exit that returns true does not swallow", "exit_with")
def _(right: Any) -> Any:
    def method(self: Any, leave: Any, triple: Any) -> Any:
        right(self, leave, triple)
        return False

    return method


@domain_fault("with: __enter__ is called twice", "load_special" if "LOAD_SPECIAL" in dis.opmap else "before_with")
def _(right: Any) -> Any:
    def method(self: Any, manager: Any, *name: str) -> Any:
        if hasattr(type(manager), "__enter__"):
            type(manager).__enter__(manager)
        return right(self, manager, *name)

    return method


@module_fault("the traceback's line is the function's first", "machine", "add_entry")
def _(right: Any) -> Any:
    def add(frame: Any, following: Any, ends: bool) -> Any:
        from types import TracebackType

        entry = right(frame, following, ends)
        return TracebackType(entry.tb_next, entry.tb_frame, entry.tb_lasti, frame.code.co_firstlineno)

    return add


@domain_fault("except* matches nothing", "exc_group_match")
def _(right: Any) -> Any:
    return lambda self, exc, kind: (exc, None)


# --- generators and coroutines


@machine_fault("what is sent into a generator is lost", "resume")
def _(right: Any) -> Any:
    return lambda self, frame, value: right(self, frame, None)


@machine_fault("throw() does not reach what is delegated to", "delegate")
def _(right: Any) -> Any:
    from moebius.interpreter import UNSET

    return lambda self, frame: UNSET


@domain_fault("yield from loses the delegate's return value", "send")
def _(right: Any) -> Any:
    def method(self: Any, receiver: Any, value: Any) -> tuple[bool, Any]:
        yielded, result = right(self, receiver, value)
        return yielded, result if yielded else None

    return method


@domain_fault("a generator's StopIteration is not turned into RuntimeError", "next_item")
def _(right: Any) -> Any:
    def method(self: Any, iterator: Any) -> Any:
        from moebius.interpreter import STOP

        try:
            return right(self, iterator)
        except RuntimeError:
            return STOP

    return method


# --- calls, classes, matching


@domain_fault("the reflected operator is never tried", "binary_slots")
def _(right: Any) -> Any:
    def method(self: Any, left: Any, other: Any, forward: str, reflected: str) -> Any:
        return right(self, left, other, forward, "__no_such_operator__")

    return method


@domain_fault("__getattr__ is asked before the attribute is looked up", "get_attr_by_protocol")
def _(right: Any) -> Any:
    def method(self: Any, obj: Any, name: str, tp: type) -> Any:
        hook = getattr(tp, "__getattr__", None)
        if hook is not None and not name.startswith("__"):
            return self.call(hook, [obj, name], {})
        return right(self, obj, name, tp)

    return method


@domain_fault("keyword arguments of ** are evaluated to an empty dict", "dict_merge")
def _(right: Any) -> Any:
    return lambda self, target, other, function: None


@domain_fault("a sequence pattern matches strings", "match_sequence")
def _(right: Any) -> Any:
    return lambda self, value: isinstance(value, str) or right(self, value)


@domain_fault("a class pattern ignores its type", "match_class")
def _(right: Any) -> Any:
    return lambda self, subject, cls, count, names: None


@domain_fault("the conversion of an f-string is ignored", "format_value")
def _(right: Any) -> Any:
    return lambda self, value, conversion, spec: right(self, value, "", spec)


@domain_fault("a slice loses its step", "make_slice")
def _(right: Any) -> Any:
    return lambda self, *parts: right(self, *parts[:2])


# --- the hunt


def corpus(count: int, first: int = 0) -> list[tuple[str, Any]]:
    """Programs that the fuzzer generates from fixed seeds, with what they do natively."""
    from .choices import SeededChoices
    from .grammar import generate

    found = []
    for number in range(first, first + count):
        source = generate(SeededChoices(number))
        native = native_outcome(compiled(source))
        if native is not None:
            found.append((source, native))
    return found


def programs_until_found(fault: str, programs: list[tuple[str, Any]]) -> int | None:
    """How many programs the fuzzer needs to notice the fault ("no fault": none); None where none of them shows it."""
    with FAULTS[fault]() if fault != "no fault" else contextlib.nullcontext():
        for number, (source, native) in enumerate(programs):
            try:
                found = difference(source, native, seconds=10.0)
            except Exception as error:  # the broken machine fell over: noticed as well
                found = repr(error)
            if found:
                return number + 1
    return None
