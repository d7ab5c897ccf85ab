"""Many ranks in one process: the exchange operators under torch's LocalTensorMode.

LocalTensorMode runs one program for all ranks, each tensor holding every rank's value; it runs ordinary operators rank
by rank. An exchange operator is opaque to it, and its ranks need one another: here each rank's call runs on a thread
of its own, with the operator's own code, and only the collectives are replaced, by a meeting of the threads.
"""
from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from moebius.lowering.distribution import exchange, expert_parallel
from moebius.lowering.distribution.torch_private import local_sizes, local_tensor_types, tree_map

LocalTensor: Any
LocalTensor, LocalTensorMode = local_tensor_types()

OPERATORS = (
    exchange.route, exchange.send_rows, exchange.return_rows, exchange.own_experts, exchange.pad_experts,
    exchange.reached_experts, expert_parallel.own_slots,
)


class Meeting:
    """Where the threads of all ranks leave what they send."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks)
        self.left: dict[int, Any] = {}

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        """What every rank left, by rank. Each takes what it needs before it comes to the next exchange."""
        self.left[rank] = value
        self.barrier.wait()
        everything = dict(self.left)
        self.barrier.wait()
        return everything


class SimulatedGroup:
    """An exchange.Group among threads."""

    name, half = "simulated ranks", False

    def __init__(self, rank: int, ranks: int, meeting: Meeting):
        self.me, self.ranks, self.meeting, self.meetings = rank, ranks, meeting, 0

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.ranks

    def all_to_all(self, received: Tensor, sent: Tensor, back: list[int], out: list[int]) -> None:
        pieces = self.meeting.exchange(self.me, sent.split(out))
        mine = [pieces[source][self.me] for source in range(self.ranks)]
        assert [len(piece) for piece in mine] == back
        torch.cat(mine, out=received)

    def meet(self, received: Tensor, sent: Tensor, place: str, owed: int) -> None:
        self.all_to_all(received, sent, [1] * self.ranks, [1] * self.ranks)

    def promise(self) -> None:
        pass  # a group lives for one operator: backward meets again

    def redeem(self, meeting: int) -> bool:
        return False

    def tell(self, words: str) -> list[str]:
        told = self.meeting.exchange(self.me, words)
        return [told[rank] for rank in range(self.ranks)]


def of_rank(value: Any, rank: int) -> Any:
    """What one rank has of a value: of a tensor, or of a size that is another one on each."""
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank]
    return local_sizes(value).get(rank, value) if isinstance(value, torch.SymInt) else value


def run_ranks(mode: Any, operator: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One operator for all ranks of the mode. What fails on a rank is raised here."""
    ranks = len(mode.ranks)
    meeting = Meeting(ranks)
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        exchange.simulated.group = SimulatedGroup(rank, ranks, meeting)
        try:
            own = tree_map(lambda v: of_rank(v, rank), (args, kwargs))
            with torch.no_grad():
                results[rank] = operator(*own[0], **own[1])
        except BaseException as failure:
            if not isinstance(failure, threading.BrokenBarrierError):
                failures.append(failure)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if isinstance(results[0], tuple | list):
        return type(results[0])(LocalTensor(dict(enumerate(values))) for values in zip(*results, strict=True))
    return LocalTensor(dict(enumerate(results)))


def simulate() -> None:
    """From now on the exchange operators work under LocalTensorMode, whose ranks are those of the experts' group."""
    for operator in OPERATORS:
        operator.register_torch_dispatch(LocalTensorMode, run_ranks)
