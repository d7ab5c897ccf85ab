"""A process group as torch's functional collectives find it: by a name, and with the waiting of this project.

``_c10d_functional`` takes a name, asks torch for the group of that name, and waits for what the group gives back. A
Channel is such a group. It hands a collective on to the real one, counts what that sends, and waits as rendezvous.py
does, whoever runs the node: eager torch, or what a backend made of it.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from moebius.lowering.distribution.torch_private import register_group

PURPOSES = ("header", "dispatch", "combine")


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since :meth:`reset`, by purpose, and how many collectives that took.

    reduce: of gradients, as a ring of ranks sends them: each all-reduce of n bytes over P ranks is 2 n (P − 1) / P.
    """

    header: int = 0
    dispatch: int = 0
    combine: int = 0
    reduce: int = 0
    collectives: int = 0
    lock: ClassVar[threading.Lock] = threading.Lock()

    def add(self, purpose: str, sent: int) -> None:
        """One more collective, which sent so many bytes to other ranks."""
        with self.lock:
            setattr(self, purpose, getattr(self, purpose) + sent)
            self.collectives += 1

    def add_rows(self, purpose: str, sent: Tensor, out: list[int], rank: int) -> None:
        """The same of rows, ``out`` of them to each rank, this one among them."""
        self.add(purpose, prod(sent.shape[1:]) * sent.element_size() * (sum(out) - out[rank]))

    @property
    def total(self) -> int:
        return self.header + self.dispatch + self.combine + self.reduce

    def reset(self) -> None:
        for item in fields(self):
            setattr(self, item.name, 0)


traffic = Traffic()


def channel_name(purpose: str, group_name: str) -> str:
    """By which a functional collective finds the Channel: the same on all ranks where the group's name is."""
    return f"{purpose} over {group_name}"


class Waiting(dist.Work):
    """The wait for a collective. done: waits for it."""

    def __init__(self, done: Any):
        super().__init__()
        self.done = done

    def wait(self, timeout: Any = None) -> bool:
        self.done()
        return True


class Channel(dist.ProcessGroup):
    """A group (rendezvous.py) for exchanges of one purpose."""

    def __init__(self, group: Any, purpose: str, name: str):
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group, self.purpose = group, purpose
        CHANNELS[channel_name(purpose, name)] = self
        register_group(channel_name(purpose, name), self)

    def getBackendName(self) -> str:
        return "moebius"

    def alltoall_base(  # type: ignore[override]
        self, received: Tensor, sent: Tensor, back: list[int], out: list[int], options: Any
    ) -> Waiting:
        traffic.add_rows(self.purpose, sent, out, self.rank())
        group = self.group
        group.half |= self.purpose == "dispatch"
        group.pending += 1
        work = group.begin(received, sent, back, out)

        def done() -> None:
            (group.meet if self.purpose == "header" else group.wait)(work)
            group.pending -= 1
            group.half &= self.purpose != "combine" or group.pending > 0

        return Waiting(done)


CHANNELS: dict[str, Channel] = {}
