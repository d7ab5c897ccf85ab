"""What the parts of this room ask of each other, and of the domain above them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import fx

from moebius.interpreter import Frame
from moebius.interpreter.protocols import Machine

from ..guards.recorder import GuardRecorder
from ..guards.sources import Source
from ..heap.heap import Heap
from ..heap.objects import Objects
from ..torch_facts.torch_fakes import FakeWorld
from ..values.values import Operations, TensorProxy
from .aliases import Aliases
from .graphs import GraphWriter


class Domain(Protocol):
    """What this room asks of the tracking domain, which stands above it."""

    machine: Machine
    objects: Objects

    @property
    def frame(self) -> Frame | None: ...
    @property
    def tensors(self) -> Any: ...
    @property
    def numbers(self) -> Any: ...
    @property
    def calls(self) -> Any: ...
    @property
    def loops(self) -> Any: ...
    @property
    def open_loops(self) -> Any: ...

    def truth(self, value: Any) -> bool: ...

    def unary(self, op: str, value: Any) -> Any: ...

    def binary(self, op: str, left: Any, right: Any) -> Any: ...

    def compare(self, op: str, left: Any, right: Any) -> Any: ...

    def call_function(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any: ...


class Texts(Protocol):
    """``python.texts.Texts``."""

    def computed(self, today: str, node: Any, sources: tuple[Source, ...], evaluate: Any) -> Any: ...


class TensorAssumptions(Protocol):
    """``trace.assumptions.Assumptions``."""

    apart: set[str]
    together: set[str]

    @property
    def recomputes(self) -> bool: ...

    @property
    def branches(self) -> bool: ...


Hooked = list[tuple[TensorProxy, fx.Node, tuple[fx.Node, ...]]]  # a tensor, its hooks' graph, and what that takes


class StateRead(Protocol):
    """What the code of a backward has read of older state (``regions.recompute.Read``): kind, owner, key and value."""

    @property
    def reads(self) -> list[tuple[str, Any, Any, Any]]: ...

    @property
    def heap(self) -> Heap: ...

    def stays(self) -> bool: ...


class Hooks(Protocol):
    """``regions.hooks.GradientHooks``."""

    hint: str
    interpreting: bool
    accumulated: TensorProxy | None

    def register(self, tensor: TensorProxy, hook: Any) -> Any: ...

    def are_registered(self) -> bool: ...

    def holds(self, hooks: Any) -> bool: ...

    def none_reached(self, what: str, leaves: Iterable[TensorProxy], reached: set[Any]) -> None: ...

    def none_come_later(self, leaf: TensorProxy, asked: Callable[[Any], Any] = ...) -> None: ...

    def in_backward(
        self, leaves: Iterable[TensorProxy], reached: set[Any], enter: Callable[[Any, Source], Any]
    ) -> Hooked: ...

    def after_accumulation(self, leaves: Iterable[TensorProxy], enter: Callable[[Any, Source], Any]) -> Hooked: ...

    def done(self, reached: set[Any], kept: bool) -> None: ...


class HookedGradients(Protocol):
    @property
    def hooks(self) -> Hooks: ...

    @property
    def in_a_hook(self) -> bool: ...


class TensorOperators(Operations, Protocol):
    """``tensors.TensorOperations``."""

    world: FakeWorld
    mode: Any
    writer: GraphWriter
    guards: GuardRecorder
    whole_step: bool
    recomputes: bool
    aliases: Aliases
    inputs: list[TensorProxy]
    proxies: dict[int, TensorProxy]
    of_fake: dict[int, TensorProxy]
    speculate: Callable[[Any], bool | None]

    @property
    def texts(self) -> Texts: ...

    @property
    def runs_once(self) -> bool: ...

    @property
    def gradients(self) -> HookedGradients: ...

    def add_input(self, real: Any, fake: Any, source: Source) -> TensorProxy: ...

    def symbolic_truth(self, value: Any) -> bool: ...

    def method(self, proxy: TensorProxy, name: str, args: tuple, kwargs: dict[str, Any]) -> Any: ...

    def record(self, op: str, target: Any, args: tuple, kwargs: dict[str, Any], fake: Any) -> Any: ...

    def on_fakes(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any: ...

    def wrap(self, fake: torch.Tensor, node: Any) -> TensorProxy: ...
