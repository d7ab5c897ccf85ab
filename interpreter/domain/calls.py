"""Calls: functions, methods, classes, callable objects, and the C callables that need an interpreted form."""
from __future__ import annotations

import functools
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

from ..natives import call_outside, watch_finalizer
from ..tables.texts import STAR_IN_CALL
from .containers import MEASURING
from .core import MISSING, Core, is_a, is_class, is_heap, is_subtype, lookup, special, type_name, wrong_type

NATIVE_CALLABLES = frozenset({
    BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, ClassMethodDescriptorType,
})  # fmt: skip
TYPE_CALL = type.__dict__["__call__"]


class Calls(Core):
    """Calling things, and making functions."""

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`callee(*args, **kwargs)`; Python code that it leads to is interpreted."""
        tp = type(callee)
        if tp is FunctionType:
            return self.call_function(callee, args, kwargs)
        if tp is MethodType:
            args.insert(0, callee.__self__)
            return self.call(callee.__func__, args, kwargs)
        if tp in NATIVE_CALLABLES:
            return self.call_native(callee, args, kwargs)
        if is_class(callee):
            return self.call_class(callee, args, kwargs)
        if tp is functools.partial:
            return self.call(callee.func, [*callee.args, *args], {**callee.keywords, **kwargs})
        if tp is staticmethod:
            return self.call(callee.__func__, args, kwargs)
        raw = special(tp, "__call__")
        if raw is not None:
            if type(raw) is FunctionType:
                return self.call_function(raw, [callee, *args], kwargs)
            return self.call(self.bind_descriptor(raw, callee, tp), args, kwargs)
        return self.call_native(callee, args, kwargs)

    def call_native(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call something implemented in C, or its interpreted form where it has one."""
        form = self.machine.interpreted_form(callee)
        if form is not None:
            return form(self, args, kwargs)
        return self.native(callee, *args, **kwargs)

    def call_spread(self, callee: Any, args: Any, kwargs: Any) -> Any:
        """`callee(*args, **kwargs)` with args any iterable and kwargs any mapping (a fresh dict from the compiler)."""
        if type(args) is not tuple:
            self.require_iterable(callee, args)
            args = self.drain(args, hinted=tuple in MEASURING)
        if type(kwargs) is not dict:
            merged: dict[Any, Any] = {}
            self.dict_merge(merged, kwargs, callee)
            kwargs = merged
        args = list(args)
        if all(type(name) is str for name in kwargs):  # of any other names, a copy would call __eq__
            kwargs = dict(kwargs)
        try:
            return self.call(callee, args, kwargs)
        except BaseException:
            args.clear()  # those that did not fit die before the keywords
            raise

    def require_iterable(self, callee: Any, args: Any) -> None:
        """What follows the star in `callee(*args)` (check_args_iterable, ceval.c)."""
        tp = self.class_of(args)
        if lookup(tp, "__iter__") is MISSING and lookup(tp, "__getitem__") is MISSING:
            raise wrong_type(STAR_IN_CALL, args, function=lambda: self.function_text(callee), kind=tp)

    def call_function(self, function: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Bind the arguments, run the frame; a generator function gives its generator.

        The arguments become the frame's alone, `args` and `kwargs` empty: an argument may die before the call returns.
        """
        machine = self.machine
        frame = machine.bind(function, args, kwargs)
        if frame.program.opaque and self.interprets_callbacks:
            return call_outside(function, *args, **kwargs)
        args.clear()
        if kwargs:
            kwargs.clear()
        return machine.run(frame)

    def call_class(self, cls: type, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The metaclass's __call__, or type.__call__."""
        form = self.machine.interpreted_form(cls)
        if form is not None:
            return form(self, args, kwargs)
        if not is_heap(cls) and not (cls is type and len(args) == 3):
            return self.native(cls, *args, **kwargs)
        meta = type(cls)
        if meta is not type:
            raw = special(meta, "__call__")
            if raw is not None:
                return self.call(self.bind_descriptor(raw, cls, meta), args, kwargs)
            if lookup(meta, "__call__") is not TYPE_CALL:
                return self.native(cls, *args, **kwargs)
        return self.construct(cls, args, kwargs)

    def construct(self, cls: type, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """type.__call__: __new__, then __init__ where the result is an instance (Objects/typeobject.c type_call)."""
        new = lookup(cls, "__new__")
        init = special(cls, "__init__")
        python_new = type(new) is not BuiltinFunctionType
        if not python_new and init is None and not is_subtype(cls, type):
            watch_finalizer(cls)
            return self.native(type.__call__, cls, *args, **kwargs)
        if python_new:
            bound = new.__func__ if type(new) is staticmethod else self.bind_descriptor(new, None, cls)
            made = self.call(bound, [cls, *args], dict(kwargs))
        else:
            made = self.call_native(new, [cls, *args], kwargs)
        watch_finalizer(cls)
        if not is_subtype(type(made), cls):  # PyObject_TypeCheck: no __subclasscheck__
            return made
        made_type = type(made)
        init = special(made_type, "__init__")
        if init is None:
            self.native(made_type.__init__, made, *args, **kwargs)
            return made
        if type(init) is FunctionType:
            result = self.call_function(init, [made, *args], kwargs)
        else:
            result = self.call(self.bind_descriptor(init, made, made_type), args, kwargs)
        if result is not None:
            raise TypeError(f"__init__() should return None, not '{type_name(type(result))}'")
        return made

    def make_function(
        self,
        frame: Any,
        code: CodeType,
        defaults: tuple[Any, ...] | None,
        kwdefaults: dict[str, Any] | None,
        annotations: Any,
        closure: tuple[Any, ...] | None,
    ) -> Any:
        """A real function. `annotations` is a dict or a flat tuple of names and values, as the compiler emits it."""
        if closure is None and code.co_freevars:
            closure = tuple(self.make_cell_unset() for name in code.co_freevars)  # 3.13 sets the closure next
        function = FunctionType(code, frame.globals, code.co_name, defaults, closure)
        function.__qualname__ = code.co_qualname
        if kwdefaults is not None:
            function.__kwdefaults__ = kwdefaults
        if annotations is not None:
            set_annotations(function, annotations)
        return function

    def set_function_attribute(self, frame: Any, function: FunctionType, flag: int, value: Any) -> Any:
        """`flag`: 1 defaults, 2 keyword defaults, 4 annotations, 8 closure, 16 the function that makes annotations."""
        if flag == 1:
            function.__defaults__ = value
        elif flag == 2:
            function.__kwdefaults__ = value
        elif flag == 4:
            set_annotations(function, value)
        elif flag == 16:
            function.__annotate__ = value  # type: ignore[attr-defined]
            if ANNOTATE_IS_NAMED:
                value.__qualname__ = f"{function.__qualname__}.__annotate__"
        else:  # the compiler emits it first: there is nothing else to copy but by hand
            code, defaults, kwdefaults = function.__code__, function.__defaults__, function.__kwdefaults__
            made = self.make_function(frame, code, defaults, kwdefaults, None, value)
            copy_annotations(function, made)
            function = made
        return function


def is_annotate_named() -> bool:
    """Whether the function that makes a function's annotations is named after it: Python is asked."""
    names: dict[str, Any] = {}
    exec(compile("def f(x: 0): ...", __file__, "exec", dont_inherit=True), names)
    return getattr(getattr(names["f"], "__annotate__", None), "__qualname__", "").startswith("f.")


ANNOTATE_IS_NAMED = is_annotate_named()


def copy_annotations(function: FunctionType, to: FunctionType) -> None:
    annotate = getattr(function, "__annotate__", None)
    if annotate is not None:
        to.__annotate__ = annotate  # type: ignore[attr-defined]
    elif function.__annotations__:
        to.__annotations__ = dict(function.__annotations__)


def set_annotations(function: FunctionType, annotations: Any) -> None:
    if is_a(annotations, tuple):
        annotations = dict(zip(annotations[::2], annotations[1::2], strict=True))
    function.__annotations__ = annotations
