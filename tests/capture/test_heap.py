"""Programs whose layers, cached functions and recomputed calls read state: attributes of parameters, flags on buffers,
what the step sets before it uses a layer again, what it changes before backward."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moebius import capture, stats

CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("CURRENT", default=2)


class Scaled(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", torch.ones(2))
        self.w.scale, self.b.kind = scale, scale
        if scale == 5:
            self.w.special = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.w.scale


class Special(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * (5 if hasattr(self.w, "special") else 2)


class ByDict(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.w.__dict__["scale"]


class Flagged(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b * self.b.kind


class Model(nn.Module):
    def __init__(self, kind: type[Scaled]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(scale) for scale in (2, 3, 5, 7, 5))


def through(model: Model, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("kind", "found"),
    [(Scaled, 1050), (Special, 200), (ByDict, 1050), (Flagged, 23)],
    ids=["value", "hasattr", "dict", "buffer"],
)
def test_layers_whose_tensors_have_attributes(kind: type[Scaled], found: float) -> None:
    model, step = Model(kind), capture(through, fullgraph=True)
    for _ in range(3):
        assert step(model, torch.ones(2)).tolist() == [found, found]


def test_an_attribute_that_the_step_sets_before_the_layer_runs() -> None:
    def set_and_run(model: Model, x: torch.Tensor) -> torch.Tensor:
        model.layers[1].w.scale = 7
        return model.layers[1](model.layers[0](x))

    step = capture(set_and_run, fullgraph=True)
    for _ in range(3):
        model = Model(Scaled)
        assert step(model, torch.ones(2)).tolist() == [14, 14]
        assert model.layers[1].w.scale == 7


class Place:
    __slots__ = ("v",)


def cell() -> tuple[Callable[[], int], Callable[[int], None]]:
    value = 2

    def get() -> int:
        return value

    def put(new: int) -> None:
        nonlocal value
        value = new

    return get, put


def places() -> Iterator[Any]:
    """A name, what reads a place, and what sets it."""
    slot, weight, (get, put) = Place(), nn.Parameter(torch.ones(())), cell()
    slot.v, weight.scale = 2, 2
    yield "context variable", CURRENT.get, CURRENT.set
    yield "cell", get, put
    yield "slot", lambda: slot.v, functools.partial(setattr, slot, "v")
    yield "tensor attribute", lambda: weight.scale, functools.partial(setattr, weight, "scale")
    yield "requires_grad", lambda: 2 + 5 * (not weight.requires_grad), lambda v: weight.requires_grad_(v != 7)


@pytest.mark.parametrize("number", range(5), ids=[name for name, *_ in places()])
def test_a_cached_function_that_reads_what_the_step_has_set(number: int) -> None:
    _, read, put = list(places())[number]

    @functools.lru_cache
    def cached() -> int:
        return read()

    def step(x: torch.Tensor) -> torch.Tensor:
        put(7)
        return x * cached()

    captured = capture(step)
    try:
        for _ in range(3):
            assert captured(torch.ones(2)).tolist() == [7, 7]
    finally:
        CURRENT.set(2)


class Other:
    def by(self) -> int:
        return 7


class Held:
    level = 2

    def __init__(self) -> None:
        self.count, self.number = Counter(v=2), ctypes.c_int(2)

    def by(self) -> int:
        return 2


def scaled(v: int = 2) -> int:
    return v


WAYS: dict[str, tuple[Callable[[Held], int], Callable[[Held, int], Any]]] = {
    "class attribute": (lambda h: h.level, lambda h, v: setattr(Held, "level", v)),
    "context variable": (lambda h: CURRENT.get(), lambda h, v: CURRENT.set(v)),
    "function default": (lambda h: scaled(), lambda h, v: setattr(scaled, "__defaults__", (v,))),
    "Counter": (lambda h: h.count["v"], lambda h, v: h.count.update({"v": v - h.count["v"]})),
    "ctypes": (lambda h: h.number.value, lambda h, v: setattr(h.number, "value", v)),
    "os.environ": (lambda h: int(os.environ.get("MOEBIUS_V", "2")), lambda h, v: os.environ.update(MOEBIUS_V=str(v))),
    "__class__": (lambda h: h.by(), lambda h, v: setattr(h, "__class__", Held if v == 2 else Other)),
    "__dict__": (lambda h: h.__dict__.get("k", 2), lambda h, v: setattr(h, "__dict__", {**h.__dict__, "k": v})),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Any, held: Held) -> torch.Tensor:
        ctx.look, ctx.held = look, held
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.look(ctx.held), None, None


@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_what_backward_reads_again_is_what_the_step_has_set(way: str, how: str) -> None:
    look, put = WAYS[way]

    def part(x: torch.Tensor, held: Held) -> torch.Tensor:
        return torch.sin(x * look(held)) * 3

    def step(x: torch.Tensor, held: Held) -> torch.Tensor:
        if how == "function":
            y = Twice.apply(x, look, held)
        else:
            y = checkpoint(part, x, held, use_reentrant=how == "reentrant")
        put(held, 7)
        y.sum().backward()
        return y.detach()

    captured = capture(step)
    for n in range(3):
        seen = []
        for run in (step, captured):
            held, x = Held(), (torch.arange(3.0) + n).requires_grad_()
            put(held, 2)
            seen.append((run(x, held), x.grad))
        put(Held(), 2)
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b)


def test_an_entry_of_a_tensors_dict_that_goes_before_an_operator_fails() -> None:
    def step(layer: Scaled, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        w, y = layer.w, x * 2
        try:
            w.__dict__.pop("scale")
            y = y + torch.ones(3)[index]
        except IndexError:
            y = y - 1
        return y * (2 if hasattr(layer.w, "scale") else 5)

    captured = capture(step)
    for last, found in ((1, 15), (9, 5), (1, 15)):
        layer = Scaled(2)
        assert captured(layer, torch.ones(2), torch.tensor([0, last])).tolist() == [found, found]
        assert not hasattr(layer.w, "scale")


@pytest.mark.parametrize("backend", ["moebius", "eager", "aot_eager"])
def test_a_typing_generic_after_the_step_has_changed_something(backend: str) -> None:
    """``typing`` keeps what it makes in a ``functools.lru_cache``."""
    held = {"n": 0}

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        held["n"] += 1
        kind = typing.Optional[int]  # noqa: UP007, UP045
        if backend != "moebius":
            return (x * w).sin() * len(typing.get_args(kind))
        return torch.autograd.grad((x * w).sin().sum(), [w], create_graph=True)[0] * len(typing.get_args(kind))

    captured = capture(step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            w = torch.ones(2, requires_grad=True)
            torch.testing.assert_close(captured(w, torch.ones(2)), step(w, torch.ones(2)))
    assert held["n"] == 6 and stats(captured).graphs
