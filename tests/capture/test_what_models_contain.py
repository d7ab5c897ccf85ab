"""What users' models contain: each is captured, or a graph break with a hint; the answer is plain Python's."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import inspect
import logging
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from moebius import capture, explain


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@dataclass
class Output:
    loss: torch.Tensor
    extra: dict | None = None


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, scale=2, **kwargs):
        return function(*args, **kwargs) * scale

    return wrapper


@doubled
def wrapped(x, offset=1):
    return x + offset


@torch.library.custom_op("moebius_tests::plus_one", mutates_args=())
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@plus_one.register_fake
def _(x):
    return torch.empty_like(x)


def forward_hooks(x):
    layer = LAYER
    handle = layer.register_forward_hook(lambda module, args, out: out * 2)
    y = layer(x)
    handle.remove()
    return y


def inference(x):
    with torch.inference_mode():
        return (x * 2).tolist()


def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y.float() + 1


def profiler(x):
    with torch.autograd.profiler.record_function("part"):
        y = x * 2
    return y + 1


@torch.profiler.record_function("whole")
def ranged(x):
    return x * 3


def decorated(x):
    return ranged(x) + 1


def decorated_in_the_step(x):
    mine = torch.autograd.profiler.record_function("mine")

    @mine
    def twice(x):
        return x * 2

    with mine as entered:
        y = twice(x)
    return y, entered is mine, mine.name, isinstance(mine, torch.profiler.record_function)


def custom_op(x):
    return plus_one(x) * 2


def wrappers(x):
    return wrapped(x, scale=3, offset=2) + functools.partial(wrapped, offset=5)(x)


def outputs(x):
    out = Output(x.sum(), extra={"x": x})
    pair = Pair(x * 2, 3)
    return out.loss, out.extra["x"], pair.first * pair.second, pair._replace(second=4).second


def enums(x):
    mode = Mode(1) if len(x) > 1 else Mode.SLOW
    return x * mode.value if mode is Mode.FAST else x, Mode["SLOW"].name


def ordered(x):
    table = collections.OrderedDict(a=x, b=x * 2)
    table.move_to_end("a")
    return list(table), sum(table.values())


def signatures(x):
    names = list(inspect.signature(wrapped).parameters)
    return x * len(names), names


def warned(x):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn(f"size {len(x)}", stacklevel=1)
    return x + len(found)


def checked(x):
    torch._check(x.shape[0] > 1, lambda: "too small")
    return x * 2


def logged(x):
    logging.getLogger("moebius.tests").debug("size %d", len(x))
    return x + 1


def contexts(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(CALLED.append, "left")
        y = x * 2
    with contextlib.nullcontext(3) as n, contextlib.suppress(KeyError):
        y = y + n
        raise KeyError("k")
    return y, len(CALLED)


def plumbing(x, **options):
    def inner(x, a=1, *rest, b=2, **more):
        return x * a + b + sum(rest) + len(more)

    return inner(x, 2, 3, 4, **{"b": 5, "c": 6, **options})


def checks(x):
    found = [isinstance(x, torch.Tensor), hasattr(x, "shape"), hasattr(x, "nothing"), callable(x.sum), type(x) is int]
    return x + sum(found), getattr(LAYER, "nothing", "default")


LAYER = nn.Linear(4, 4)
CALLED: list[str] = []
CASES = [
    forward_hooks,
    inference,
    autocast,
    profiler,
    decorated,
    decorated_in_the_step,
    custom_op,
    wrappers,
    outputs,
    enums,
    ordered,
    signatures,
    warned,
    checked,
    logged,
    contexts,
    plumbing,
    checks,
]


def shown(value):
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.dtype, value.requires_grad
    return [shown(v) for v in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_the_answer_is_plain_pythons(function):
    captured = capture(function)
    for rows in (3, 3, 4):
        x = torch.rand(rows, 4)
        CALLED.clear()
        want = function(x)
        CALLED.clear()
        assert shown(captured(x)) == shown(want)
    assert all(b.hint for b in explain(function)(torch.rand(3, 4)).breaks)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "function",
    [autocast, custom_op, wrappers, enums, ordered, plumbing, checks, profiler, decorated, outputs, checked],
    ids=lambda f: f.__name__,
)
def test_these_are_one_graph(function):
    report = explain(function)(torch.rand(3, 4))
    assert len(report.graphs) == 1 and not report.breaks
