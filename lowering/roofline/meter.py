"""Counts what a call of a lowered graph runs: each operator's operations and bytes, backward's too.

The graph runs as always, under a mode that sees its operators. Bytes are what an operator reads and writes when it runs
alone, as torch's do; a view moves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.graph import CapturedGraph, ExpertRegion, Lowered
from moebius.lowering.planner.work import Work
from moebius.lowering.roofline.experts import Layer
from moebius.lowering.torch_private import DispatchMode, flops_of, is_view

COUNTED = 2  # calls of a graph that are counted, the last of them stays: the first may run what later ones do not
ROWS_ONLY = frozenset({"embedding", "index", "index_select", "gather"})  # read what the result is made of, not all
OVERWRITES = frozenset({"copy_", "fill_", "zero_"})  # write a tensor without reading it


@dataclass
class Operation:
    """One operator that ran. layer: of one that is a layer of experts; place: which of the call's layers it is."""

    name: str
    work: Work
    layer: Layer | None = None
    place: int = -1


@dataclass
class Count:
    """What one graph runs. calls: how often it ran; seconds: CPU time of those that were not counted. foreign: whether
    a backend's code runs it, of which little can be seen."""

    file: str
    line: int
    name: str
    regions: list[ExpertRegion]
    foreign: bool = False
    calls: int = 0
    operations: list[Operation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Counting(DispatchMode):
    """The mode: notes each operator after it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.layers: list[int] = []  # where the weights of each layer lie, in the order of forward

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if not is_view(func):
            packet = func.overloadpacket
            if packet is torch.ops.moebius.experts:
                self.note_forward(args, found)
            elif packet is torch.ops.moebius.experts_backward:
                self.note_backward(args)
            else:
                flops = flops_of(func, args, kwargs, found)
                kind = ("attention" if "attention" in str(packet) else "dense") if flops else "moves"
                moved = bytes_of(packet.__name__, args, kwargs, found)
                self.operations.append(Operation(packet.__name__, Work(kind, flops, moved, 1)))
        return found

    def note_forward(self, args: tuple, found: Any) -> None:
        x_TD, gate_up, down, index_TK = args[:4]
        layer = layer_of(x_TD, gate_up, down, index_TK.shape[1], found[3], args[9], "".join(args[11:]))
        self.layers.append(gate_up.data_ptr())
        self.operations.append(Operation("experts", layer.forward(), layer, len(self.layers) - 1))

    def note_backward(self, args: tuple) -> None:
        _, x_TD, _, _, offsets, gate_up, down, _, _, _, top_k, _, _, save, _, precision, needs = args
        layer = replace(layer_of(x_TD, gate_up, down, top_k, offsets, save, precision), needs=tuple(needs[:3]))
        place = self.layers.index(gate_up.data_ptr()) if gate_up.data_ptr() in self.layers else -1
        self.operations.append(Operation("experts, backward", layer.backward(), layer, place))


def layer_of(
    x_TD: Tensor, gate_up: Tensor, down: Tensor, top_k: int, offsets: Tensor, save: str, precision: str
) -> Layer:
    busy = int((offsets.diff() > 0).sum())
    named = precision if precision in ("fp8", "mxfp8") else ""
    return Layer(x_TD.shape[0], top_k, x_TD.shape[1], down.shape[2], gate_up.shape[1], gate_up.shape[0], busy,
                 x_TD.element_size(), save, named)


def bytes_of(name: str, args: tuple, kwargs: dict[str, Any], found: Any) -> float:
    """What an operator reads and writes: each tensor once, an expanded one as far as it lies in memory."""
    given = {id(t): t for t in tensors_in((*args, *kwargs.values()))}
    made = {id(t): t for t in tensors_in((found,))}
    written = sum(map(size, made.values()))
    if name in ROWS_ONLY:
        return 2.0 * written
    read = sum(size(t) for key, t in given.items() if not (name in OVERWRITES and key in made))
    return float(read + written)


def size(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in memory."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ():
        count *= length if stride or not length else 1
    return count * tensor.element_size()


def tensors_in(values: tuple | list) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(value)
    return found


class Meter:
    """Counts the graphs that are lowered while it is on (``METER.on``)."""

    def __init__(self) -> None:
        self.on = False
        self.counts: list[Count] = []

    def around(self, graph: CapturedGraph, lowered: Lowered, foreign: bool) -> Callable[..., tuple]:
        """What is to run in the place of ``lowered.fn``."""
        count, run = Count(graph.file, graph.line, graph.name, lowered.regions, foreign), lowered.fn
        self.counts.append(count)

        def metered(*inputs: Any) -> tuple:
            count.calls += 1
            if count.calls > COUNTED:
                start = time.process_time()
                found = run(*inputs)
                count.seconds.append(time.process_time() - start)
                return found
            mode = Counting()
            with mode:
                found = run(*inputs)
            count.operations = mode.operations
            return found

        return metered


METER = Meter()
