"""Functions and generators (random ones, too) that a step made and that live on: the code that makes them again."""

from __future__ import annotations

import random
import types

from moebius.interpreter import Frame, is_kind

from ..values.values import CannotRebuild
from .continuation_code import generator_code
from .interfaces import Builder
from .resume import suspended_state


def function_value(emitter: Builder, function: types.FunctionType) -> str:
    """A function that the step made: the same code over the same cells."""
    closure = "None"
    if function.__closure__:
        cells = ", ".join(emitter.value(c) for c in function.__closure__)
        closure = f"({cells},)"
    defaults = "None" if function.__defaults__ is None else emitter.value(tuple(function.__defaults__))
    name = emitter.assign(
        function,
        f"m_types.FunctionType({emitter.constant(function.__code__)}, {emitter.constant(function.__globals__)}, "
        f"{function.__name__!r}, {defaults}, {closure})",
    )
    emitter.lines.append(f"{name}.__qualname__ = {function.__qualname__!r}")
    annotate = getattr(function, "__annotate__", None)  # (since 3.14: what makes annotations once they are asked for)
    if annotate is not None:
        emitter.lines.append(f"{name}.__annotate__ = {emitter.value(annotate)}")
    for attribute in ("__kwdefaults__", *(() if annotate is not None else ("__annotations__",))):
        items = getattr(function, attribute)
        if items or emitter.objects.is_new(items):
            if not emitter.objects.is_known(items):
                emitter.objects.made(items)
            emitter.lines.append(f"{name}.{attribute} = {emitter.value(items)}")
    as_made = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    for attribute in ("__doc__", "__module__"):  # functools.wraps sets them
        if (own := getattr(function, attribute)) != getattr(as_made, attribute):
            emitter.lines.append(f"{name}.{attribute} = {emitter.value(own)}")
    emitter.fill_namespace(name, function)
    return name


def random_value(emitter: Builder, generator: random.Random) -> str:
    """A generator of random numbers that the step made: it goes on where the step has left it."""
    name = emitter.assign(generator, f"{emitter.constant(random.Random)}.__new__({emitter.constant(random.Random)}, 0)")
    state = emitter.constant((*generator.getstate()[:2], None))
    emitter.lines.append(f"{name}.setstate({state})")
    emitter.fill_namespace(name, generator)
    return name


def generator_value(emitter: Builder, generator: types.GeneratorType, frame: Frame) -> str:
    """A generator that is suspended (or not started): one from code that begins where this one stands."""
    if generator.gi_running or any(is_kind(v, BaseException) for v in frame.stack):
        raise CannotRebuild("a generator is alive that runs, or handles an exception")
    if generator.gi_frame is None:
        return emitter.assign(generator, "iter(())")
    state = suspended_state(frame)
    names = {n: i for i, n in enumerate(frame.program.localsplus)}
    cells = [emitter.value(frame.locals[names[n]]) for n in state.cells]
    values = [emitter.value(frame.locals[names[n]]) for n in state.locals]
    stack = [*frame.stack, None] if frame.suspended else frame.stack
    values += [emitter.value(v) for i, v in enumerate(stack) if i not in state.nulls]
    make = emitter.constant(generator_code(frame.code, state))
    closure = f"({', '.join(cells)},)" if cells else "None"
    text = f"m_types.FunctionType({make}, {emitter.constant(frame.globals)}, {frame.code.co_name!r}, None, {closure})"
    text += f"({', '.join(values)})"
    name = emitter.assign(generator, text)
    if frame.suspended:
        emitter.lines.append(f"next({name})")  # up to where it is suspended: code that only yields again
    emitter.lines.append(f"{name}.__name__, {name}.__qualname__ = {generator.__name__!r}, {generator.__qualname__!r}")
    return name
