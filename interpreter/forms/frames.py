"""Callables that look at the running frame: locals(), globals(), super(), exec(), sys.exc_info(), …"""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from ..domain.core import is_a, is_class, is_mapping, type_name, wrong_type
from ..errors import InterpreterError
from ..frame import Frame
from ..natives import call_outside
from ..private_builtins import ORIGINAL as builtins
from ..sentinels import UNSET
from ..shells import native_frame
from ..tables.texts import GLOBALS, NOT_GLOBALS
from .registry import form, method_form


@form(builtins.__build_class__)
def build_class(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return domain.build_class(args[0], args[1], tuple(args[2:]), kwargs)


@form(type.__new__)
def type_new(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A class gets its __module__ from the frame that makes it."""
    frame = domain.machine.frame
    if not kwargs and len(args) == 4 and is_a(args[3], dict) and not dict.__contains__(args[3], "__module__"):
        name = UNSET if frame is None else dict.get(frame.globals, "__name__", UNSET)
        if name is not UNSET:
            args = [*args[:3], {**args[3], "__module__": name}]
    return domain.native(type.__new__, *args, **kwargs)


@form(FunctionType)
def function_type(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Where its globals have no __builtins__, a function gets the frame's."""
    frame = domain.machine.frame
    if frame is None:
        return domain.native(FunctionType, *args, **kwargs)
    made = FunctionType(MAKER, {"__builtins__": frame.builtins, "FunctionType": FunctionType})
    return call_outside(made, *args, **kwargs)


MAKER = (lambda *args, **kwargs: FunctionType(*args, **kwargs)).__code__


@method_form(FrameType, "clear")
def frame_clear(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    machine = domain.machine
    frame = machine.frame_shown_as(args[0]) if args and is_a(args[0], FrameType) else None
    if frame is None:
        return domain.native(FrameType.clear, *args, **kwargs)
    if machine.is_running(frame):
        raise RuntimeError("cannot clear an executing frame")
    shell = None if frame.shell is None else frame.shell()
    native = native_frame(shell)
    if native is not None:
        domain.native(native.clear)
    return None


def namespace_form(native: Any, read: Callable[[Frame], Any]) -> None:
    """A C callable that, without arguments, gives names of the frame that calls it."""

    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return domain.native(native, *args, **kwargs) if args or kwargs else read(domain.machine.frame)


namespace_form(builtins.locals, lambda frame: frame.namespace())
namespace_form(builtins.globals, lambda frame: frame.globals)
namespace_form(builtins.vars, lambda frame: frame.namespace())


@form(builtins.dir)
def dir_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args or kwargs:
        return domain.native(builtins.dir, *args, **kwargs)
    namespace = domain.machine.frame.namespace()
    if type(namespace) is dict:
        return sorted(namespace)
    return domain.call(sorted, [domain.call(domain.get_attr(namespace, "keys"), [], {})], {})


@form(super)
def super_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not args and not kwargs:
        args = implicit(domain)
    return domain.native(super, *args, **kwargs)


def implicit(domain: Any) -> list[Any]:
    """What ``super()`` without arguments takes from the running frame: the class and the first argument."""
    frame = domain.machine.frame
    code = frame.code
    if code.co_argcount == 0:
        raise RuntimeError("super(): no arguments")
    first = frame.locals[0]
    if type(first) is CellType and 0 in frame.program.cell_indices:
        first = domain.load_cell(first)
    if first is UNSET:
        raise RuntimeError("super(): arg[0] deleted")
    if "__class__" not in code.co_freevars:
        raise RuntimeError("super(): __class__ cell not found")
    cell = frame.locals[frame.program.localsplus.index("__class__")]
    cls = domain.load_cell(cell)
    if cls is UNSET:
        raise RuntimeError("super(): empty __class__ cell")
    if not is_class(cls):
        raise RuntimeError(f"super(): __class__ is not a type ({type(cls).__name__})")
    return [cls, first]


def scope(domain: Any, what: str, globals_given: Any, locals_given: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The namespaces that exec() and eval() run in, from their arguments (by keyword from 3.13 on) or the frame."""
    frame = domain.machine.frame
    globals_given = kwargs.get("globals", globals_given)
    locals_given = kwargs.get("locals", locals_given)
    if what == "eval" and locals_given is not None and not is_mapping(locals_given):
        raise TypeError("locals must be a mapping")
    if globals_given is None:
        globals_given = frame.globals
        if locals_given is None:
            locals_given = frame.namespace()
    elif not is_a(globals_given, dict):
        if what == "exec":
            raise wrong_type(NOT_GLOBALS, globals_given)
        known = is_mapping(globals_given)
        raise TypeError(f"globals must be a {f'real {GLOBALS}; try eval(expr, {{}}, mapping)' if known else GLOBALS}")
    if locals_given is None:
        locals_given = globals_given
    elif not is_mapping(locals_given):
        raise TypeError(f"locals must be a mapping or None, not {type_name(type(locals_given))}")
    if not dict.__contains__(globals_given, "__builtins__"):
        dict.__setitem__(globals_given, "__builtins__", frame.builtins)
    return globals_given, locals_given


@form(builtins.exec)
def exec_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not 1 <= len(args) <= 3 or has_frozen_globals(args, kwargs):
        return domain.native(exec, *args, **kwargs)  # raises
    source, globals_given, locals_given = (*args, None, None)[:3]
    closure = kwargs.get("closure")
    globals_given, locals_given = scope(domain, "exec", globals_given, locals_given, kwargs)
    if is_a(source, CodeType):
        code = source
        check_closure(code, closure)
    elif closure is not None:
        raise TypeError("closure can only be used when source is a code object")
    else:
        code = compile_source(domain, source, "exec")
    domain.machine.run_code(code, globals_given, locals_given, closure or ())
    return None


def has_frozen_globals(args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether they are a frozendict (3.15), which no frame of the machine's stores into."""
    kind = getattr(builtins, "frozendict", None)
    return kind is not None and is_a(kwargs.get("globals", args[1] if len(args) > 1 else None), kind)


def check_closure(code: CodeType, closure: Any) -> None:
    """exec()'s own checks of the closure argument, with its messages."""
    if closure is None and not code.co_freevars:
        return
    if not code.co_freevars:
        raise TypeError("cannot use a closure with this code object")
    if closure is None or not is_a(closure, tuple) or len(closure) != len(code.co_freevars) or not all(
        is_a(cell, CellType) for cell in closure
    ):
        raise TypeError(f"code object requires a closure of exactly length {len(code.co_freevars)}")


@form(builtins.eval)
def eval_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not 1 <= len(args) <= 3 or has_frozen_globals(args, kwargs):
        return domain.native(eval, *args, **kwargs)  # raises
    source, globals_given, locals_given = (*args, None, None)[:3]
    globals_given, locals_given = scope(domain, "eval", globals_given, locals_given, kwargs)
    if is_a(source, str):
        source = source.lstrip(" \t")
    code = source if is_a(source, CodeType) else compile_source(domain, source, "eval")
    if code.co_freevars:
        raise TypeError("code object passed to eval() may not contain free variables")
    return domain.machine.run_code(code, globals_given, locals_given)


def compile_source(domain: Any, source: Any, mode: str) -> CodeType:
    if not is_a(source, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{mode}() arg 1 must be a string, bytes or code object")
    future = domain.machine.frame.code.co_flags & FUTURE_FLAGS if domain.machine.frame is not None else 0
    return domain.native(compile, source, "<string>", mode, future, True)


FUTURE_FLAGS = 0x1000000 | 0x100000  # annotations and barry_as_FLUFL, the two that still change compilation


@form(builtins.compile)
def compile_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) < 5 and not kwargs.get("dont_inherit"):
        flags = args[3] if len(args) > 3 else kwargs.get("flags", 0)
        frame = domain.machine.frame
        if frame is not None and is_a(flags, int):
            kwargs = {**kwargs, "flags": flags | frame.code.co_flags & FUTURE_FLAGS, "dont_inherit": True}
            args = args[:3]
    return domain.native(compile, *args, **kwargs)


@form(builtins.__import__)
def import_(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = ("name", "globals", "locals", "fromlist", "level")
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > 5 or len(given) < len(args) + len(kwargs) or "name" not in given or not given.keys() <= set(names):
        return domain.native(builtins.__import__, *args, **kwargs)  # raises
    return domain.import_module(
        given["name"], given.get("globals"), given.get("locals"), given.get("fromlist") or (), given.get("level", 0)
    )


@form(sys.exc_info)
def exc_info(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    exc = domain.machine.handled()
    if exc is None:
        return sys.exc_info()
    return type(exc), exc, exc.__traceback__


@form(sys.exception)
def exception(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    exc = domain.machine.handled()
    return sys.exception() if exc is None else exc


def observer_form(native: Any) -> None:
    @form(native)
    def call(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if args and args[0] is not None:
            raise InterpreterError(f"what sys.{native.__name__} sets would see the machine's frames, not the program's")
        return domain.native(native, *args, **kwargs)


observer_form(sys.setprofile)


@form(sys.settrace)
def settrace(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """See tracing.py."""
    if kwargs or len(args) != 1:
        return domain.native(sys.settrace, *args, **kwargs)  # raises
    machine = domain.machine
    if domain.observes and args[0] is not None:
        raise InterpreterError("sys.settrace would see the machine's frames, not the program's")
    machine.tracer, machine.slow = args[0], machine.checks or args[0] is not None
    if sys.gettrace() is not None:
        sys.settrace(None)  # natively; `enter` sets it natively again at the end
    return None


@form(sys.gettrace)
def gettrace(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if args or kwargs or domain.machine.tracer is None:
        return domain.native(sys.gettrace, *args, **kwargs)
    return domain.machine.tracer


@form(sys.getrecursionlimit)
def getrecursionlimit(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return domain.machine.depth_limit


@form(sys.setrecursionlimit)
def setrecursionlimit(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return domain.machine.set_depth_limit(*args, **kwargs)


@form(sys._getframe)
def getframe(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) > 1:
        return domain.native(sys._getframe, *args, **kwargs)  # raises
    depth = domain.native(operator.index, args[0]) if args else 0
    if not -(1 << 31) <= depth < 1 << 31:
        return domain.native(sys._getframe, depth)  # raises
    return domain.machine.native_frame(depth)


if sys.version_info >= (3, 12):

    @form(sys._getframemodulename)
    def getframemodulename(domain: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        frame = domain.machine.frame_at(args[0] if args else kwargs.get("depth", 0))
        if frame is None:
            return None
        return frame.globals.get("__name__") if frame.function is None else frame.function.__module__
