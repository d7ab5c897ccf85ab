"""Annotations: evaluated where Python evaluates them, at the ``def`` or, since 3.14, once somebody asks; only then."""

from __future__ import annotations

import functools
import sys
import typing
from typing import Any

import pytest
import torch

from moebius import capture

LATE = sys.version_info >= (3, 14)
# (this file's own annotations are strings)
PROGRAM = """
def say(tag, value):
    log.append(tag)
    return value

def made(x):
    def inner(y: say("y", int), *, k: say("k", float) = 1) -> say("returns", int):
        return y * 2
    log.append("after")
    return inner(x), inner

def generic(x):
    def inner[T](y: T) -> say("returns", int):
        return y * 2
    log.append("after")
    return inner(x), inner

def asked(x):
    out, inner = made(x)
    log.append(sorted(inner.__annotations__))
    return out, inner

def wrapped(x):
    _, inner = made(x)

    @functools.wraps(inner)
    def outer(*args):
        return inner(*args) + 1

    log.append("wrapped")
    return outer(x), outer

def of_a_class(x):
    class Point:
        a: say("a", int) = 2
    log.append("after")
    return x * Point.a, None

def asked_of_another(x):
    log.append(sorted(module_level.__annotations__))
    return module_level(x), None

def module_level(y: say("module y", int)) -> say("module returns", int):
    return y * 3
"""
NAMES = ["made", "asked", "wrapped", "of_a_class", "asked_of_another"] + ["generic"] * (sys.version_info >= (3, 12))


def lived(name: str, captures: bool) -> list[Any]:
    namespace: dict[str, Any] = {"log": [], "functools": functools}
    source = PROGRAM if "generic" in NAMES else PROGRAM.replace("inner[T](y: T)", "inner(y)")
    exec(compile(source, "<program>", "exec", dont_inherit=True), namespace)
    step = capture(namespace[name], backend="eager") if captures else namespace[name]
    log, shown = namespace["log"], []
    for number in range(3):
        log.clear()
        out, inner = step(torch.full((2,), float(number)))
        shown += [out.tolist(), list(log)]
        if inner is not None:
            shown += [{k: str(v) for k, v in inner.__annotations__.items()}, inner.__name__, list(log)]
    return shown


@pytest.mark.parametrize("name", NAMES)
def test_they_are_evaluated_when_plain_python_does(name: str) -> None:
    assert lived(name, True) == lived(name, False)


@pytest.mark.skipif(not LATE, reason="evaluated at the def before 3.14")
def test_a_captured_function_may_name_what_comes_later() -> None:
    namespace: dict[str, Any] = {"capture": capture}
    exec(compile("@capture\ndef step(x: Batch) -> int: return x", "<program>", "exec", dont_inherit=True), namespace)
    step = namespace["step"]
    with pytest.raises(NameError, match="Batch"):
        _ = step.__annotations__
    namespace["Batch"] = float
    assert typing.get_type_hints(step) == step.__annotations__ == {"x": float, "return": int}


def test_a_captured_functions_own_annotations() -> None:
    @capture
    def step(x: int) -> float:
        return x

    assert step.__annotations__ == {"x": "int", "return": "float"}
    step.__annotations__ = {"x": "str"}
    assert step.__annotations__ == {"x": "str"} and step.__wrapped__.__annotations__["x"] == "int"
    assert functools.wraps(step)(lambda x: x).__annotations__
