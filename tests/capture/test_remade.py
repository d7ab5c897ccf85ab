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


# What reaches itself again through parts that it cannot be made without: the path leads back to the very object.
def recursive_function(x):
    def walk():
        return walk

    return walk, lambda it: it()


def functions_in_iteration(x):
    def there():
        return back

    def back():
        return there

    return there, lambda it: it()()


def default_list(x):
    held = []

    def with_default(*, items=held):
        return items

    held.append(with_default)
    return with_default, lambda it: it()[0]


def tuple_in_its_list(x):
    items = []
    pair = (items, x + 1)
    items.append(pair)
    return pair, lambda it: it[0][0]


class Holder:
    def itself(self):
        return self


def bound_to_holder(x):
    holder = Holder()
    holder.walk = holder.itself
    return holder.walk, lambda it: it().walk


def partial_of_itself(x):
    held = []
    made = functools.partial(list, held)
    held.append(made)
    return made, lambda it: it()[0]


def key_of_its_dict(x):
    def table():
        return found

    found = {table: x}
    return table, lambda it: next(iter(it()))


@pytest.mark.parametrize(
    "make",
    [
        recursive_function,
        functions_in_iteration,
        default_list,
        tuple_in_its_list,
        bound_to_holder,
        partial_of_itself,
        key_of_its_dict,
    ],
    ids=lambda f: f.__name__,
)
def test_what_reaches_itself_is_one_object(make):
    captured = capture(lambda x: (x * 2, *make(x)), backend="eager")
    for _ in range(2):
        _, made, around = captured(torch.ones(2))
        assert around(made) is made
    assert stats(captured).graphs == 1 and not stats(captured).breaks
