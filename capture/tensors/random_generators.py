"""Generators of random numbers in the graph: one that was there before is an input, known by its device; one that the
step makes is a node, as are the seed and the state that the step reads or sets.

The graph draws in the program's order, so that it does not matter whether two of its generators are one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from moebius.interpreter import is_kind
from moebius.lowering.step.random_states import make_generator, seed_all, seed_generator, set_state, state_of

from ..guards.sources import Static
from ..heap.objects import Objects
from ..values.numbers import Number
from ..values.values import Break, TensorProxy
from .graphs import ELSEWHERE
from .tensors import TensorOperations

REASON = "random generator"
NATIVELY = "it runs natively; draw before the step"
SEED_OUTSIDE = "seed outside of the step"


def is_on(device: torch.device, generator: torch.Generator) -> bool:
    return generator.device == device


class RandomGenerators:
    """Those of one trace. nodes: by their ids, with what keeps these alive."""

    def __init__(self, objects: Objects, tensors: TensorOperations):
        self.objects, self.tensors = objects, tensors
        self.guards, self.writer = tensors.guards, tensors.writer
        self.nodes: dict[int, tuple[torch.Generator, fx.Node]] = {}
        self.writer.generator = self.node
        self.makers: dict[Any, Callable[..., Any]] = {torch.Generator: self.make}
        self.functions: dict[Any, Callable[..., Any]] = {
            torch.manual_seed: self.seed_all,
            torch.Generator.manual_seed: self.seed,
            torch.Generator.get_state: self.state,
            torch.Generator.set_state: self.set_state,
        }

    def node(self, generator: torch.Generator) -> fx.Node:
        """The generator in the graph. Modules in which one is used are interpreted each time."""
        self.require(f"as an operator's argument: {ELSEWHERE}", NATIVELY)
        known = self.nodes.get(id(generator))
        if known is None:
            source = self.objects.need(generator).source
            held = partial(is_on, generator.device)
            self.guards.holds(source.name, f"generates on {generator.device}", held, source)
            known = self.nodes[id(generator)] = generator, self.tensors.add_input(generator, None, source).node
        return known[1]

    def require(self, what: str, hint: str) -> None:
        if not self.tensors.runs_once:
            raise Break(REASON, what, hint)
        self.objects.note("random generator")

    def write(self, function: Callable[..., Any], args: tuple) -> fx.Node:
        self.require(f"{function.__name__}: {ELSEWHERE}", SEED_OUTSIDE)
        return self.writer.call(function, *args)

    def make(self, device: Any = "cpu") -> torch.Generator:
        """``torch.Generator(device)``; its seed is torch's default."""
        if not is_kind(device, str | torch.device):
            raise Break(REASON, "torch.Generator of what is no device", "the error is raised natively")
        made: torch.Generator = self.objects.made(torch.Generator(device))
        self.nodes[id(made)] = made, self.write(make_generator, (made.device,))
        return made

    def seed(self, generator: torch.Generator, seed: Any) -> torch.Generator:
        self.write(seed_generator, (generator, self.number(seed)))
        return generator

    def seed_all(self, seed: Any) -> torch.Generator:
        self.write(seed_all, (self.number(seed),))
        return self.objects.enter(torch.default_generator, Static("torch.default_generator", torch.default_generator))

    def number(self, seed: Any) -> Any:
        """A seed is an int, or a number of the graph that is one."""
        if is_kind(seed, Number) and seed.kind is int:
            return seed if seed.node is not None else seed.settled()
        if type(seed) is not int and not is_kind(seed, torch.SymInt):
            raise Break(REASON, "seeded by what is no int", "seed with an int")
        return seed

    def state(self, generator: torch.Generator) -> TensorProxy:
        with self.tensors.mode:
            fake = torch.empty(generator.get_state().shape, dtype=torch.uint8, device="cpu")
        self.require(f"its state: {ELSEWHERE}", SEED_OUTSIDE)
        return self.tensors.record("call_function", state_of, (generator,), {}, fake)

    def set_state(self, generator: torch.Generator, state: Any) -> torch.Generator:
        if not is_kind(state, TensorProxy):
            raise Break(REASON, "its state becomes what is no tensor", "the error is raised natively")
        self.write(set_state, (generator, state))
        return generator
