"""Functions and generators (random ones, too) that a step made and that live on: the code that makes them again."""

from __future__ import annotations

import random
import types

from moebius.interpreter import Frame, is_kind

from ..values.residual_program import Attribute, Build, Call, Expression, Literal, Statement, Write, method, tuple_of
from ..values.values import CannotRebuild
from .continuation_code import generator_code
from .interfaces import Builder
from .resume import suspended_state


def function_value(emitter: Builder, function: types.FunctionType) -> Expression:
    """A function that the step made: the same code over the same cells."""
    closure = tuple_of(map(emitter.value, function.__closure__ or ()))
    defaults = emitter.value(function.__defaults__ and tuple(function.__defaults__))
    code, globals_ = emitter.constant(function.__code__), emitter.constant(function.__globals__)
    name = emitter.assign(function, over_cells(code, globals_, function.__name__, closure, defaults))
    emitter.lines.append(Write(Attribute(name, "__qualname__"), Literal(function.__qualname__)))
    annotate = getattr(function, "__annotate__", None)  # (since 3.14: what makes annotations once they are asked for)
    if annotate is not None:
        emitter.lines.append(Write(Attribute(name, "__annotate__"), emitter.value(annotate)))
    for attribute in ("__kwdefaults__", *(() if annotate is not None else ("__annotations__",))):
        items = getattr(function, attribute)
        if items or emitter.objects.is_new(items):
            if not emitter.objects.is_known(items):
                emitter.objects.made(items)
            emitter.lines.append(Write(Attribute(name, attribute), emitter.value(items)))
    as_made = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    for attribute in ("__doc__", "__module__"):  # functools.wraps sets them
        if (own := getattr(function, attribute)) != getattr(as_made, attribute):
            emitter.lines.append(Write(Attribute(name, attribute), emitter.value(own)))
    emitter.fill_namespace(name, function)
    return name


def over_cells(code: Expression, globals_: str, name: str, cells: Build, defaults: Expression | None = None) -> Call:
    """The function of some code over its cells."""
    closure, none = cells if cells.items else None, Literal(None)
    return method("m_types", "FunctionType", code, globals_, Literal(name), defaults or none, closure or none)


def named_as(made: Expression, generator: types.GeneratorType) -> list[Statement]:
    """A generator that was made gets the names of the one that it is in the place of."""
    return [Write(Attribute(made, n), Literal(getattr(generator, n))) for n in ("__name__", "__qualname__")]


def random_value(emitter: Builder, generator: random.Random) -> Expression:
    """A generator of random numbers that the step made: it goes on where the step has left it."""
    kind = emitter.constant(random.Random)
    name = emitter.assign(generator, method(kind, "__new__", kind, Literal(0)))
    state = emitter.constant((*generator.getstate()[:2], None))
    emitter.lines.append(method(name, "setstate", state))
    emitter.fill_namespace(name, generator)
    return name


def generator_value(emitter: Builder, generator: types.GeneratorType, frame: Frame) -> Expression:
    """A generator that is suspended (or not started): one from code that begins where this one stands."""
    if generator.gi_running or any(is_kind(v, BaseException) for v in frame.stack):
        raise CannotRebuild("a generator is alive that runs, or handles an exception")
    if generator.gi_frame is None:
        return emitter.assign(generator, Call("iter", (Build("tuple"),)))
    state = suspended_state(frame)
    names = {n: i for i, n in enumerate(frame.program.localsplus)}
    cells = [emitter.value(frame.locals[names[n]]) for n in state.cells]
    values = [emitter.value(frame.locals[names[n]]) for n in state.locals]
    stack = [*frame.stack, None] if frame.suspended else frame.stack
    values += [emitter.value(v) for i, v in enumerate(stack) if i not in state.nulls]
    make = emitter.constant(generator_code(frame.code, state))
    function = over_cells(make, emitter.constant(frame.globals), frame.code.co_name, tuple_of(cells))
    name = emitter.assign(generator, Call(function, tuple(values)))
    if frame.suspended:
        emitter.lines.append(Call("next", (name,)))  # up to where it is suspended: code that only yields again
    emitter.lines += named_as(name, generator)
    return name
