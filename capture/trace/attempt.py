"""One attempt at capture as its parts see it: what branches on data and operators that may fail ask of it."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from moebius.interpreter import Machine

from ..bytecode import counting
from ..heap.objects import Objects
from ..python.domain import TrackingDomain
from ..tensors.gradients import Gradients
from ..tensors.graphs import GraphWriter
from ..tensors.tensors import TensorOperations
from .assumptions import Assumptions
from .frame_snapshots import FrameSnapshot
from .request import Request


class Attempt(Protocol):
    """The class itself, which says what each of these is, stands above its parts (``trace.Trace``)."""

    domain: TrackingDomain
    counter: counting.Counter
    objects: Objects
    tensors: TensorOperations
    gradients: Gradients
    writer: GraphWriter
    assumptions: Assumptions
    request: Request
    result: Any
    tried: Counter[Any]

    @property
    def machine(self) -> Machine: ...
    def frames(self) -> list[FrameSnapshot]: ...
