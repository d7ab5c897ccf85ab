"""Objects that a step makes and gives back have everything on them that plain Python's have."""

from __future__ import annotations

import collections
import functools
import types

import pytest
import torch

from moebius import capture, stats


def annotated(x):
    def inner(a: int, *, b: str = "z") -> float:
        "what it says"
        return a

    inner.tag = x.shape[0]
    return inner


def wrapping(x):
    inner = annotated(x)

    @functools.wraps(inner)
    def outer(*args, **kwargs):
        return inner(*args, **kwargs)

    return outer


def renamed(x):
    def generator(y):
        yield y

    generator.__doc__, generator.__module__, generator.__name__ = "new", "elsewhere", "other"
    return generator


def partial(x):
    made = functools.partial(annotated(x), 3, b="q")
    made.tag = x.shape[0]
    return made


class Numbers(list):
    def __init__(self, *items):
        super().__init__(*items)
        self.note = "n"


def list_subclass(x):
    made = Numbers([x.shape[0]])
    made.append(7)
    made.extra = [1]
    return made


def ordered(x):
    made = collections.OrderedDict(a=1)
    made._metadata = {"version": x.shape[0]}
    return made


def state_dict(x):
    return collections.OrderedDict(LAYER.state_dict()), LAYER.state_dict()._metadata, LAYER.state_dict()


LAYER = torch.nn.Linear(2, 2)


def described(value):
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, value.tolist()
    if isinstance(value, types.FunctionType):
        names = (
            "__name__",
            "__qualname__",
            "__doc__",
            "__module__",
            "__annotations__",
            "__defaults__",
            "__kwdefaults__",
        )
        return kind, [getattr(value, n) for n in names], described(vars(value)), value.__code__
    if isinstance(value, functools.partial):
        return kind, described(value.func), value.args, value.keywords, vars(value)
    own = described(vars(value)) if getattr(value, "__dict__", None) else None
    if isinstance(value, dict):
        return kind, [(k, described(v)) for k, v in value.items()], own
    if isinstance(value, list | tuple):
        return kind, [described(v) for v in value], own
    return kind, value


@pytest.mark.parametrize(
    "make", [annotated, wrapping, renamed, partial, list_subclass, ordered, state_dict], ids=lambda f: f.__name__
)
def test_nothing_is_lost(make):
    def step(x):
        return x * 2, make(x)

    captured = capture(step)
    for rows in (2, 2, 3):
        x = torch.ones(rows, 2)
        (y, got), (z, want) = captured(x), step(x)
        assert torch.equal(y, z) and described(got) == described(want)
    assert stats(captured).graphs and not stats(captured).breaks
